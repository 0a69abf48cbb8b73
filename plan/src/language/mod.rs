//! Language models in any layout: memory of each rank by kind, and bytes that it sends, as [`girandole::Parallel`] trains them.
//!
//! Parameters are counted by building the model with a builder that allocates nothing ([`Unit`]). What forward keeps is what its
//! operations keep, which [`training::activation_bytes`] counts in a model that runs.
//!
//! ```
//! use models::ModelConfig;
//! use plan::language::{Subject, Training};
//!
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/llama").as_ref();
//! let subject = Subject::new(ModelConfig::from_folder(folder)?, None);
//! let training = Training { batch_size: 8, length: 16, ..Training::default() };
//! let alone = subject.estimate(&training, &"dp=1".parse()?)?;
//! let sharded = subject.estimate(&training, &"shard=2".parse()?)?;
//! assert!(sharded.most().optimizer < 0.6 * alone.most().optimizer);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod activations;
mod layouts;
mod memory;
mod operations;
mod outline;
mod recommend;
mod stages;
mod table;
mod time;
mod traffic;

use candle_core::DType;
use girandole::Layout;
use models::{Lora, ModelConfig};
use pipeline::ScheduleKind;
use serde::Serialize;
use training::build::Recompute;

use crate::optimizer::Optimizer;
use crate::{Error, Result};

pub use layouts::{Compared, RuledOut, layouts};
pub use outline::{Layer, Parameter, Unit};
pub use table::LanguageTable;

/// What is trained: a model, or adapters of it.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The model.
    pub config: ModelConfig,
    /// Its adapters: all else is frozen.
    pub lora: Option<Lora>,
}

/// How it is trained.
#[derive(Debug, Clone)]
pub struct Training {
    /// Rows of a step, over all ranks. Default: 8.
    pub batch_size: usize,
    /// Tokens of a row. Default: 256.
    pub length: usize,
    /// Parts of a rank's rows, one after the other. Default: none, 1 or as many as pipeline stages.
    pub micro_batches: Option<usize>,
    /// Which units are computed again in backward. Default: none.
    pub recompute: Recompute,
    /// The order of work of pipeline stages. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// Of parameters. Default: f32.
    pub dtype: DType,
    /// What it remembers. Default: Adam.
    pub optimizer: Optimizer,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            batch_size: 8,
            length: 256,
            micro_batches: None,
            recompute: Recompute::None,
            schedule: ScheduleKind::OneFOneB,
            dtype: DType::F32,
            optimizer: Optimizer::Adam,
        }
    }
}

impl Training {
    /// Micro-batches in a layout.
    pub fn micro_batches(&self, layout: &Layout) -> usize {
        self.micro_batches.unwrap_or(layout.pp)
    }

    fn numbers(&self) -> Numbers {
        let element = self.dtype.size_in_bytes();
        Numbers { element, working: element.max(DType::F32.size_in_bytes()) }
    }

    /// Tokens of a rank's micro-batch.
    fn tokens(&self, layout: &Layout) -> usize {
        let parts = layout.data_ranks().saturating_mul(self.micro_batches(layout));
        (self.batch_size / parts.max(1)).saturating_mul(self.length)
    }
}

/// Bytes of a number, and of one that is computed with where it has 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Numbers {
    element: usize,
    working: usize,
}

/// Bytes of a rank, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Memory {
    /// This rank's parameters, or its parts of them: what the optimizer changes, and what is frozen.
    pub parameters: f64,
    /// Gradients, the most of them at once.
    pub gradients: f64,
    /// What the optimizer remembers.
    pub optimizer: f64,
    /// What forward keeps for backward, of all micro-batches that are under way.
    pub activations: f64,
    /// Copies that the model computes with, gathered units, messages, and what an operation needs for a moment.
    pub buffers: f64,
}

impl Memory {
    /// All kinds.
    pub fn total(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
    }
}

/// Ranks that hold the same stages of a pipeline, or all ranks where there is none: they need as much as each other, but for a few
/// numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StageCost {
    /// Their place along `pp`.
    pub stage: usize,
    /// Memory of each.
    pub memory: Memory,
    /// Bytes that each sends in a step.
    pub sent: f64,
}

/// What a layout needs.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutCost {
    /// The layout.
    pub layout: Layout,
    /// By place along `pp`.
    pub stages: Vec<StageCost>,
}

impl LayoutCost {
    /// Of the ranks that need most in all.
    pub fn most(&self) -> Memory {
        let all = self.stages.iter().map(|stage| stage.memory);
        all.max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default()
    }

    /// Bytes of all ranks together.
    pub fn total(&self) -> f64 {
        let ranks = (self.layout.ranks() / self.layout.pp.max(1)) as f64;
        self.stages.iter().map(|stage| stage.memory.total() * ranks).sum()
    }

    /// The most bytes that a rank sends in a step.
    pub fn sent(&self) -> f64 {
        self.stages.iter().map(|stage| stage.sent).fold(0.0, f64::max)
    }
}

impl Subject {
    /// A model, or adapters of it.
    pub fn new(config: ModelConfig, lora: Option<Lora>) -> Self {
        Self { config, lora }
    }

    /// What each rank has of the model, unit by unit, in a layout: with `pp` of all stages.
    ///
    /// # Errors
    /// Sizes that the ranks do not divide.
    pub fn units(&self, layout: &Layout) -> Result<Vec<Unit>> {
        outline::units((&self.config, self.lora.as_ref()), layout.tp, layout.pp > 1).map_err(Error::model)
    }

    /// Parameters in all, and those that are trained.
    ///
    /// # Errors
    /// A model that cannot be built.
    pub fn parameters(&self) -> Result<(u64, u64)> {
        let units = self.units(&Layout::default())?;
        let sum = |of: fn(&Unit) -> usize| units.iter().map(|unit| of(unit) as u64).sum();
        Ok((sum(Unit::elements), sum(Unit::trained)))
    }

    /// What a layout needs.
    ///
    /// # Errors
    /// Why it cannot be: [`Error::Layout`] says what does not go together.
    pub fn estimate(&self, training: &Training, layout: &Layout) -> Result<LayoutCost> {
        memory::estimate(self, training, layout)
    }
}
