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

# Both packages, so that nothing else is built anew.
selection="--locked -p bin -p girandole-comm --features bin/mpi,girandole-comm/mpi"
# Quickly built: it is not their speed that is tested.
for package in girandole-{comm,launch,tensor-parallel}; do
    selection+=" --config profile.dev.package.$package.opt-level=1"
done
library() {
    export MPICC="mpicc.$1" GIRANDOLE_MPIRUN="mpirun.$1"
    # It does not see by itself that the library is another one.
    cargo clean --quiet -p mpi-sys
}

library openmpi
cargo clippy $selection --all-targets -- -D warnings
cargo test $selection --test mpi --test mpi_conformance
# What else is behind the feature.
cargo test $selection --lib -- mpi:: traffic::
library mpich
cargo test $selection --test mpi_conformance
cargo clean --quiet -p mpi-sys
