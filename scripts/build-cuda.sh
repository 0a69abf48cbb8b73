#!/usr/bin/env bash
# Makes the program with CUDA and NCCL on a machine that needs neither a GPU nor any software of NVIDIA's; see --help.
# It takes a quarter of an hour on 2 cores, too long for CI: there, `--help` alone is run, and scripts/check-lints.sh looks at
# the types.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)

usage() {
    cat <<'HELP'
Usage: scripts/build-cuda.sh [--folder DIR] [--compute-cap N]

Makes girandole with the features `cuda` and `nccl`, for x86-64 Linux. Neither a GPU nor CUDA has to be here: the compiler
comes from PyPI (nvidia-cuda-nvcc and what it needs, CUDA 13.0, about 100 MB). Run again, it does only what is left to do.

  --folder DIR      where everything goes (target/cuda)
  --compute-cap N   the oldest GPUs that shall run it: 75 for Turing, 80 for A100, 90 for H100 and so on (80, or
                    CUDA_COMPUTE_CAP). The driver compiles the kernels for the GPU it finds, once.

What comes out:

  DIR/girandole               the program
  DIR/girandole-conformance   checks collectives of CUDA tensors
  DIR/girandole-operations    checks operations on CUDA tensors; scripts/gpu-check.sh runs both
  DIR/girandole-cuda.tar.xz   all three and gpu-check.sh, to be carried to a machine with a GPU

The program starts on any machine whose glibc is not older than this one's, and opens NVIDIA's libraries when CUDA is asked for: the driver (580 or later), cuBLAS 13
and cuRAND 10, and NCCL for --backend nccl. It looks in LD_LIBRARY_PATH, beside itself, in /usr/local/cuda/lib64, and where
the system has libraries. Beside itself means

  python3 -m pip install --target DIR 'nvidia-cublas==13.0.*' 'nvidia-curand==10.4.0.*' nvidia-nccl-cu13
HELP
}

fail() {
    echo "error: $*" >&2
    exit 1
}

wrong() {
    echo "error: $*; see scripts/build-cuda.sh --help" >&2
    exit 2
}

folder=$repository/target/cuda
compute_cap=${CUDA_COMPUTE_CAP:-80}
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage && exit ;;
        --folder) [ -n "${2:-}" ] || wrong "--folder: give a folder"; mkdir -p "$2"; folder=$(cd "$2" && pwd); shift 2 ;;
        --compute-cap) compute_cap=${2:-}; shift $(($# > 1 ? 2 : 1)) ;;
        *) wrong "$1: not an option" ;;
    esac
done
[[ $compute_cap =~ ^[0-9]{2,3}$ ]] || wrong "--compute-cap: got '$compute_cap'; give a number such as 80"
[ "$compute_cap" -ge 75 ] || wrong "--compute-cap: got $compute_cap; CUDA 13 knows GPUs from 75 on"

[ "$(uname -sm)" = "Linux x86_64" ] || fail "this makes programs for x86-64 Linux, on x86-64 Linux; here is $(uname -sm)"
need() { command -v "$1" >/dev/null || fail "$1 is missing: $2"; }
need cargo "install Rust, from https://rustup.rs"
need cc "install a C compiler (Debian: apt-get install build-essential)"
need c++ "install a C++ compiler (Debian: apt-get install build-essential)"
need ar "install binutils (Debian: apt-get install build-essential)"
need strip "install binutils (Debian: apt-get install build-essential)"
need python3 "install Python 3 (Debian: apt-get install python3 python3-pip)"
python3 -m pip --version >/dev/null 2>&1 || fail "pip is missing: install it (Debian: apt-get install python3-pip)"
need xz "install it (Debian: apt-get install xz-utils)"

# ---- the compiler ----
cuda=13.0
wheels=(nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl)
mkdir -p "$folder"
if [ ! -e "$folder/wheels/.complete-$cuda" ]; then
    echo "== CUDA's compiler, from PyPI"
    rm -rf "$folder/wheels"
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --root-user-action=ignore \
        --target "$folder/wheels" "${wheels[@]/%/==$cuda.*}" || fail "pip cannot get ${wheels[*]} from PyPI"
    : > "$folder/wheels/.complete-$cuda"
fi
toolkit=$folder/wheels/nvidia/cu13
# PTX alone, which the driver compiles for the GPU it finds. What candle asks for would run on one generation only.
cat > "$folder/nvcc" <<NVCC
#!/usr/bin/env bash
args=()
for arg in "\$@"; do
    case "\$arg" in -gencode=*,code=sm_*) arg=\${arg/,code=sm_/,code=compute_} ;; esac
    # From 90 on candle asks for one generation's own instructions (90a), which no later GPU has.
    if [[ \$arg =~ ^-gencode=arch=compute_([0-9]+)[af]?, ]]; then
        arg=-gencode=arch=compute_\${BASH_REMATCH[1]},code=compute_\${BASH_REMATCH[1]}
    fi
    args+=("\$arg")
