//! The model as a layout divides it: what memory and bytes sent are calculated from.

use std::ops::Range;

use girandole::Layout;
use pipeline::Schedule;
use training::build::Recompute;

use super::activations::PerToken;
use super::outline::Unit;
use super::{Subject, Training};
use crate::Result;
use crate::optimizer::Optimizer;
use crate::strategy::split;

/// Model in a layout.
pub(super) struct PartitionedModel<'a> {
    pub(super) subject: &'a Subject,
    pub(super) training: &'a Training,
    /// The layout of the parameters: ranks along `cp` are copies or shards.
    pub(super) layout: Layout,
    /// Ranks that each row is divided over.
    pub(super) cp: usize,
    pub(super) units: Vec<Unit>,
    /// Elements of each unit, with the experts of all ranks: by them the model is cut into stages.
    sizes: Vec<usize>,
    /// Those of a model that is not divided, for an optimizer that needs whole matrices.
    pub(super) whole_units: Vec<Unit>,
    pub(super) kept: PerToken<'a>,
    /// Tokens of a rank's micro-batch.
    pub(super) tokens: f64,
    /// Elements of a rank's part of the embedding table.
    pub(super) vocabulary: f64,
    /// Elements of a rank's part of the head; one for labels is not divided.
    pub(super) head: f64,
    pub(super) classes: f64,
    pub(super) is_tied: bool,
}

impl<'a> PartitionedModel<'a> {
    pub(super) fn new(subject: &'a Subject, training: &'a Training, layout: &Layout) -> Result<Self> {
        let units = subject.units(layout)?;
        let sizes = |units: &[Unit]| units.iter().map(Unit::elements).collect();
        let sizes = match layout.ep {
            1 => sizes(&units),
            _ => sizes(&subject.units(&Layout { ep: 1, ..*layout })?),
        };
        let whole_units = match training.optimizer {
            Optimizer::Muon => subject.units(&Layout { tp: 1, ..*layout })?,
            _ => Vec::new(),
        };
        let hidden = subject.config.hidden_size;
        let vocabulary = (subject.config.vocab_size.div_ceil(layout.tp) * hidden) as f64;
        let head = subject.config.labels.as_ref().map(|labels| (labels.names.len() * hidden) as f64);
        Ok(Self {
            whole_units,
            subject,
            training,
            layout: layout.of_parameters(),
            cp: layout.cp,
            units,
            sizes,
            kept: PerToken::new(subject, training.numbers(), (layout.tp, layout.ep)),
            tokens: training.tokens(layout) as f64,
            vocabulary,
            head: head.unwrap_or(vocabulary),
            classes: subject.config.outputs() as f64,
            is_tied: subject.config.tied,
        })
    }

    /// Returns whether a unit is recomputed in backward: only blocks, because the embedding's input is not float.
    pub(super) fn recomputes(&self, unit: usize) -> bool {
        self.is_block(unit)
            && match self.training.recompute {
                Recompute::None => false,
                Recompute::Units | Recompute::Selective => true,
                Recompute::Every(each) => (unit + 1).is_multiple_of(each.max(1)),
            }
    }

    /// Returns whether a unit's matrix products are recomputed in backward.
    pub(super) fn recomputes_products(&self, unit: usize) -> bool {
        self.recomputes(unit) && self.training.recompute != Recompute::Selective
    }

    /// Whether the head scores documents, in place of tokens.
    pub(super) fn scores_documents(&self) -> bool {
        self.subject.config.labels.is_some()
    }

    /// Returns the schedule of the pipeline, and the units of each of its stages.
    pub(super) fn stages(&self) -> Result<(Schedule, Vec<Range<usize>>)> {
        let (kind, ranks) = (self.training.schedule, self.layout.pp);
        let costs: Vec<f64> = self.sizes.iter().map(|elements| *elements as f64).collect();
        // First, because it refuses what has more stages than units: most layouts of many ranks, with the largest schedules.
        let ranges = split(&costs, ranks.saturating_mul(kind.stages_per_rank()))?;
        let micro_batches = self.training.micro_batches(&self.layout);
        Ok((Schedule::of(kind, ranks, kind.stages_per_rank(), micro_batches)?, ranges))
    }

    /// Returns the number of ranks that have copies of parameters, or shards of them: of experts, and of all others.
    pub(super) fn holders(&self) -> [usize; 2] {
        let Layout { dp, shard, ep, .. } = self.layout;
        let own = dp.saturating_mul(shard);
        [own, own.saturating_mul(ep)]
    }

    pub(super) fn element(&self) -> f64 {
        self.training.numbers().element as f64
    }

    pub(super) fn working(&self) -> f64 {
        self.training.numbers().working as f64
    }

    pub(super) fn is_block(&self, unit: usize) -> bool {
        unit > 0 && unit + 1 < self.units.len()
    }
}

/// Returns the units of all stages of a rank.
pub(super) fn owned_units(schedule: &Schedule, ranges: &[Range<usize>], rank: usize) -> Vec<usize> {
    let own = ranges.iter().zip(&schedule.table().owners).filter(|(_, owner)| **owner == rank);
    own.flat_map(|(range, _)| range.clone()).collect()
}
