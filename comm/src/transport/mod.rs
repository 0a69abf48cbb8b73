//! What moves bytes: streams to each peer ([`links`]), made by one folder for each backend, or a library that moves whole operations
//! ([`carrier`]). The first file of a backend's folder is what programs open; it puts the layers together, and so it is what looks up.

pub(crate) mod carrier;
#[cfg(feature = "cuda")]
pub(crate) mod cuda_library;
pub(crate) mod links;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod shm;
pub(crate) mod tcp;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) mod traffic;
