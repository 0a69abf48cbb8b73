#!/usr/bin/env bash
# Makes stand-ins for the libraries of NVIDIA that Girandole links, so that its CUDA code runs on a machine without a GPU.
#   scripts/cuda-stand-in/build.sh FOLDER
# They run candle's kernels and Girandole's own, compiled for the host, on streams that are threads, and NCCL's calls between processes.
# What they check is the program's side: order, lifetimes, sizes, errors. They say nothing of what a GPU does, or how fast.
# Needs a C and C++ compiler (12 or later), and the sources of the dependencies, which it fetches.
set -euo pipefail
folder=${1:?usage: build.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
# Their sources are looked at before anything that needs them is built.
ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/{candle-kernels,cudarc}-[0-9]* >/dev/null 2>&1 || (cd "$here" && cargo fetch --locked --quiet)
source_of() { ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"$1"-[0-9]* | sort -V | tail -n 1; }
kernels=$(source_of candle-kernels)/src
cudarc=$(source_of cudarc)/src
own=$(cd "$here/../../ops/src/cuda" && pwd)

stamp=$(cat "$here"/*.c "$here"/*.cpp "$here"/*.h "$here"/include/*.h "$here/build.sh" "$own/kernels.cu" | cksum)" $kernels $cudarc"
[ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
rm -rf "$folder"
mkdir -p "$folder/parts"
parts=$folder/parts

flags="-O1 -g -fPIC -I$here"
for name in cuda nccl blas; do cc $flags -Wall -Wextra -c "$here/$name.c" -o "$parts/$name.o"; done
cpp="c++ -std=c++17 $flags -I$here/include -I$kernels"
$cpp -c "$here/blocks.cpp" -o "$parts/blocks.o"
kernels_of() {
    local source=$1 name
    name=$(basename "$source" .cu)
    $cpp -w -E -x c++ "$source" | tr '\n' ' ' | grep -oE 'extern "C" +void +[A-Za-z0-9_]+' |
        sed 's/.* /KERNEL(/; s/$/)/' | grep -v "_f8_\|stand_in" > "$parts/$name.names"
    $cpp -w -DKERNELS="\"$source\"" -DNAMES="\"$parts/$name.names\"" -c "$here/kernels.cpp" -o "$parts/kernels_$name.o"
}
export -f kernels_of
export cpp parts here
{ printf "$kernels/%s.cu\n" affine binary cast conv fill indexing reduce ternary unary; echo "$own/kernels.cu"; } |
    xargs -P "$(nproc)" -I{} bash -euo pipefail -c 'kernels_of {}'

# What is not here is refused: the code for "not supported" of each library.
refuse() {
    grep -rhoE "sys::$2[A-Za-z0-9_]+ *\(" "$cudarc/$3" | sed "s/sys:://; s/ *(//" | sort -u |
        sed "s/.*/__attribute__((weak)) int &(void) { return $4; }/" > "$parts/no_$1.c"
    cc -fPIC -c "$parts/no_$1.c" -o "$parts/no_$1.o"
}
refuse cuda cu driver 801
refuse cublas cublas cublas 15
refuse curand curand curand 201
refuse nccl nccl nccl 5
grep -hoE 'pub fn [a-z0-9_]+' "$kernels/ffi.rs" | sort -u | sed 's/pub fn \(.*\)/void \1(void) { __builtin_trap(); }/' > "$parts/no_quantized.c"
cc -fPIC -c "$parts/no_quantized.c" -o "$parts/no_quantized.o"

library() {
    local name=$1 version=$2
    shift 2
    c++ -shared -Wl,-soname,"lib$name.so.$version" -o "$folder/lib$name.so.$version" "$@" -pthread
    ln -sf "lib$name.so.$version" "$folder/lib$name.so"
}
library cuda 1 "$parts"/{cuda,no_cuda,blocks,no_quantized}.o "$parts"/kernels_*.o
link="-L$folder -lcuda"
library nccl 2 "$parts"/{nccl,no_nccl}.o $link
library cublas 13 "$parts"/{blas,no_cublas}.o $link
library curand 10 "$parts"/{blas,no_curand}.o $link
echo > "$parts/nothing.c"
cc -fPIC -c "$parts/nothing.c" -o "$parts/nothing.o"
library cublasLt 13 "$parts/nothing.o"
library cudart 13 "$parts/nothing.o"
library nvrtc 13 "$parts/nothing.o"
echo "$stamp" > "$folder/stamp"
