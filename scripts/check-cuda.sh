#!/usr/bin/env bash
# Lints the code behind the features `cuda` and `nccl` on a machine without NVIDIA's software: a stand-in for nvcc writes empty kernels,
# which is enough to check types and not enough to link or run. Needs two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/nvcc" <<'NVCC'
#!/bin/sh
# Writes an empty file wherever nvcc would write one.
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.0"; exit 0 ;; esac
out= dir= source=
while [ $# -gt 0 ]; do
    case "$1" in
        -o | --output-file) out=$2; shift ;;
        --output-directory) dir=$2; shift ;;
        *.cu) source=$1 ;;
    esac
    shift
done
[ -n "$dir" ] && : > "$dir/$(basename "${source%.cu}").ptx"
case "$out" in
    "") ;;
    *.a) rm -f "$out"; ar cr "$out" ;;
    *) : > "$out" ;;
esac
NVCC
chmod +x "$folder/nvcc"

export NVCC="$folder/nvcc" PATH="$folder:$PATH" CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=80
cargo clippy --locked -p comm -p bin --features comm/nccl,bin/nccl --all-targets -- -D warnings
