//! Tests of `ops`' public API, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod attention;
mod document_sums;
mod documents;
mod finite_differences;
mod llama;
mod nf4;
mod op;
mod picture;
mod precision;
mod self_attention;
