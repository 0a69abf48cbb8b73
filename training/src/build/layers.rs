//! Layers that may be divided over ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use crate::LinearCrossEntropyConfig;

/// How a linear layer is divided where layers are divided over ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Division {
    /// Not at all: every rank has all of it.
    #[default]
    Whole,
    /// By its outputs: each rank computes its part of them, of each of several layers of equal size that lie in one (`groups`).
    Outputs,
    /// By its inputs, of which each rank has the part that a layer divided by outputs left it; every rank gets all outputs.
    Inputs,
}

/// A linear layer that a model wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearConfig {
    /// Numbers that go in, over all ranks.
    pub inputs: usize,
    /// Numbers that come out, over all ranks.
    pub outputs: usize,
    /// Whether there is a bias. Default in [`LinearConfig::new`]: none.
    pub bias: bool,
    /// How it is divided.
    pub division: Division,
    /// Layers of equal size whose outputs lie in one, such as 3 for queries, keys and values. Default in [`LinearConfig::new`]: 1.
    pub groups: usize,
    /// Whether it gets no gradient. Default in [`LinearConfig::new`]: false.
    pub frozen: bool,
}

impl LinearConfig {
    /// A layer without a bias.
    pub fn new(inputs: usize, outputs: usize, division: Division) -> Self {
        Self { inputs, outputs, bias: false, division, groups: 1, frozen: false }
    }

    /// The same with a bias, if there is to be one.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Self {
        Self { bias, ..self }
    }
}

/// A table of vectors that a model wants, one for each token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyConfig {
    /// Tokens in the vocabulary.
    pub tokens: usize,
    /// Numbers of a vector.
    pub features: usize,
    /// Whether it gets no gradient.
    pub frozen: bool,
}

/// Makes layers: whole ones, parts of divided ones, ones with adapters.
pub trait Layers: Send + Sync {
    /// Ranks that layers are divided over.
    fn ranks(&self) -> usize {
        1
    }

    /// This rank's number among them.
    fn rank(&self) -> usize {
        0
    }

    /// Whether a model's own parameters are not trained, norms and the like as well.
    fn freezes(&self) -> bool {
        false
    }

    /// A builder of what every rank has whole and applies between divided layers: each has a part of the gradient where each has a part of
    /// the sequence there.
    fn between(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        vb.clone()
    }

    /// Which positions of rows of this length a rank has between divided layers: all of them, but for sequence parallelism.
    ///
    /// # Errors
    /// A length that the ranks do not divide.
    fn positions(&self, len: usize) -> Result<Range<usize>> {
        Ok(0..len)
    }

    /// How many positions of a row come before this rank's between divided layers, where it has `own`: none, but for sequence parallelism.
    fn positions_before(&self, _own: usize) -> usize {
        0
    }

    /// A builder of what every rank has whole and applies to its own heads alone: each has a part of the gradient.
    fn of_heads(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        vb.clone()
    }

    /// A linear layer of the builder's `weight` (outputs, inputs) and perhaps `bias`.
    ///
    /// # Errors
    /// Sizes that the ranks do not divide; what the builder fails with.
    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear>;

    /// A table of the builder's `weight` (tokens, features).
    ///
    /// # Errors
    /// What the builder fails with.
    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>>;
}

/// One vector for each token: what an embedding looks up, and what a head compares with.
pub trait Vocabulary: Send + Sync {
    /// The vectors of tokens.
    ///
    /// # Shapes
    /// Tokens `(..)` to `(.., features)`.
    ///
    /// # Errors
    /// A token that there is not; failures of communication.
    fn embed(&self, tokens: &Tensor) -> Result<Tensor>;

    /// How well each token fits, all of them on every rank.
    ///
    /// # Shapes
    /// `(.., features)` to `(.., tokens)`.
    ///
    /// # Errors
    /// Another number of features; failures of communication.
    fn logits(&self, x: &Tensor) -> Result<Tensor>;

    /// The mean cross-entropy of the logits, without all of them at once.
    ///
    /// # Shapes
    /// `x` `(.., features)`, targets `(..)`; the loss has no dimensions.
    ///
    /// # Errors
    /// Shapes that do not fit, a target that is no token; failures of communication.
    fn loss(&self, x: &Tensor, targets: &Tensor, config: &LinearCrossEntropyConfig) -> Result<Tensor>;
}

/// A linear layer as one of [`Layers`] made it.
#[derive(Clone)]
pub struct Linear(Arc<dyn Module + Send + Sync>);

impl Linear {
    /// One that is computed by `module`.
    pub fn new(module: impl Module + Send + Sync + 'static) -> Self {
        Self(Arc::new(module))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Linear").finish_non_exhaustive()
    }
}
