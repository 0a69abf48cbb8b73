//! The models of the documents.

pub mod convnet;
pub mod large;
pub mod linear;
pub mod mlp;
pub mod transformer;
pub mod tree;
