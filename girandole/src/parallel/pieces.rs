//! Which part of which parameter a rank holds, in any layout.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::Var;
use comm::Communicator;
use strategy::checkpoint::{DeferredSnapshot, Snapshot};
use strategy::{DistributedModel, ModelCopy, Piece, Region};
use training::build::Model;
use training::internal::Runs;
use training::{LossScaler, LossScalerState, OptimizerState};

use super::{Kind, Parallel};
use crate::{Error, Result};

impl<M: Model> Parallel<M> {
    /// Returns the ranks of this one along `pp`, `shard`, `ep` and `tp`: ranks that have them in common hold the same pieces.
    pub(crate) fn place(&self) -> [usize; 4] {
        ["pp", "shard", "ep", "tp"].map(|axis| self.rank_along(axis))
    }

    fn rank_along(&self, axis: &str) -> usize {
        self.axes.of_parameters.axis(axis).map_or(0, |comm| comm.rank())
    }
}

impl<M: Model> Parallel<M> {
    /// Copies what this rank would write if its copy of the model were the only one.
    pub(crate) fn snapshot_as_only_copy(&self, optimizer: &dyn OptimizerState) -> Result<Snapshot> {
        let file = format!("{:?}", self.place());
        Ok(DeferredSnapshot::of(self, file, ModelCopy::ONLY, Some(optimizer))?.copy()?)
    }
}

impl<M: Model> DistributedModel for Parallel<M> {
    type Error = Error;

    const NAMED_VARS: &'static str = "Parallel::named_vars";

    fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |first| Err(Error::Failed { first: first.clone() }))
    }

    fn groups(&self) -> Vec<&dyn Communicator> {
        vec![&**self.axes.mesh.world()]
    }

    fn partition_groups(&self) -> Vec<&dyn Communicator> {
        ["shard", "ep", "tp", "pp"]
            .into_iter()
            .filter_map(|axis| Some(&**self.axes.of_parameters.axis(axis).ok()?))
            .collect()
    }

    fn copy(&self) -> ModelCopy {
        ModelCopy::along(self.axes.of_parameters.axis("dp").ok().map(|copies| &**copies))
    }

    fn pieces(&self) -> Result<Vec<Piece>> {
        let vars = self.model_vars();
        let windows: Vec<Option<Range<usize>>> = match &self.model {
            Kind::Sharded(fsdp) => fsdp.shard_ranges().into_iter().map(Some).collect(),
            Kind::Stages(stages) if stages.flat().is_some() => {
                stages.flat().map(|flat| flat.ranges().into_iter().map(Some).collect()).unwrap_or_default()
            }
            _ => vec![None; vars.len()],
        };
        let [part, experts] = ["tp", "ep"].map(|axis| self.rank_along(axis));
        let stage_ties = self.ties();
        let is_pipeline = matches!(self.model, Kind::Stages(_));
        let piece = |((var_name, var), window): ((String, Var), Option<Range<usize>>)| {
            let all = || Runs { start: 0, len: var.elem_count(), stride: var.elem_count(), count: 1 };
            let held = self.shards.held(&var_name);
            let (dims, runs) = held.unwrap_or_else(|| (var.dims().to_vec(), all()));
            let window = window.unwrap_or(0..runs.len * runs.count);
            let root = stage_ties.get(&var_name).filter(|_| is_pipeline);
            let is_first = (part == 0 || self.shards.divided(&var_name).is_some())
                && (experts == 0 || self.axes.is_of_expert(&var_name))
                && root.is_none();
            let name = root.unwrap_or(&var_name).clone();
            Piece { name, var_name, region: Region { dims, runs, window }, var, is_first, is_buffer: false }
        };
        let trained = vars.into_iter().zip(windows).filter(|((name, _), _)| self.config.is_trained(name));
        let is_first = ["shard", "ep", "tp"].into_iter().all(|axis| self.rank_along(axis) == 0);
        let state = self.buffers().into_iter();
        let state = state.map(|(name, var)| Piece { is_first, is_buffer: true, ..Piece::whole(name, var) });
        Ok(trained.map(piece).chain(state).collect())
    }

    fn ties(&self) -> HashMap<String, String> {
        tie_roots(&self.ties)
    }

    fn loss_scale(&self) -> Option<LossScalerState> {
        self.loss_scaler().map(LossScaler::state)
    }

    fn set_loss_scale(&mut self, state: Option<LossScalerState>) {
        if let (Some(scaler), Some(state)) = (&mut self.scaler, state) {
            scaler.resume(state);
        }
    }

    fn counted_vars(&self) -> Result<Vec<Var>> {
        let vars = self.named_vars().into_iter().map(|(_, var)| var);
        Ok(vars.filter(|var| self.counted.contains(&var.id())).collect())
    }
}

/// Maps each tied name to the first name of its set.
pub(super) fn tie_roots(ties: &[(String, String)]) -> HashMap<String, String> {
    let mut roots: HashMap<String, String> = HashMap::new();
    for (first, second) in ties {
        let root = roots.get(first).unwrap_or(first).clone();
        if root != *second {
            roots.insert(second.clone(), root);
        }
    }
    roots
}
