//! The models of the documents.

pub mod linear;
