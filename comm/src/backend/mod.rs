//! Backends: the types whose values are groups of ranks. Each connects the layers below.

#[cfg(feature = "cuda")]
pub(crate) mod cuda_library;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
mod subgroups;
pub(crate) mod tcp;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod traffic;
