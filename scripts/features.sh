# Sourced by scripts that look at what is behind the features `nccl` and `mpi`: one build has both where Open MPI and MPICH are installed.
# Sets `features` (a list for cargo) and `selection` (packages, features and levels of optimisation for a quick build).
. scripts/cuda-stand-in/env.sh
features=girandole-comm/nccl,bin/nccl
if command -v mpicc.openmpi >/dev/null && command -v mpicc.mpich >/dev/null; then
    features+=,girandole-comm/mpi,bin/mpi
    export MPICC=${MPICC:-mpicc.openmpi}
fi
# Both packages, so that nothing is built anew; our own crates are not optimised at all, which takes a sixth of the time to build: it is
# not their arithmetic or their speed that is tested.
selection="--locked -p girandole-comm -p bin --features $features"
for package in candle-{core,nn}; do
    selection+=" --config profile.dev.package.$package.opt-level=1"
done
for package in bin girandole-{comm,launch,ops,sampler,training}; do
    selection+=" --config profile.dev.package.$package.opt-level=0"
done
stand_ins=${CARGO_TARGET_DIR:-$PWD/target}/cuda-stand-in
export LIBRARY_PATH=$stand_ins LD_LIBRARY_PATH=$stand_ins
