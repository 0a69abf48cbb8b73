//! Public interface: the communicator trait that every backend implements, what is built on it (groups, meshes,
//! objects, gradients), and the handle of an operation in progress.

pub mod autograd;
pub(crate) mod communicator;
#[cfg(feature = "cuda")]
pub(crate) mod cuda_device;
pub(crate) mod difference;
pub(crate) mod mesh;
pub(crate) mod objects;
pub(crate) mod tensors;
pub(crate) mod upload;
pub(crate) mod work;
