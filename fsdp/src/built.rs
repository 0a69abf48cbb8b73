//! A model after construction: its units, and of each parameter the shard that this rank keeps.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use comm::internal::Digest;

use crate::bytes::Bytes;
use crate::layout::{FlatLayout, Part};

/// What has been built so far.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) units: Vec<BuiltUnit>,
    /// Parameter name to the name of its unit.
    pub(crate) owners: HashMap<String, String>,
    /// Name of the unit that is being built.
    pub(crate) building: Option<String>,
    pub(crate) buffers: Vec<(String, Var)>,
}

/// A unit after construction.
#[derive(Debug)]
pub(crate) struct BuiltUnit {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) bytes: Vec<Bytes>,
    pub(crate) layout: FlatLayout,
    /// This rank's index among the shards.
    pub(crate) rank: usize,
    /// Dtype that the unit computes in.
    pub(crate) dtype: DType,
    pub(crate) keep: bool,
    /// By group of replicas: hash of all initial values, including those that other ranks keep; with a range source, of the
    /// first few elements of each parameter.
    pub(crate) digests: Vec<Digest>,
    /// Whether initial values were read by range, only as far as this rank keeps them.
    pub(crate) is_read: bool,
    /// By group: hash of the values that this rank keeps of parameters read by range. `None` where no other rank keeps the same
    /// shard.
    pub(crate) kept_digests: Option<Vec<Digest>>,
}

/// A sharded parameter.
#[derive(Debug, Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// The tensor that the model computes with; its storage is released while its unit does not run.
    pub(crate) tensor: Tensor,
    /// This rank's shard: flat, padded.
    pub(crate) shard: Var,
}

impl BuiltUnit {
    pub(crate) fn device(&self) -> &Device {
        self.params[0].shard.device()
    }

    /// Dtype of the unit's shards.
    pub(crate) fn shard_dtype(&self) -> DType {
        self.params[0].shard.dtype()
    }

    pub(crate) fn shard_bytes(&self) -> usize {
        let elements: usize = self.params.iter().map(|param| param.shard.elem_count()).sum();
        let bytes: usize = self.bytes.iter().map(|bytes| bytes.shard.elem_count()).sum();
        elements * self.shard_dtype().size_in_bytes() + bytes
    }

    /// Returns this rank's piece of a part, padded.
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

    /// Returns a parameter's range of a tensor made of this rank's pieces; it has the length of the parameter's variable.
    pub(crate) fn of_param(&self, pieces: &Tensor, param: usize) -> Result<Tensor> {
        match self.layout.find(param) {
            Some((part, slot)) if part.kept_len(slot, self.rank) > 0 => {
                let (_, start) = part.kept(slot, self.rank);
                pieces.narrow(0, part.offset + start, part.kept_len(slot, self.rank))
            }
            _ => self.params[param].shard.as_tensor().zeros_like(),
        }
    }

    /// Returns the range of the flat parameter that this rank keeps.
    pub(crate) fn kept(&self, param: usize) -> Range<usize> {
        self.layout.find(param).map_or(0..0, |(part, slot)| part.kept(slot, self.rank).0)
    }
}

/// Index of a parameter: its unit, and its position in the unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParamIndex {
    pub(crate) unit: usize,
    pub(crate) param: usize,
}
