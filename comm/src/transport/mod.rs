//! Transports: streams of bytes to each peer ([`links`]), with one folder for each backend, or a library that moves whole
//! operations ([`carrier`]). The `mod.rs` of a backend's folder holds the public type and connects the layers, and
//! therefore imports from the layers above this one.

pub(crate) mod carrier;
#[cfg(feature = "cuda")]
pub(crate) mod cuda_device;
#[cfg(feature = "cuda")]
pub(crate) mod cuda_library;
pub(crate) mod links;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod shm;
mod subgroups;
pub(crate) mod tcp;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) mod traffic;
