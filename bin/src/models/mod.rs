//! The models of the documents.

pub mod convnet;
pub mod linear;
