//! Layers that can be divided over ranks (tensor parallelism).

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::{DividedExperts, Expert, LinearCrossEntropyConfig};

use super::frozen::frozen;

/// How a linear layer is divided over tensor-parallel ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Division {
    /// Not divided: every rank has the whole layer.
    #[default]
    Whole,
    /// By outputs (column-parallel): each rank computes its part of the outputs; of a layer that fuses several of
    /// equal size (`groups`), its part of each.
    Outputs,
    /// By inputs (row-parallel): each rank has the input part that a layer divided by outputs left it; every rank
    /// gets all outputs.
    Inputs,
}

/// Description of a linear layer that a model requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearConfig {
    /// Input features, over all ranks.
    pub inputs: usize,
    /// Output features, over all ranks.
    pub outputs: usize,
    /// Whether there is a bias. Default in [`LinearConfig::new`]: none.
    pub bias: bool,
    /// How it is divided over ranks.
    pub division: Division,
    /// Number of equally sized layers fused into this one along its outputs, such as 3 for queries, keys and values.
    /// Default in [`LinearConfig::new`]: 1.
    pub groups: usize,
    /// Whether it is frozen, that is, gets no gradient. Default in [`LinearConfig::new`]: false.
    pub frozen: bool,
}

impl LinearConfig {
    /// A layer without a bias.
    pub fn new(inputs: usize, outputs: usize, division: Division) -> Self {
        Self { inputs, outputs, bias: false, division, groups: 1, frozen: false }
    }

    /// Sets whether there is a bias.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Self {
        Self { bias, ..self }
    }

    /// The initialization of a new bias: PyTorch's.
    pub fn bias_init(&self) -> Init {
        let bound = 1.0 / (self.inputs as f64).sqrt();
        Init::Uniform { lo: -bound, up: bound }
    }
}

/// Description of one expert that a model requests: a gated feed-forward layer of three weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertConfig {
    /// Names of the layers of gate, up and down.
    pub names: [&'static str; 3],
    /// Features of tokens.
    pub hidden: usize,
    /// Features between the layers, over all ranks.
    pub intermediate: usize,
}

impl ExpertConfig {
    /// The names and descriptions of its layers: gate and up are divided by outputs, and down by inputs.
    pub fn layers(&self) -> [(&'static str, LinearConfig); 3] {
        let [gate, up, down] = self.names;
        let inner = LinearConfig::new(self.hidden, self.intermediate, Division::Outputs);
        let outer = LinearConfig::new(self.intermediate, self.hidden, Division::Inputs);
        [(gate, inner.clone()), (up, inner), (down, outer)]
    }
}

/// Description of a token embedding table that a model requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyConfig {
    /// Tokens in the vocabulary.
    pub tokens: usize,
    /// Features of a token's vector.
    pub features: usize,
    /// Whether it is frozen, that is, gets no gradient.
    pub frozen: bool,
}

/// Makes layers: whole, divided over ranks, or with adapters.
pub trait Layers: Send + Sync {
    /// The factory below this one, if this one only changes what that makes: it answers wherever this one has no answer of its own.
    fn inner(&self) -> Option<&dyn Layers> {
        None
    }

    /// Number of ranks that layers are divided over.
    fn ranks(&self) -> usize {
        self.inner().map_or(1, |inner| inner.ranks())
    }

    /// This rank's index among them.
    fn rank(&self) -> usize {
        self.inner().map_or(0, |inner| inner.rank())
    }

    /// Whether the model's own parameters are frozen, norms and similar ones too.
    fn freezes(&self) -> bool {
        self.inner().is_some_and(|inner| inner.freezes())
    }

    /// Whether a module that every rank has whole ([`replicated`](super::Part::replicated)) is trained all the same.
    fn trains(&self, module: &str) -> bool {
        self.inner().is_some_and(|inner| inner.trains(module))
    }

    /// Builder of parameters that every rank has whole and applies between divided layers. Under sequence parallelism
    /// each rank has only a part of their gradient.
    fn between(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        self.inner().map_or_else(|| vb.clone(), |inner| inner.between(vb))
    }

    /// Range of positions, of a sequence of length `len`, that this rank has between divided layers: all of them,
    /// except under sequence parallelism.
    ///
    /// # Errors
    /// A length that is not divisible by the number of ranks.
    fn positions(&self, len: usize) -> Result<Range<usize>> {
        self.inner().map_or(Ok(0..len), |inner| inner.positions(len))
    }

    /// Number of positions of the sequence before this rank's own between divided layers, where it has `own` of them:
    /// 0, except under sequence parallelism.
    fn positions_before(&self, own: usize) -> usize {
        self.inner().map_or(0, |inner| inner.positions_before(own))
    }

    /// Builder of parameters that every rank has whole and applies to its own heads only, so that each rank has a
    /// part of the gradient.
    fn of_heads(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        self.inner().map_or_else(|| vb.clone(), |inner| inner.of_heads(vb))
    }

