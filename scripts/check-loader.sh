#!/usr/bin/env bash
# Checks how a build of scripts/build-cuda.sh finds NVIDIA's libraries, with small stand-ins for them: the program starts without
# them, a call passes all its arguments on, and a function that is missing fails with its library's code. Takes seconds; needs
# x86-64 Linux, a C compiler and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/cuda/loader.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
make_loader "$folder/link"
cc -O1 scripts/cuda/check/caller.c -L"$folder/link/lib" -lcuda -lcublas -lcurand -lnccl -o "$folder/caller"
mkdir "$folder/libraries"
for name in libnccl.so.2 libcurand.so.10 libcublas.so.13; do
    cc -shared -fPIC scripts/cuda/check/library.c -Wl,-soname,"$name" -o "$folder/libraries/$name"
done

twice() { cat "$1" "$1"; }
cat > "$folder/without" <<'EXPECTED'
cuInit 34
ncclGetVersion 2, ''
init 2
normal 203
gemm 1
EXPECTED
cat > "$folder/with" <<'EXPECTED'
cuInit 34
ncclGetVersion 2, ''
0x1 2 0..127 3 0x4
init 0
0x1 0x2 3 4.5 5.5
normal 0
0x1 2 3 4 5 6 0x7 0x8 9 10 0xb 12 13 0xe 0xf 16 17 18 19
gemm 0
EXPECTED
# The driver is looked for nowhere, should there be one.
LD_LIBRARY_PATH=$folder/libraries "$folder/caller" | sed 's/cuInit .*/cuInit 34/' | diff <(twice "$folder/with") -
if ! ldconfig -p 2>/dev/null | grep 'libcuda\.so\|libcublas\|libnccl\|libcurand' >/dev/null; then
    env -u LD_LIBRARY_PATH "$folder/caller" | diff <(twice "$folder/without") -
fi
echo "NVIDIA's libraries are found late"
