#!/usr/bin/env bash
# Runs what the features `cuda` and `nccl` do on the side of the host, on a machine without a GPU: with stand-ins for NVIDIA's
# libraries, which run candle's kernels and NCCL's calls on the CPU (scripts/cuda-stand-in). The conformance suite for NCCL on
# 1 to 4 ranks and for CUDA tensors over TCP on 2 and 4, faults, and experiments. This shows that calls come in order, buffers
# live long enough and errors are named in time. It shows nothing of a GPU: that is scripts/gpu-check.sh's.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/cuda-stand-in/env.sh

libraries=$PWD/target/cuda-stand-in
scripts/cuda-stand-in/build.sh "$libraries"
export LIBRARY_PATH=$libraries LD_LIBRARY_PATH=$libraries
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

selection="--locked -p comm -p bin --features comm/nccl,bin/nccl"
# Quickly built: it is not their arithmetic that is tested.
for package in comm training sampler tensor-parallel candle-core candle-nn; do
    selection+=" --config profile.dev.package.$package.opt-level=1"
done
cargo test $selection --test cuda_conformance
# Each piece of work begins late, by up to 2 ms: what waits for nothing reads too early, and what is freed too early is gone.
program=$(cargo test $selection --test cuda_conformance --no-run --message-format json 2>/dev/null |
    grep -o '"executable":"[^"]*cuda_conformance[^"]*"' | cut -d'"' -f4)
for ranks in "nccl 3" "tcp 2"; do
    STAND_IN_JITTER=2000 GIRANDOLE_CASE="computing before and after" "$program" $ranks
done
