//! Tests of `comm`'s public API with ranks that are threads, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used)]

mod autograd;
mod elastic;
mod mesh;
mod thousand;
