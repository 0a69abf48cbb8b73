//! Which optimizer steps the parameters. A further one is a type in `training` that implements [`StepOptimizer`], and a variant here;
//! the option of the commands is in `cli/src/language/options`, and what a layout's memory holds of it in `plan/src/optimizer.rs`.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use strategy::OwnedMatrices;
use training::build::Model;
use training::{
    Adam, AdamConfig, DeferredCopy, HeldWhole, Muon, MuonConfig, OptimizerState, Sgd, SgdConfig,
    StepOptimizer,
};

use crate::far::{FarAverage, FarConfig};
use crate::settings::Setting;
use crate::{Parallel, Result};

/// An optimizer and its hyperparameters. [`TrainConfig::learning_rate`](super::TrainConfig::learning_rate) replaces its learning
/// rate. Weight decay applies to matrices only.
#[derive(Debug, Clone, PartialEq)]
pub enum OptimizerConfig {
    /// Adam, usually with decoupled weight decay: [`AdamConfig::adamw`].
    AdamW(AdamConfig),
    /// Muon for the matrices of hidden layers, AdamW for everything else. The learning rate is that of the matrices, and AdamW's keeps
    /// the ratio that it has to it here.
    Muon {
        /// The hyperparameters.
        config: MuonConfig,
        /// Matrices that are not of hidden layers: parameters whose names have one of these between dots.
        not_hidden: Vec<String>,
    },
    /// Stochastic gradient descent.
    Sgd(SgdConfig),
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::AdamW(AdamConfig { beta2: 0.95, weight_decay: 0.1, ..AdamConfig::adamw() })
    }
}

impl OptimizerConfig {
    /// Returns Muon for the models of [`models`]: embeddings, heads, and routers of experts are left to AdamW.
    ///
    /// ```
    /// use girandole::trainer::{OptimizerConfig, TrainConfig};
    /// use girandole::training::MuonConfig;
    ///
    /// let optimizer = OptimizerConfig::muon(MuonConfig::default());
    /// let config = TrainConfig { learning_rate: 0.02, optimizer, ..TrainConfig::default() };
    /// assert_eq!(config.optimizer.name(), "muon");
    /// ```
    pub fn muon(config: MuonConfig) -> Self {
        let others = ["embed_tokens", "wte", "wpe", "lm_head", "score", "gate", "shared_expert_gate"];
        Self::Muon { config, not_hidden: others.map(String::from).to_vec() }
    }

    /// Returns its name, as checkpoints have it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "adamw",
            Self::Muon { .. } => "muon",
            Self::Sgd(_) => "sgd",
        }
    }

    /// Whether it needs a parameter with several dimensions whole, by its name: Muon the matrices of hidden layers.
    ///
    /// ```
    /// use girandole::trainer::OptimizerConfig;
    /// use girandole::training::MuonConfig;
    ///
    /// let muon = OptimizerConfig::muon(MuonConfig::default());
    /// assert!(muon.needs_whole("model.layers.0.mlp.up_proj.weight") && !muon.needs_whole("lm_head.weight"));
    /// ```
    pub fn needs_whole(&self, name: &str) -> bool {
        match self {
            Self::Muon { not_hidden, .. } => {
                !name.split('.').any(|part| not_hidden.iter().any(|other| other == part))
            }
            Self::AdamW(_) | Self::Sgd(_) => false,
        }
    }

    /// Checks that every field is in its range.
    pub(super) fn check(&self) -> Result<()> {
        Ok(match self {
            Self::AdamW(config) => config.validate(),
            Self::Muon { config, .. } => config.validate(),
            Self::Sgd(config) => config.validate(),
        }?)
    }

    /// Returns what must be the same on all ranks.
    pub(super) fn fields(&self) -> Vec<Setting> {
        let field = |name: &str, value: &dyn Debug| Setting::new(name, format_args!("{value:?}"));
        // Without `..`, so that a new field is compared, or is said not to be: a run sets the learning rates, of which only a ratio
        // is left.
        let of_adam = |config: &AdamConfig| {
            let AdamConfig { learning_rate: _, beta1, beta2, eps, weight_decay, decoupled_weight_decay } =
                config;
            vec![
                field("adam.beta1", beta1),
                field("adam.beta2", beta2),
                field("adam.eps", eps),
                field("adam.weight_decay", weight_decay),
                field("adam.decoupled_weight_decay", decoupled_weight_decay),
            ]
        };
        let own = match self {
            Self::AdamW(config) => of_adam(config),
            Self::Muon { config, not_hidden } => {
                let MuonConfig {
                    learning_rate,
                    momentum,
                    nesterov,
                    weight_decay,
                    adjust,
                    iterations,
                    eps,
                    adam,
                } = config;
                let own = vec![
                    field("muon.momentum", momentum),
                    field("muon.nesterov", nesterov),
                    field("muon.weight_decay", weight_decay),
                    field("muon.adjust", adjust),
                    field("muon.iterations", iterations),
                    field("muon.eps", eps),
                    field("not_hidden", not_hidden),
                    field("adam.learning_rate for 1 of muon", &(adam.learning_rate / learning_rate)),
                ];
                [own, of_adam(adam)].concat()
            }
            Self::Sgd(config) => {
                let SgdConfig { learning_rate: _, momentum, dampening, weight_decay, nesterov } = config;
                vec![
                    field("sgd.momentum", momentum),
                    field("sgd.dampening", dampening),
                    field("sgd.weight_decay", weight_decay),
                    field("sgd.nesterov", nesterov),
                ]
            }
        };
        [vec![Setting::new("optimizer", self.name())], own].concat()
    }
}