done
exec '$toolkit/bin/nvcc' "\${args[@]}"
NVCC
chmod +x "$folder/nvcc"

# ---- stand-ins for the libraries, that open the real ones late ----
cd "$repository"
. scripts/cuda/loader.sh
make_loader "$folder/link"
# These become parts of the program.
ln -s "$toolkit/lib/libcudart_static.a" "$folder/link/lib/libcudart.a"
cxx=$(c++ -print-file-name=libstdc++.a)
[ ! -e "$cxx" ] || ln -s "$cxx" "$folder/link/lib/libstdc++.a"
# Where the program looks for libraries. The linker is told by this, since flags of cargo's would build everything anew.
mkdir -p "$folder/bin"
cat > "$folder/bin/cc" <<CC
#!/bin/sh
exec '$(command -v cc)' "\$@" '-Wl,-rpath,\$ORIGIN:\$ORIGIN/nvidia/cu13/lib:\$ORIGIN/nvidia/nccl/lib:/usr/local/cuda/lib64'
CC
chmod +x "$folder/bin/cc"

# ---- the program ----
echo "== girandole with CUDA, for compute capability $compute_cap and later"
unset CUDA_HOME CUDA_ROOT CUDA_TOOLKIT_ROOT_DIR CUDNN_LIB NVCC_CCBIN
export NVCC=$folder/nvcc CUDA_PATH=$folder/link CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=$compute_cap
export PATH=$folder/bin:$PATH
# In the order of `comm::CudaLibrary`.
export GIRANDOLE_CUDA_LIBRARIES="libcuda.so.1 libcublas.so.13 libcurand.so.10 libnccl.so.2"
# Kernels of another capability are another build.
build=$folder/build-ptx-$compute_cap
cargo build --locked --release --target-dir "$build" --package bin --package girandole-comm --package girandole-training \
    --features bin/nccl,girandole-comm/nccl,girandole-training/cuda --bin girandole --test cuda_conformance --test cuda
newest() { ls -t "$build/release/deps/$1"-* | grep -v '\.d$' | head -1; }

# ---- what goes to the GPU ----
strip -o "$folder/girandole" "$build/release/girandole"
strip -o "$folder/girandole-conformance" "$(newest cuda_conformance)"
strip -o "$folder/girandole-operations" "$(newest cuda)"
cp scripts/gpu-check.sh "$folder/gpu-check.sh"
"$folder/girandole" --version >/dev/null || fail "$folder/girandole was made, but does not start"
tar -C "$folder" -cf - girandole girandole-{conformance,operations} gpu-check.sh | xz -T0 > "$folder/girandole-cuda.tar.xz"
echo "== done"
(cd "$folder" && ls -sh1 girandole girandole-{conformance,operations} girandole-cuda.tar.xz)
echo "On a machine with a GPU: see scripts/build-cuda.sh --help, and run scripts/gpu-check.sh $folder/girandole"
