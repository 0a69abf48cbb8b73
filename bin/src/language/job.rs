//! What `pretrain` and `finetune` differ in.

use std::path::Path;

use models::{Lora, Tokenizer, Weights};

use crate::error::Result;

use super::options::TrainOptions;

/// A command that trains a language model.
pub trait Job: Clone {
    /// Its name.
    const NAME: &'static str;

    /// The options that both commands have.
    fn options(&self) -> &TrainOptions;

    /// The same with others of these.
    fn with_options(&self, options: TrainOptions) -> Self;

    /// Model, first values, adapters and tokenizer.
    ///
    /// # Errors
    /// Files that cannot be used; options that do not fit.
    fn subject(&self) -> Result<Subject>;

    /// Whether adapters are merged into the weights when they are saved.
    fn merges(&self) -> bool {
        false
    }

    /// A folder whose tokenizer goes with the saved model.
    fn folder(&self) -> Option<&Path>;
}

/// What is trained.
pub struct Subject {
    pub(super) weights: Weights,
    pub(super) lora: Option<Lora>,
    pub(super) tokenizer: Option<Tokenizer>,
}
