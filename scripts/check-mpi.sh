#!/usr/bin/env bash
# Tests the back end `mpi` with Open MPI (all of it, every experiment included) and with MPICH (the conformance suite and
# faults), on up to 4 ranks. Where they are missing they are installed, on Debian and as root.
set -euo pipefail
cd "$(dirname "$0")/.."

packages="libopenmpi-dev openmpi-bin libmpich-dev mpich libclang-dev"
is_there() { command -v mpicc.openmpi && command -v mpicc.mpich && command -v mpirun.openmpi && command -v mpirun.mpich; }
if ! is_there >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "Open MPI and MPICH are not installed here ($packages): the back end mpi is not tested"
        exit 0
    fi
    { apt-get update -q && apt-get install -y -q --no-install-recommends $packages; } >/dev/null
fi

. scripts/features.sh
scripts/cuda-stand-in/build.sh "$stand_ins"
# No GPU: what the build has of CUDA is not what is tested here.
export STAND_IN_DEVICES=0

# Which library MPI's bindings were built with; they do not see by themselves that it is another one.
built=${CARGO_TARGET_DIR:-target}/mpi-library
library() {
    export MPICC="mpicc.$1" GIRANDOLE_MPIRUN="mpirun.$1"
    [ "$(cat "$built" 2>/dev/null || echo openmpi)" = "$1" ] || cargo clean --quiet -p mpi-sys
    echo "$1" >"$built"
}

library openmpi
cargo test $selection --test mpi --test mpi_conformance
# What else is behind the feature.
cargo test $selection --lib -- mpi:: traffic::
library mpich
cargo test $selection --test mpi_conformance
