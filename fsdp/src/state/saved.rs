//! Sharded checkpoint reader: description of the saved model, and ranges of its tensors.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, Var};
use serde::{Deserialize, Serialize};
use training::internal::OPTIMIZER_KEY;
use training::{Contents, TensorFile};

use super::fits;
use crate::built::BuiltUnit;
use crate::layout::Layout;
use crate::{Error, Result};

/// Description of a sharded checkpoint, part of its manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Description {
    /// Number of shards.
    pub(super) shards: usize,
    pub(super) pack_elements: usize,
    /// Whether each parameter, and its optimizer state, is a separate tensor. Earlier versions wrote one tensor per unit.
    #[serde(default)]
    pub(super) by_parameter: bool,
    pub(super) units: Vec<UnitDescription>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct UnitDescription {
    pub(super) name: String,
    /// Names and shapes, in order of construction.
    pub(super) parameters: Vec<(String, Vec<usize>)>,
}

/// The manifest's extra data: this crate's, and the user's.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Extra {
    pub(super) fsdp: Description,
    pub(super) extra: serde_json::Value,
}

impl UnitDescription {
    pub(super) fn of(unit: &BuiltUnit) -> Self {
        let parameters = unit.params.iter().map(|param| (param.name.clone(), param.tensor.dims().to_vec()));
        Self { name: unit.name.clone(), parameters: parameters.collect() }
    }

    /// Returns the number of elements of each parameter; `None` where it overflows.
    fn lens(&self) -> Vec<Option<usize>> {
        self.parameters.iter().map(|(_, dims)| elements(dims)).collect()
    }
}

/// Returns the number of elements of a shape, `None` if the product of its nonzero dimensions overflows: strides are computed
/// from those even if another dimension is 0.
fn elements(dims: &[usize]) -> Option<usize> {
    let part = dims.iter().filter(|dim| **dim > 0).try_fold(1usize, |part, dim| part.checked_mul(*dim))?;
    Some(if dims.contains(&0) { 0 } else { part })
}

/// Key of a parameter's shard in a rank's file.
pub(super) fn shard_key(parameter: &str) -> String {
    format!("shard.{parameter}")
}

/// Key of a buffer in the first rank's file.
pub(super) fn buffer_key(name: &str) -> String {
    format!("{BUFFER}{name}")
}

/// Prefix of the keys of buffers.
const BUFFER: &str = "buffer.";

/// Name of the tensor file that a rank writes.
pub(super) fn set_name(shard_rank: usize) -> String {
    format!("shard-{shard_rank:05}")
}

/// Kind of a tensor of the optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// State of this parameter, sharded like it.
    Shard(usize),
    /// A single number, such as a step count, which every rank has.
    Number,
    /// A tensor that cannot be assigned to a parameter, and may differ between ranks.
    Unowned,
}

impl Kind {
    /// Determines the kind from the optimizer's key. `params` are the parameters' names and the lengths of this rank's
    /// variables.
    pub(super) fn of(key: &str, dims: &[usize], params: &[(&str, usize)]) -> Self {
        let is_field = |rest: &str| {
            rest.strip_prefix('.').is_some_and(|field| !field.is_empty() && !field.contains('.'))
        };
        let param = params.iter().position(|(name, _)| key.strip_prefix(name).is_some_and(is_field));
        match param.filter(|&param| dims == [params[param].1]) {
            Some(param) => Self::Shard(param),
            None if dims.is_empty() => Self::Number,
            None => Self::Unowned,
        }
    }
}

/// A checkpoint opened for reading.
pub(super) struct SavedCheckpoint {
    pub(super) description: Description,
    pub(super) extra: serde_json::Value,
    layouts: Vec<Layout>,
    /// By rank.
    files: Vec<TensorFile>,
}

impl SavedCheckpoint {
    pub(super) fn open(contents: &Contents) -> Result<Self> {
        let extra: Extra = serde_json::from_value(contents.extra.clone()).map_err(|_| {
            Error::file(&contents.folder, "it is no sharded checkpoint: its manifest describes no units")
        })?;
        let Description { shards, pack_elements, by_parameter, ref units } = extra.fsdp;
        if !by_parameter {
            let problem = "it was written by an earlier version, with the parameters of a unit as one: read it with that version, \
                           and write its weights with `Fsdp::save_full`";
            return Err(Error::file(&contents.folder, problem));
        }
        let lens: Vec<_> = units.iter().map(UnitDescription::lens).collect();
        let all = lens.iter().flatten().try_fold(0usize, |sum, len| sum.checked_add((*len)?));
        // So that no sum of offsets overflows, whatever the padding.
        if all.is_none_or(|all| all > usize::MAX / 2) {
            return Err(Error::file(&contents.folder, "it describes parameters that are too large"));
        }
        let lens = lens.into_iter().map(|lens| lens.into_iter().flatten().collect::<Vec<_>>());
        let layouts = lens.map(|lens| Layout::new(&lens, pack_elements, shards)).collect();
        let files = (0..shards).map(|rank| TensorFile::open(&contents.path(&set_name(rank))));
        let files = files.collect::<std::result::Result<_, _>>()?;
        Ok(Self { description: extra.fsdp, extra: extra.extra, layouts, files })
    }

