//! The models of PyTorch's tutorials, with PyTorch's parameter names, created in PyTorch's order; their data; and what
//! Python prints of them.

pub mod cifar10;
pub mod convnet;
pub mod large;
pub mod linear;
pub mod mlp;
pub mod module_tree;
pub mod python;
pub mod tokens;
pub mod trainer;
pub mod transformer;
