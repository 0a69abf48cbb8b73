//! Plans for language models in any layout: memory of each rank by kind and bytes sent, as [`girandole::Parallel`]
//! trains them.
//!
//! Parameters are counted by building the model with a builder that allocates nothing ([`Unit`]). Activations are
//! estimated operation by operation, as [`ops::activation_bytes`] measures them in a running model.
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
mod estimate;
mod layouts;
mod memory;
mod operations;
mod outline;
mod partition;
mod stages;
mod table;
mod time;
mod traffic;
mod whole_matrices;

use candle_core::DType;
use girandole::Layout;
use models::{Lora, ModelConfig};
use pipeline::ScheduleKind;
use serde::Serialize;
use training::build::Recompute;

use crate::compare::Memory;
use crate::optimizer::Optimizer;
use crate::{Error, Result};

pub use layouts::{LayoutComparison, layouts};
pub use outline::{Layer, Parameter, Unit};
pub use table::LanguageTable;

/// What is trained: a model, or adapters of a model.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The model.
    pub config: ModelConfig,
    /// Its adapters; then the model's own parameters are frozen.
    pub lora: Option<Lora>,
    /// The model that pairs of answers are compared with (`prefer`): before training, in the same layout, it computes the
    /// log-probabilities of all rows, and is dropped.
    pub reference: Option<Box<Subject>>,
}

/// Configuration of training.
#[derive(Debug, Clone)]
pub struct Training {
    /// Rows of a step, over all ranks. Default: 8.
    pub batch_size: usize,
    /// Tokens of a row. Default: 256.
    pub length: usize,
    /// Tokens of a document, if rows are of documents that do not see each other: what a token's attention reaches. Default:
    /// none, which means the whole row.
    pub document_length: Option<f64>,
    /// Micro-batches of a rank. Default: none, which means 1 or the number of pipeline stages.
    pub micro_batches: Option<usize>,
    /// Which units are recomputed in backward. Default: none.
    pub recompute: Recompute,
    /// Pipeline schedule. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// Dtype of parameters. Default: f32.
    pub dtype: DType,
    /// Kind of optimizer. Default: Adam.
    pub optimizer: Optimizer,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            batch_size: 8,
            length: 256,
            document_length: None,
            micro_batches: None,
            recompute: Recompute::None,
            schedule: ScheduleKind::OneFOneB,
            dtype: DType::F32,
            optimizer: Optimizer::Adam,
        }
    }
}

impl Training {
    /// Returns the number of micro-batches in a layout.
    pub fn micro_batches(&self, layout: &Layout) -> usize {
        self.micro_batches.unwrap_or(layout.pp)
    }

    /// Returns the tokens that a token's attention counts, without a window.
    fn attended(&self) -> f64 {
        self.document_length.map_or(self.length as f64, |document| document.min(self.length as f64))
    }

    fn numbers(&self) -> Numbers {
        let element = self.dtype.size_in_bytes();
        Numbers { element, working: element.max(DType::F32.size_in_bytes()) }
    }

    /// Returns the number of tokens of a rank's micro-batch.
    fn tokens(&self, layout: &Layout) -> usize {
        let parts = layout.data_ranks().saturating_mul(self.micro_batches(layout));
        (self.batch_size / parts.max(1)).saturating_mul(self.length.div_ceil(layout.cp.max(1)))
    }
}

/// Bytes of a number, and of a number in operations that compute 16-bit types in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Numbers {
    element: usize,
    working: usize,
}

/// Cost of the ranks that hold the same pipeline stages, or of all ranks without a pipeline. Their costs are equal
/// except for a few numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StageCost {
    /// Index along `pp`.
    pub stage: usize,
    /// Memory of each rank.
    pub memory: Memory,
    /// Bytes that each rank sends in a step.
    pub sent: f64,
}

/// Cost of a layout.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutCost {
    /// The layout.
    pub layout: Layout,
    /// Cost of each index along `pp`.
    pub stages: Vec<StageCost>,
}

impl LayoutCost {
    /// Returns the memory of the ranks with the largest total.
    pub fn most(&self) -> Memory {
        let all = self.stages.iter().map(|stage| stage.memory);
        all.max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default()
    }

    /// Returns the bytes of memory of all ranks together.
    pub fn total(&self) -> f64 {
        let ranks = (self.layout.ranks() / self.layout.pp.max(1)) as f64;
        self.stages.iter().map(|stage| stage.memory.total() * ranks).sum()
    }

    /// Returns the bytes sent in a step by the rank that sends most.
    pub fn sent(&self) -> f64 {
        self.stages.iter().map(|stage| stage.sent).fold(0.0, f64::max)
    }
}

impl Subject {
    /// Training of a model, or of adapters of it.
    pub fn new(config: ModelConfig, lora: Option<Lora>) -> Self {
        Self { config, lora, reference: None }
    }

    /// Returns the same training after the pass of a reference, which may need more memory.
    #[must_use]
    pub fn with_reference(self, reference: Self) -> Self {
        Self { reference: Some(Box::new(reference)), ..self }
    }

    /// Returns a rank's part of the model, unit by unit; with `pp`, of all stages.
    ///
    /// # Errors
    /// Sizes that the ranks do not divide.
    pub fn units(&self, layout: &Layout) -> Result<Vec<Unit>> {
        outline::units((&self.config, self.lora.as_ref()), (layout.tp, layout.ep), layout.pp > 1)
            .map_err(Error::model)
    }

    /// Returns the number of experts of a block; 0 without any.
    pub fn experts(&self) -> usize {
        self.config.experts.as_ref().map_or(0, |experts| experts.count)
    }

    /// Returns the number of all parameters, and of trained parameters.
    ///
    /// # Errors
    /// A model that cannot be built.
    pub fn parameters(&self) -> Result<(u64, u64)> {
        let units = self.units(&Layout::default())?;
        let sum = |of: fn(&Unit) -> usize| units.iter().map(|unit| of(unit) as u64).sum();
        Ok((sum(Unit::elements), sum(Unit::trained)))
    }

    /// Estimates the cost of a layout.
    ///
    /// # Errors
    /// A layout that is not possible: [`Error::Layout`] has the reason.
    pub fn estimate(&self, training: &Training, layout: &Layout) -> Result<LayoutCost> {
        estimate::estimate(self, training, layout)
    }
}
