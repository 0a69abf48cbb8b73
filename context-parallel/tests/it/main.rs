//! Rows that are divided over ranks are computed as one process computes them.
#![allow(clippy::unwrap_used)]

mod attention;
mod mistakes;
