//! The index of a checkpoint: which parts of which tensors its files hold, and under which keys. It is what the folder's manifest
//! (`training/src/checkpoint/manifest.rs`) has as `extra`; the program's own data is the `extra` in it.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::LossScalerState;
use training::internal::Runs;

use crate::Region;

/// Describes all parts, and holds the program's own data.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ShardIndex {
    pub(super) parameters: BTreeMap<String, TensorEntry>,
    /// State of the optimizer, by key; each is a tensor divided like its parameter, or one value. Empty before the first
    /// step; `None` if the checkpoint was written without an optimizer.
    pub(super) optimizer: Option<BTreeMap<String, OptimizerEntry>>,
    /// For each tied parameter the name of the parameter that it is tied to.
    pub(super) ties: HashMap<String, String>,
    /// State of the loss scaler, if losses are scaled.
    #[serde(default)]
    pub(super) loss_scale: Option<LossScalerState>,
    pub(super) extra: Value,
}

impl ShardIndex {
    /// Adds what one rank contributes.
    pub(super) fn add(
        &mut self,
        parts: Vec<NamedPart>,
        optimizer: Option<BTreeMap<String, OptimizerEntry>>,
        ties: HashMap<String, String>,
    ) {
        if let Some(optimizer) = optimizer {
            self.optimizer.get_or_insert_default().extend(optimizer);
        }
        self.ties.extend(ties);
        for (name, dims, dtype, part) in parts {
            let described = TensorEntry { dims, dtype, parts: Vec::new() };
            self.parameters.entry(name).or_insert(described).parts.push(part);
        }
    }
}

/// Name, shape and dtype of a parameter, and the part of it that a rank holds.
pub(crate) type NamedPart = (String, Vec<usize>, String, Part);

/// Shape, dtype and parts of a tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorEntry {
    pub(super) dims: Vec<usize>,
    pub(super) dtype: String,
    pub(super) parts: Vec<Part>,
}

/// One piece of optimizer state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OptimizerEntry {
    /// Name of the parameter to which it belongs.
    pub(super) of: String,
    /// Whether it has one value for each element of the parameter.
    pub(super) by_element: bool,
}

pub(super) fn model_key(name: &str) -> String {
    format!("model/{name}")
}

pub(super) fn optimizer_key(key: &str) -> String {
    format!("optimizer/{key}")
}

/// A region without the shape, as stored in the index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Name of the file's tensor set.
    pub(super) file: String,
    /// Start, length, stride and count.
    runs: [usize; 4],
    window: [usize; 2],
}

impl Part {
    pub(crate) fn of(file: &str, region: &Region) -> Self {
        let Runs { start, len, stride, count } = region.runs;
        let window = [region.window.start, region.window.end];
        Self { file: file.into(), runs: [start, len, stride, count], window }
    }

    pub(crate) fn region(&self, dims: &[usize]) -> Region {
        let [start, len, stride, count] = self.runs;
        let runs = Runs { start, len, stride, count };
        Region { dims: dims.to_vec(), runs, window: self.window[0]..self.window[1] }
    }
}
