//! `cifar10`, document 004: a convolutional net that tells pictures apart.

mod grid;
mod pictures;
mod records;
mod synthetic;