/// The optimizer of a run.
pub(super) struct RunOptimizer {
    optimizer: Box<dyn StepOptimizer + Send>,
    /// Names of this rank's parameters that it needs whole; `None` if it needs none on any rank.
    needs_whole: Option<HashSet<String>>,
    /// Where those are whole, in the current group; `None` before its first step.
    matrices: Option<OwnedMatrices>,
    /// With `far`: the outer step.
    far: Option<FarAverage>,
}

impl RunOptimizer {
    /// Creates the optimizer of a model. Not collective.
    pub(super) fn new<M: Model>(
        model: &Parallel<M>,
        config: &OptimizerConfig,
        far: &FarConfig,
    ) -> Result<Self> {
        let (vars, decays) = (model.named_vars(), |name: &str| model.is_matrix(name));
        let (optimizer, needs_whole): (Box<dyn StepOptimizer + Send>, _) = match config {
            OptimizerConfig::AdamW(adam) => {
                (Box::new(Adam::named(vars, adam.clone())?.decaying(decays)), None)
            }
            OptimizerConfig::Sgd(sgd) => (Box::new(Sgd::named(vars, sgd.clone())?.decaying(decays)), None),
            OptimizerConfig::Muon { config: muon, .. } => {
                let is_hidden = |name: &str| model.is_matrix(name) && config.needs_whole(name);
                let muon = Muon::named(vars, is_hidden, muon.clone())?.decaying(decays);
                let hidden = muon.matrices().map(String::from).collect();
                (Box::new(muon), Some(hidden))
            }
        };
        Ok(Self { optimizer, needs_whole, matrices: None, far: FarAverage::new(model, far)? })
    }

    pub(super) fn set_learning_rate(&mut self, learning_rate: f64) {
        self.optimizer.set_learning_rate(learning_rate);
    }

    /// Steps with gradients multiplied by `scale`. Every rank must call it.
    pub(super) fn step<M: Model>(
        &mut self,
        model: &Parallel<M>,
        grads: &GradStore,
        scale: f64,
    ) -> Result<()> {
        self.far.as_mut().map_or(Ok(()), FarAverage::begin_step)?;
        let Some(names) = &self.needs_whole else {
            return Ok(self.optimizer.step_whole(grads, scale, &mut HeldWhole)?);
        };
        let matrices = match &mut self.matrices {
            Some(matrices) => matrices,
            none => none.insert(model.whole_matrices(|name| names.contains(name))?),
        };
        Ok(self.optimizer.step_whole(grads, scale, matrices)?)
    }

    /// The outer step of `far`.
    pub(super) fn far(&mut self) -> Option<&mut FarAverage> {
        self.far.as_mut()
    }

    /// The group of all ranks has changed: matrices are distributed anew in the next step.
    pub(super) fn forget_group(&mut self) {
        self.matrices = None;
    }
}

impl OptimizerState for RunOptimizer {
    fn state_later(&self) -> training::Result<Vec<(String, DeferredCopy)>> {
        let mut state = self.optimizer.state_later()?;
        state.extend(self.far.as_ref().map_or(Ok(Vec::new()), FarAverage::state)?);
        Ok(state)
    }

    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> training::Result<()> {
        let (of_far, state) = FarAverage::state_of(state);
        self.optimizer.load_state(&state)?;
        Ok(self.far.as_mut().map_or(Ok(()), |far| far.load_state(&of_far))?)
    }
}
