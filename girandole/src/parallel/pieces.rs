//! Which part of which parameter a rank holds; used to write and read checkpoints.

use std::ops::Range;

use candle_core::Var;
use training::build::Model;
use training::internal::Runs;

use super::{Kind, Parallel};
use crate::region::Region;

/// A variable of this rank, and the elements of a parameter that it holds.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Name of the parameter; for tied ones, of the first.
    pub name: String,
    /// Name of the variable.
    pub var_name: String,
    /// Which elements of the whole parameter it holds.
    pub region: Region,
    /// The variable; it may have more elements, which are padding.
    pub var: Var,
    /// Whether this rank writes it to a checkpoint.
    pub writes: bool,
}

impl Piece {
    /// Whether this rank has a manifest entry for it: it writes elements, or the parameter has none at all.
    pub(crate) fn is_described(&self) -> bool {
        self.writes && (!self.region.is_empty() || self.region.dims.contains(&0))
    }
}

impl<M: Model> Parallel<M> {
    /// Returns this rank's pieces of trained parameters and of state ([`buffers`](Self::buffers)).
    pub fn pieces(&self) -> Vec<Piece> {
        self.pieces_of_copy(self.rank_along("dp"))
    }

    /// Returns the ranks of this one along `pp`, `shard` and `tp`: ranks that have them in common hold the same pieces.
    pub(crate) fn place(&self) -> [usize; 3] {
        ["pp", "shard", "tp"].map(|axis| self.rank_along(axis))
    }

    fn rank_along(&self, axis: &str) -> usize {
        self.mesh.axis(axis).map_or(0, |comm| comm.rank())
    }

    /// Returns this rank's pieces as if it belonged to this copy of the model.
    pub(crate) fn pieces_of_copy(&self, copy: usize) -> Vec<Piece> {
        let vars = self.model_vars();
        let windows: Vec<Option<Range<usize>>> = match &self.model {
            Kind::Sharded(fsdp) => fsdp.shard_ranges().into_iter().map(Some).collect(),
            Kind::Stages(stages) if stages.flat().is_some() => {
                stages.flat().map(|flat| flat.ranges().into_iter().map(Some).collect()).unwrap_or_default()
            }
            _ => vec![None; vars.len()],
        };
        let (part, stage_ties) = (self.rank_along("tp"), self.ties_of());
        let is_pipeline = matches!(self.model, Kind::Stages(_));
        let piece = |((var_name, var), window): ((String, Var), Option<Range<usize>>)| {
            let all = || Runs { start: 0, len: var.elem_count(), stride: var.elem_count(), count: 1 };
            let held = self.shards.held(&var_name);
            let (dims, runs) = held.unwrap_or_else(|| (var.dims().to_vec(), all()));
            let window = window.unwrap_or(0..runs.len * runs.count);
            let root = stage_ties.get(&var_name).filter(|_| is_pipeline);
            let is_own = part == 0 || self.shards.is_divided(&var_name);
            let writes = copy == 0 && is_own && root.is_none();
            let name = root.unwrap_or(&var_name).clone();
            Piece { name, var_name, region: Region { dims, runs, window }, var, writes }
        };
        let trained = vars.into_iter().zip(windows).filter(|((name, _), _)| self.config.is_trained(name));
        let is_first = copy == 0 && ["shard", "tp"].into_iter().all(|axis| self.rank_along(axis) == 0);
        let state = self.buffers().into_iter().map(|(name, var)| {
            let region = Region::whole(var.dims());
            Piece { var_name: name.clone(), name, region, var, writes: is_first }
        });
        trained.map(piece).chain(state).collect()
    }
}
