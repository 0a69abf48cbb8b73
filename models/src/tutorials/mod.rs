//! The models of PyTorch's tutorials, with PyTorch's parameter names, created in PyTorch's order.

pub mod convnet;
pub mod linear;
pub mod mlp;
pub mod transformer;
