#!/usr/bin/env bash
# Lints the code behind the features `cuda` and `nccl` on a machine without NVIDIA's software: a stand-in for nvcc writes empty kernels,
# which is enough to check types. Needs two minutes. What that code does is checked by scripts/check-nccl.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/cuda-stand-in/env.sh
cargo clippy --locked -p girandole-comm -p bin --features girandole-comm/nccl,bin/nccl --all-targets -- -D warnings
