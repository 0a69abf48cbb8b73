//! The interface of `pretrain`, `finetune` and `prefer` to their shared training code.

use std::path::Path;

use crate::error::Result;
use models::tokens::NamedTemplate;
use models::{Lora, Tokenizer, Weights};

use ops::PreferenceConfig;

use super::options::TrainOptions;

/// A command that trains a language model.
pub trait Job: Clone {
    /// The command's name.
    const NAME: &'static str;

    /// Returns the options that all of these commands have.
    fn options(&self) -> &TrainOptions;

    /// Returns a copy of the command with other common options.
    fn with_options(&self, options: TrainOptions) -> Self;

    /// Returns the model with its initial weights, adapters and tokenizer.
    ///
    /// # Errors
    /// Files that cannot be used; options that do not fit.
    fn subject(&self) -> Result<Subject>;

    /// Returns the chat template to use in place of that of the model's folder, if any.
    ///
    /// # Errors
    /// Files that cannot be read.
    fn chat_template(&self) -> Result<Option<NamedTemplate>> {
        Ok(self.options().chat_template.clone())
    }

    /// Whether adapters are merged into the weights when they are saved.
    fn merges(&self) -> bool {
        false
    }

    /// Whether adapters alone are saved.
    fn saves_adapters(&self) -> bool {
        false
    }

    /// Returns the loss of pairs of answers, if the rows are pairs.
    fn preferences(&self) -> Option<PreferenceConfig> {
        None
    }

    /// Returns the model that pairs are compared with, if their loss compares with one.
    ///
    /// # Errors
    /// Files that cannot be used, and a model that does not fit.
    fn reference(&self) -> Result<Option<Subject>> {
        Ok(None)
    }

    /// Returns the weights of the reference, if it is of another folder than the model.
    ///
    /// # Errors
    /// Files that cannot be used.
    fn other_reference(&self) -> Result<Option<Weights>> {
        Ok(None)
    }

    /// Returns further settings that affect what a run learns, by option.
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns the folder of the model that is read, if any.
    fn model(&self) -> Option<&Path>;

    /// Returns the folder whose tokenizer files are copied to the saved model, if any.
    fn folder(&self) -> Option<&Path>;
}

/// The model to train.
pub struct Subject {
    pub(super) weights: Weights,
    pub(super) lora: Option<Lora>,
    pub(super) tokenizer: Option<Tokenizer>,
}