    /// Checks that it is of the same model.
    pub(super) fn check(&self, contents: &Contents, units: &[BuiltUnit]) -> Result<()> {
        let refuse = |problem: String| Err(Error::file(&contents.folder, problem));
        let saved = &self.description.units;
        for (saved, unit) in saved.iter().zip(units) {
            let own = UnitDescription::of(unit);
            if saved.name != own.name {
                return refuse(format!(
                    "it is of another model: it has unit {}, this one {}",
                    saved.name, own.name
                ));
            }
            let differs = saved.parameters.iter().zip(&own.parameters).find(|(saved, own)| saved != own);
            if let Some(((name, dims), (own, own_dims))) = differs {
                return refuse(format!(
                    "it is of another model: unit {} has {name} {dims:?}, this one {own} {own_dims:?}",
                    saved.name
                ));
            }
            if saved.parameters.len() != own.parameters.len() {
                return refuse(format!("it is of another model: unit {} has other parameters", saved.name));
            }
        }
        match saved.len() == units.len() {
            true => Ok(()),
            false => refuse(format!(
                "it is of another model: it has {} units, this one {}",
                saved.len(),
                units.len()
            )),
        }
    }

    /// Checks its buffers against the model's. The model may have buffers that it lacks.
    pub(super) fn check_buffers(&self, contents: &Contents, buffers: &[(String, Var)]) -> Result<()> {
        let refuse = |problem: String| Err(Error::file(&contents.folder, problem));
        for (name, dtype, dims) in self.buffers() {
            let Some((_, own)) = buffers.iter().find(|(own, _)| *own == name) else {
                return refuse(format!("it is of another model: it has a buffer {name}, this one has not"));
            };
            if !fits(dtype, own.dtype()) || dims != own.dims() {
                let (expected, expected_dims) = (own.dtype(), own.dims());
                return refuse(format!(
                    "it is of another model: it has a buffer {name} {dtype:?} {dims:?}, this one {expected:?} {expected_dims:?}"
                ));
            }
        }
        Ok(())
    }

    /// Returns names, dtypes and shapes of its buffers.
    pub(super) fn buffers(&self) -> Vec<(String, DType, Vec<usize>)> {
        let all = self.files.first().map(TensorFile::tensors).unwrap_or_default().into_iter();
        all.filter_map(|(key, dtype, dims)| Some((key.strip_prefix(BUFFER)?.to_string(), dtype, dims)))
            .collect()
    }

    /// Reads a buffer; `None` if it does not contain it.
    pub(super) fn buffer(&self, name: &str) -> Result<Option<Tensor>> {
        let key = buffer_key(name);
        let has = self.files.first().is_some_and(|file| file.has(&key));
        has.then(|| self.whole(&key)).transpose()
    }

    /// Reads a range of elements of a parameter, or of its optimizer state, flattened.
    pub(super) fn read(
        &self,
        key: &str,
        (unit, param): (usize, usize),
        range: Range<usize>,
    ) -> Result<Tensor> {
        let found = self.layouts[unit].find(param);
        let Some((part, slot)) = found else { return Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?) };
        let mut pieces = Vec::new();
        for (rank, file) in self.files.iter().enumerate() {
            let (kept, _) = part.kept(slot, rank);
            let (start, end) = (kept.start.max(range.start), kept.end.min(range.end));
            if start < end {
                pieces.push(file.read(key, start - kept.start..end - kept.start)?);
            }
        }
        match &pieces[..] {
            [] => Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?),
            [piece] => Ok(piece.clone()),
            several => Ok(Tensor::cat(several, 0)?),
        }
    }

    /// Reads what a rank with this layout keeps of a parameter or its optimizer state, padded.
    pub(super) fn shard(
        &self,
        key: &str,
        (unit, param): (usize, usize),
        (layout, rank): (&Layout, usize),
        dtype: DType,
    ) -> Result<Tensor> {
        let Some((part, slot)) = layout.find(param) else {
            return Ok(Tensor::zeros(0, dtype, &Device::Cpu)?);
        };
        let shard = Tensor::zeros(part.variable_len(slot, rank), dtype, &Device::Cpu)?;
        let (kept, _) = part.kept(slot, rank);
        if !kept.is_empty() {
            shard.slice_set(&self.read(key, (unit, param), kept)?.to_dtype(dtype)?, 0, 0)?;
        }
        Ok(shard)
    }

    /// Returns the keys of the optimizer state, with their kinds.
    pub(super) fn optimizer_keys(&self) -> Vec<(String, Kind)> {
        let Some(file) = self.files.first() else { return Vec::new() };
        let mut params = Vec::new();
        for (unit, layout) in self.description.units.iter().zip(&self.layouts) {
            for (param, (name, _)) in unit.parameters.iter().enumerate() {
                let len = layout.find(param).map_or(0, |(part, slot)| part.variable_len(slot, 0));
                params.push((&**name, len));
            }
        }
        let kind = |key: String, dims: &[usize]| {
            let kind = Kind::of(key.strip_prefix(OPTIMIZER_KEY)?, dims, &params);
            Some((key, kind))
        };
        file.tensors().into_iter().filter_map(|(key, _, dims)| kind(key, &dims)).collect()
    }

    pub(super) fn whole(&self, key: &str) -> Result<Tensor> {
        match self.files.first() {
            Some(file) => Ok(file.whole(key)?),
            None => Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?),
        }
    }

    pub(super) fn dtype(&self, key: &str) -> DType {
        self.files.first().and_then(|file| file.dtype(key)).unwrap_or(DType::F32)
    }
}
