//! What several documents have in common: [`transformer`], the Transformer of the DDP and pipeline tutorials, [`python`], what
//! Python prints, and [`validation`].

#[cfg(test)]
mod gradients;
pub mod python;
pub mod transformer;
pub mod validation;
