//! What a model is made of, once it is built: units, and in each parameters of which each rank keeps a part.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use comm::Digest;

use crate::layout::{Layout, Part};

/// What was built so far.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) units: Vec<Built>,
    /// The unit of each parameter.
    pub(crate) owners: HashMap<String, String>,
    /// The unit that is being built.
    pub(crate) building: Option<String>,
    pub(crate) buffers: Vec<(String, Var)>,
}

/// A unit that was built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) layout: Layout,
    /// Which of its shards is this rank's.
    pub(crate) rank: usize,
    /// What it computes in.
    pub(crate) dtype: DType,
    pub(crate) keep: bool,
    /// Of all first values, this rank's and the others'; of what is read in parts, of the first few of each parameter.
    pub(crate) digest: Digest,
    /// Whether parameters are read in parts.
    pub(crate) is_read: bool,
    /// Of what this rank keeps of these, where others keep the same.
    pub(crate) kept_digest: Option<Digest>,
}

/// A parameter.
#[derive(Debug, Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// What the model computes with, released unless its unit runs.
    pub(crate) tensor: Tensor,
    /// What this rank keeps of it, flat and padded.
    pub(crate) shard: Var,
}

impl Built {
    pub(crate) fn device(&self) -> &Device {
        self.params[0].shard.device()
    }

    /// Of its shards.
    pub(crate) fn shard_dtype(&self) -> DType {
        self.params[0].shard.dtype()
    }

    pub(crate) fn shard_bytes(&self) -> usize {
        let elements: usize = self.params.iter().map(|param| param.shard.elem_count()).sum();
        elements * self.shard_dtype().size_in_bytes()
    }

    /// This rank's piece of a part, padded.
    pub(crate) fn piece(&self, part: &Part) -> Result<Tensor> {
        let mut pieces = Vec::with_capacity(part.slots.len());
        for slot in &part.slots {
            let (shard, len) = (&self.params[slot.param].shard, part.kept_len(slot, self.rank));
            if len > 0 {
                pieces.push(shard.as_detached_tensor().narrow(0, 0, len)?);
            }
        }
        match &pieces[..] {
            [] => Tensor::zeros(0, self.shard_dtype(), self.device()),
            [one] => Ok(one.clone()),
            several => Tensor::cat(several, 0),
        }
    }

    /// What lies of a parameter in a tensor made of this rank's pieces: as long as the parameter's variable.
    pub(crate) fn of_param(&self, pieces: &Tensor, param: usize) -> Result<Tensor> {
        match self.layout.find(param) {
            Some((part, slot)) if part.kept_len(slot, self.rank) > 0 => {
                let (_, start) = part.kept(slot, self.rank);
                pieces.narrow(0, part.offset + start, part.kept_len(slot, self.rank))
            }
            _ => self.params[param].shard.as_tensor().zeros_like(),
        }
    }

    /// The elements of a parameter that this rank keeps.
    pub(crate) fn kept(&self, param: usize) -> Range<usize> {
        self.layout.find(param).map_or(0..0, |(part, slot)| part.kept(slot, self.rank).0)
    }
}

/// Which parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParamIndex {
    pub(crate) unit: usize,
    pub(crate) param: usize,
}