    /// Makes this rank's part of the builder's `weight`, for a module that computes with it itself: between
    /// [`divide`](Self::divide) and [`combine`](Self::combine), as the ranks' parts of a divided layer do.
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; errors of the builder.
    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        if let Some(inner) = self.inner() {
            return inner.weight(vb, config);
        }
        let vb = if config.frozen { frozen(vb) } else { vb.clone() };
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        vb.get_with_hints((config.outputs, config.inputs), "weight", init)
    }

    /// Makes this rank's part of the builder's `bias` of a linear layer, for a module that computes with
    /// [`weight`](Self::weight) itself: of a layer divided by outputs, that of its own; otherwise all of it, which is added to
    /// the sum of all ranks ([`combine`](Self::combine)).
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; errors of the builder.
    fn bias(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.vector(vb, "bias", config.bias_init(), config)
    }

    /// Makes this rank's part of a vector with one number for each output of a linear layer, as [`bias`](Self::bias) is one.
    ///
    /// # Errors
    /// Those of [`bias`](Self::bias).
    fn vector(
        &self,
        vb: &VarBuilder<'static>,
        name: &str,
        init: Init,
        config: &LinearConfig,
    ) -> Result<Tensor> {
        if let Some(inner) = self.inner() {
            return inner.vector(vb, name, init, config);
        }
        let vb = if config.frozen { frozen(vb) } else { vb.clone() };
        vb.get_with_hints(config.outputs, name, init)
    }

    /// Draws the builder's `weight` and drops it, where weights are drawn in sequence: another rank has it, and what is drawn after
    /// it must not depend on that.
    ///
    /// # Errors
    /// Errors of the builder.
    fn skip_weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<()> {
        match self.inner() {
            Some(inner) => inner.skip_weight(vb, config),
            None => self.weight(vb, config).map(drop),
        }
    }

    /// How `count` experts of a layer are divided over ranks with different rows (expert parallelism). `None` if each rank has
    /// all of them.
    ///
    /// # Errors
    /// Fewer experts than ranks.
    fn experts(&self, count: usize) -> Result<Option<DividedExperts>> {
        self.inner().map_or(Ok(None), |inner| inner.experts(count))
    }

    /// Makes this rank's part of the builder's `weight`, as [`weight`](Self::weight) does, of one expert out of so many.
    /// `None` if it is another rank's.
    ///
    /// # Errors
    /// Those of [`weight`](Self::weight) and [`experts`](Self::experts).
    fn weight_of_expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        expert: (usize, usize),
    ) -> Result<Option<Tensor>> {
        match self.inner() {
            Some(inner) => inner.weight_of_expert(vb, config, expert),
            None => self.weight(vb, config).map(Some),
        }
    }

    /// Makes this rank's part of one expert out of so many, whose weights are below the builder. `None` if it is another rank's.
    ///
    /// # Errors
    /// Those of [`weight_of_expert`](Self::weight_of_expert).
    fn expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &ExpertConfig,
        expert: (usize, usize),
    ) -> Result<Option<Expert>> {
        let weight =
            |(name, layer): (&str, LinearConfig)| self.weight_of_expert(&vb.pp(name), &layer, expert);
        let [gate, up, down] = config.layers().map(weight);
        let weights = gate?.zip(up?).zip(down?);
        Ok(weights.map(|((gate, up), down)| Expert::new([gate, up, down].map(Into::into))))
    }

    /// The input of a module of which each rank computes a part, at all positions of the sequence. Its gradient is the sum of those
    /// of all ranks.
    ///
    /// # Errors
    /// Failures of communication.
    fn divide(&self, x: &Tensor) -> Result<Tensor> {
        self.inner().map_or_else(|| Ok(x.clone()), |inner| inner.divide(x))
    }

    /// The sum of what all ranks have computed of a module, at the positions that this rank has between divided layers.
    ///
    /// # Errors
    /// Failures of communication.
    fn combine(&self, part: &Tensor) -> Result<Tensor> {
        self.inner().map_or_else(|| Ok(part.clone()), |inner| inner.combine(part))
    }

    /// All positions of a sequence of which this rank has its own between divided layers, for a computation that is the same on
    /// every rank, with [replicated](super::Part::replicated) parameters.
    ///
    /// # Errors
    /// Failures of communication.
    fn gather(&self, x: &Tensor) -> Result<Tensor> {
        self.inner().map_or_else(|| Ok(x.clone()), |inner| inner.gather(x))
    }

    /// Makes a linear layer of the builder's `weight` (outputs, inputs) and, if configured, `bias`.
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; errors of the builder.
    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear>;

    /// Makes a token table of the builder's `weight` (tokens, features).
    ///
    /// # Errors
    /// Errors of the builder.
    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>>;
}

/// One vector for each token: an embedding, an output head, or both.
pub trait Vocabulary: Send + Sync {
    /// Looks up the vectors of tokens.
    ///
    /// # Shapes
    /// Tokens `(..)` to `(.., features)`.
    ///
    /// # Errors
    /// A token outside the vocabulary; failures of communication.
    fn embed(&self, tokens: &Tensor) -> Result<Tensor>;

    /// Logits of all tokens, on every rank.
    ///
    /// # Shapes
    /// `(.., features)` to `(.., tokens)`.
    ///
    /// # Errors
    /// Another number of features; failures of communication.
    fn logits(&self, x: &Tensor) -> Result<Tensor>;

    /// The mean cross-entropy of the logits, without materializing all of them at once.
    ///
    /// # Shapes
    /// `x` `(.., features)`, targets `(..)`; the loss has no dimensions.
    ///
    /// # Errors
    /// Shapes that do not fit, a target outside the vocabulary; failures of communication.
    fn loss(&self, x: &Tensor, targets: &Tensor, config: &LinearCrossEntropyConfig) -> Result<Tensor>;

    /// The log-probability of each target, on every rank, without materializing the logits of all targets at once unless they are
    /// divided over ranks; 0 where the target is `ignored`.
    ///
    /// # Shapes
    /// `x` `(.., features)`; targets `(..)`, and so the result, in f32 or f64.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    fn log_probs(&self, x: &Tensor, targets: &Tensor, ignored: i64) -> Result<Tensor>;
}

/// A linear layer made by an implementation of [`Layers`].
#[derive(Clone)]
pub struct Linear(Arc<dyn Module + Send + Sync>);

impl Linear {
    /// Wraps the module that computes the layer.
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
