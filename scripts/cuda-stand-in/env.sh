# Sourced by scripts that build the features `cuda` and `nccl` on a machine without NVIDIA's software.
stand_in=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export NVCC="$stand_in/nvcc" PATH="$stand_in:$PATH" CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=80
