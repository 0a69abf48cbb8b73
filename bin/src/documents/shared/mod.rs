//! What several documents have in common: [`transformer`], the Transformer of the DDP and pipeline tutorials, and [`python`],
//! what Python prints.

#[cfg(test)]
mod gradients;
pub mod python;
pub mod transformer;
