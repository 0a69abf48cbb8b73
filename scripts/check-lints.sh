#!/usr/bin/env bash
# Checks that no modules import each other in a circle, and lints the workspace with the code behind the features `cuda`, `nccl` and
# `mpi`, on a machine without NVIDIA's software: a stand-in for nvcc writes empty kernels, which is enough to check types. Without Open
# MPI and MPICH the code for `mpi` is left out.
# What that code does is checked by scripts/check-nccl.sh and scripts/check-mpi.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v python3 >/dev/null; then python3 scripts/check-circles.py; else echo "no python3: circles of modules are not looked for"; fi
. scripts/features.sh
cargo clippy --workspace --all-targets --locked --features "$features" -- -D warnings
