//! The models of the tutorials.

pub mod convnet;
pub mod large;
pub mod linear;
pub mod mlp;
pub mod transformer;
pub mod tree;
