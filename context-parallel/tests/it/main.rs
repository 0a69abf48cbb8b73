//! Rows that are divided over ranks are computed as one process computes them.

mod attention;
mod mistakes;
