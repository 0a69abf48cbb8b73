//! What a comparison of parameters between ranks finds.

use serde::{Deserialize, Serialize};

/// The first parameter that is not the same on every rank. Ranks are those of the whole job.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[error(
    "parameter {parameter} is not the same on every rank: at {index:?} rank {odd_rank} has {odd}, and rank {rank} has \
     {expected} ({differing} of {elements} elements differ); other values than rank {rank}: ranks {odd_ranks:?}; parameters \
     stay equal where every rank gives its optimizer what the model's own backward (`backward`, `join`, `step`) returns, clipped, \
     if at all, by the model's own `clip_grad_norm`, and changes them in no other way"
)]
#[non_exhaustive]
pub struct ParameterDifference {
    /// The name of the parameter. Those before it, in order of construction, are equal.
    pub parameter: String,
    /// A rank that differs from most others.
    pub odd_rank: usize,
    /// Its value of the element at `index`.
    pub odd: String,
    /// A rank to compare it with.
    pub rank: usize,
    /// That rank's value.
    pub expected: String,
    /// The index, by dim, of the first element in which these two ranks differ.
    pub index: Vec<usize>,
    /// The number of elements in which they differ.
    pub differing: usize,
    /// The number of elements of the parameter.
    pub elements: usize,
    /// All ranks that differ from `rank` in this parameter.
    pub odd_ranks: Vec<usize>,
}
