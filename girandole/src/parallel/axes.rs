//! The groups of a layout: of the rows of a batch, and of the parameters.

use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, Mesh};
use context_parallel::ContextParallel;
use expert_parallel::ExpertParallel;
use ops::{DividedRows, RowContext};
use strategy::ParameterGroups;

use crate::{Batch, Error, Layout, Result};

/// The groups of a layout. Ranks along `cp` have the same rows, of which each computes some places; for the parameters they are
/// copies, or shards, as ranks with other rows are. Ranks along `ep` have different rows and different experts; all other
/// parameters are copies.
pub(super) struct Axes {
    pub(super) mesh: Mesh,
    /// The mesh of [`Layout::of_parameters`].
    pub(super) of_parameters: Mesh,
    /// Ranks with different rows (`dp`, `shard` and `ep`).
    pub(super) data: Arc<dyn Communicator>,
    /// Ranks whose gradients are averaged, and whose losses are summed (`dp`, `shard`, `cp` and `ep`).
    pub(super) averaged: Arc<dyn Communicator>,
    /// With experts to be balanced: ranks with different rows, places or stages (all axes but `tp`).
    pub(super) undivided: Option<Arc<dyn Communicator>>,
    /// Of each parameter, the ranks whose gradients are averaged: those of experts are averaged without `ep`.
    pub(super) averaged_over: ParameterGroups,
    /// With `shard`: of each parameter, the ranks that hold the same shard.
    pub(super) same_shard: ParameterGroups,
    /// The ranks that divide rows, if there are several.
    pub(super) context: Option<ContextParallel>,
    /// The ranks that divide experts, if there are several.
    pub(super) experts: Option<ExpertParallel>,
}

impl Axes {
    pub(super) fn new(
        layout: &Layout,
        comm: Arc<dyn Communicator>,
        sequence_parallel: bool,
        balances: bool,
    ) -> Result<Self> {
        let mesh = layout.mesh(comm.clone())?;
        let others: Vec<&str> = mesh.axes().map(|(name, _)| name).filter(|name| *name != "tp").collect();
        let undivided = if balances { Some(mesh.plane(&others)?) } else { None };
        let data = mesh.plane(&["dp", "shard", "ep"])?;
        let (mut of_parameters, mut averaged, mut context) = (mesh.clone(), data.clone(), None);
        if layout.cp > 1 {
            of_parameters = layout.of_parameters().mesh(comm)?;
            averaged = of_parameters.plane(&["dp", "shard", "ep"])?;
            let multiple = if sequence_parallel { layout.tp } else { 1 };
            context = Some(ContextParallel::new(mesh.axis("cp")?.clone()).in_multiples_of(multiple));
        }
        let (mut averaged_over, mut experts) = (ParameterGroups::of(averaged.clone()), None);
        let dp = of_parameters.axis("dp")?;
        let mut same_shard = ParameterGroups::of(dp.clone());
        if layout.ep > 1 {
            let divided = ExpertParallel::new(mesh.axis("ep")?.clone());
            let is_own = || {
                let divided = divided.clone();
                move |name: &str| divided.is_of_expert(name)
            };
            let of_experts = of_parameters.plane(&["dp", "shard"])?;
            averaged_over = averaged_over.with_fewer(of_experts, is_own());
            if layout.shard > 1 {
                let of_all = of_parameters.plane(&["dp", "ep"])?;
                same_shard = ParameterGroups::of(of_all).with_fewer(dp.clone(), is_own());
            }
            experts = Some(divided);
        }
        Ok(Self {
            mesh,
            of_parameters,
            data,
            averaged,
            averaged_over,
            same_shard,
            undivided,
            context,
            experts,
        })
    }

    /// Whether a parameter is of an expert that ranks along `ep` do not have.
    pub(super) fn is_of_expert(&self, name: &str) -> bool {
        self.experts.as_ref().is_some_and(|experts| experts.is_of_expert(name))
    }

    /// Divides a prompt of `len` tokens, if there is one for each rank at least.
    pub(super) fn divide_prompt(&self, len: usize) -> Result<Option<DividedRows>> {
        let Some(rows) = self.context.as_ref().filter(|rows| len >= rows.comm().world_size()) else {
            return Ok(None);
        };
        // Divided layers compute whole sequences there.
        Ok(Some(rows.clone().in_multiples_of(1).divide(len, None)?))
    }

    /// Returns this rank's places of a batch, and what they are of.
    pub(super) fn part_of(&self, batch: Batch) -> Result<(Batch, RowContext)> {
        let Batch { input, targets, documents, preferences } = batch;
        let divided = match &self.context {
            None => None,
            Some(rows) => Some(rows.divide(length_of(&input)?, documents.as_ref())?),
        };
        let (input, targets) = match &divided {
            None => (input, targets),
            Some(rows) => (rows.part_of(&input)?, rows.part_of(&targets)?),
        };
        let rows = RowContext {
            documents: documents.clone(),
            divided,
            preferences: preferences.clone(),
            ..RowContext::default()
        };
        Ok((Batch { input, targets, documents, preferences }, rows))
    }
}

/// The number of places of an input's rows.
pub(super) fn length_of(input: &Tensor) -> Result<usize> {
    match input.dims() {
        [_, len, ..] => Ok(*len),
        dims => Err(Error::invalid(
            "the input of a layout with cp",
            format!("shape {dims:?}"),
            "give (rows, length, ..)",
        )),
    }
}
