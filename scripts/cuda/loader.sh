# Makes archives under the names of NVIDIA's libraries, whose functions open the real ones late: make_loader FOLDER. Sourced by
# build-cuda.sh and check-loader.sh, in the repository's folder; needs cargo, cc, ar and python3.

# Name, the module of cudarc that declares its functions, and what they return where the library is missing.
libraries=(
    libcuda.so.1:driver:34 # CUDA_ERROR_STUB_LIBRARY
    libcublas.so.13:cublas:1 # CUBLAS_STATUS_NOT_INITIALIZED
    libcublasLt.so.13:cublaslt:1
    libcurand.so.10:curand:203 # CURAND_STATUS_INITIALIZATION_FAILED
    libnvrtc.so.13:nvrtc:11 # NVRTC_ERROR_INTERNAL_ERROR
    libnccl.so.2:nccl:2 # ncclSystemError
)

make_loader() {
    local folder=$1 cudarc name
    cudarc=$(cargo metadata --locked --format-version 1 --all-features | python3 -c '
import json, os, sys
print(*[os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"])')
    [ -d "$cudarc" ] || { echo "error: one version of the crate cudarc was expected, got '$cudarc'" >&2; return 1; }
    rm -rf "$folder"
    mkdir -p "$folder/lib"
    python3 scripts/cuda/trampolines.py "$cudarc" "${libraries[@]}" > "$folder/trampolines.S" || return 1
    cc -c "$folder/trampolines.S" -o "$folder/trampolines.o" || return 1
    cc -c -O2 -fPIC -Wall -Wextra scripts/cuda/loader.c -o "$folder/loader.o" || return 1
    # The linker takes all of it from the first.
    ar crs "$folder/lib/libcuda.a" "$folder/trampolines.o" "$folder/loader.o"
    for name in cublas cublasLt curand nvrtc nccl; do ar crs "$folder/lib/lib$name.a"; done
}
