//! A sharded checkpoint on disk: what it is of, and any element of it.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, Var};
use serde::{Deserialize, Serialize};
use training::Contents;

use super::TensorFile;
use crate::builder::Built;
use crate::layout::Layout;
use crate::{Error, Result};

/// What a sharded checkpoint is of, in its manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Description {
    /// Ranks that it is cut for.
    pub(super) shards: usize,
    pub(super) pack_elements: usize,
    pub(super) units: Vec<UnitDescription>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct UnitDescription {
    pub(super) name: String,
    /// Names and shapes, in order of construction.
    pub(super) parameters: Vec<(String, Vec<usize>)>,
}

/// The manifest's part that is the user's, and the one that is ours.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Extra {
    pub(super) fsdp: Description,
    pub(super) extra: serde_json::Value,
}

impl UnitDescription {
    pub(super) fn of(unit: &Built) -> Self {
        let parameters = unit.params.iter().map(|param| (param.name.clone(), param.tensor.dims().to_vec()));
        Self { name: unit.name.clone(), parameters: parameters.collect() }
    }

    /// How many elements each parameter has, if they can be counted.
    fn lens(&self) -> Vec<Option<usize>> {
        self.parameters.iter().map(|(_, dims)| elements(dims)).collect()
    }
}

/// The elements of a shape of which no part has more than can be counted, for the strides of one without elements.
fn elements(dims: &[usize]) -> Option<usize> {
    let part = dims.iter().filter(|dim| **dim > 0).try_fold(1usize, |part, dim| part.checked_mul(*dim))?;
    Some(if dims.contains(&0) { 0 } else { part })
}

/// The key of a unit's shard in a rank's file.
pub(super) fn shard_key(unit: &str) -> String {
    format!("shard.{unit}")
}

/// The key of a buffer in the first rank's file.
pub(super) fn buffer_key(name: &str) -> String {
    format!("{BUFFER}{name}")
}

/// Before the names of buffers.
const BUFFER: &str = "buffer.";
/// Before the keys of the optimizer's state.
pub(super) const OPTIMIZER: &str = "optimizer.";

/// The set of tensors that a rank writes.
pub(super) fn set_name(shard_rank: usize) -> String {
    format!("shard-{shard_rank:05}")
}

/// What a tensor is that an optimizer remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of this unit, and sharded as it is.
    Shard(usize),
    /// A single number, such as a count of steps, which every rank has.
    Number,
    /// One that ranks have different values of, and nobody knows of what.
    Stray,
}

impl Kind {
    /// By an optimizer's own key, with the units' names and lengths of shards.
    pub(super) fn of(key: &str, dims: &[usize], units: &[(&str, usize)]) -> Self {
        let is_field = |rest: &str| {
            rest.strip_prefix('.').is_some_and(|field| !field.is_empty() && !field.contains('.'))
        };
        let unit = units.iter().position(|(name, _)| key.strip_prefix(name).is_some_and(is_field));
        match unit.filter(|&unit| dims == [units[unit].1]) {
            Some(unit) => Self::Shard(unit),
            None if dims.is_empty() => Self::Number,
            None => Self::Stray,
        }
    }
}

/// A checkpoint that is read.
pub(super) struct Saved {
    pub(super) description: Description,
    pub(super) extra: serde_json::Value,
    layouts: Vec<Layout>,
    /// By rank.
    files: Vec<TensorFile>,
}

impl Saved {
    pub(super) fn open(contents: &Contents) -> Result<Self> {
        let extra: Extra = serde_json::from_value(contents.extra.clone()).map_err(|_| {
            Error::file(&contents.folder, "it is no sharded checkpoint: its manifest describes no units")
        })?;
        let Description { shards, pack_elements, ref units } = extra.fsdp;
        let lens: Vec<_> = units.iter().map(UnitDescription::lens).collect();
        let all = lens.iter().flatten().try_fold(0usize, |sum, len| sum.checked_add((*len)?));
        // So that no sum of places overflows, whatever the padding.
        if all.is_none_or(|all| all > usize::MAX / 2) {
            return Err(Error::file(&contents.folder, "it describes parameters that are too large"));
        }
        let lens = lens.into_iter().map(|lens| lens.into_iter().flatten().collect::<Vec<_>>());
        let layouts = lens.map(|lens| Layout::new(&lens, pack_elements, shards)).collect();
        let files = (0..shards).map(|rank| TensorFile::open(&contents.path(&set_name(rank))));
        let files = files.collect::<Result<_>>()?;
        Ok(Self { description: extra.fsdp, extra: extra.extra, layouts, files })
    }

    /// Compares it with a model.
    pub(super) fn check(&self, contents: &Contents, units: &[Built]) -> Result<()> {
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

    /// Compares its buffers with a model's, which may have some that it lacks.
    pub(super) fn check_buffers(&self, contents: &Contents, buffers: &[(String, Var)]) -> Result<()> {
        let refuse = |problem: String| Err(Error::file(&contents.folder, problem));
        for (name, dtype, dims) in self.buffers() {
            let Some((_, own)) = buffers.iter().find(|(own, _)| *own == name) else {
                return refuse(format!("it is of another model: it has a buffer {name}, this one has not"));
            };
            if dtype != own.dtype() || dims != own.dims() {
                let (expected, expected_dims) = (own.dtype(), own.dims());
                return refuse(format!(
                    "it is of another model: it has a buffer {name} {dtype:?} {dims:?}, this one {expected:?} {expected_dims:?}"
                ));
            }
        }
        Ok(())
    }

    /// Names, dtypes and shapes of its buffers.
    pub(super) fn buffers(&self) -> Vec<(String, DType, Vec<usize>)> {
        let all = self.files.first().map(TensorFile::tensors).unwrap_or_default().into_iter();
        all.filter_map(|(key, dtype, dims)| Some((key.strip_prefix(BUFFER)?.to_string(), dtype, dims)))
            .collect()
    }

    /// A buffer, if it has it.
    pub(super) fn buffer(&mut self, name: &str) -> Result<Option<Tensor>> {
        let has = self.buffers().iter().any(|(known, ..)| known == name);
        has.then(|| self.whole(&buffer_key(name))).transpose()
    }

    /// Some elements of a parameter, or of what an optimizer remembers of it, as if it were flat.
    pub(super) fn read(
        &mut self,
        key: &str,
        unit: usize,
        param: usize,
        range: Range<usize>,
    ) -> Result<Tensor> {
        let found = self.layouts[unit].parts.iter().find_map(|part| {
            let slot = part.slots.iter().find(|slot| slot.param == param)?;
            Some((part, slot.start))
        });
        let Some((part, first)) = found else { return Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?) };
        let (from, to) = (first + range.start, first + range.end);
        let mut pieces = Vec::new();
        for (rank, file) in self.files.iter_mut().enumerate() {
            let kept = part.range(rank);
            let (start, end) = (kept.start.max(from), kept.end.min(to));
            if start < end {
                let place = part.offset + start - kept.start;
                pieces.push(file.read(key, place..place + end - start)?);
            }
        }
        match &pieces[..] {
            [] => Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?),
            [piece] => Ok(piece.clone()),
            several => Ok(Tensor::cat(several, 0)?),
        }
    }

    /// What of a unit's saved tensors of this key belongs to a rank with this layout, padded.
    pub(super) fn shard(
        &mut self,
        key: &str,
        unit: usize,
        (layout, rank): (&Layout, usize),
        dtype: DType,
    ) -> Result<Tensor> {
        let shard = Tensor::zeros(layout.shard_len, dtype, &Device::Cpu)?;
        for part in &layout.parts {
            let own = part.range(rank);
            for slot in &part.slots {
                let (start, end) = (own.start.max(slot.start), own.end.min(slot.start + slot.len));
                if start < end {
                    let values = self.read(key, unit, slot.param, start - slot.start..end - slot.start)?;
                    shard.slice_set(&values.to_dtype(dtype)?, 0, part.offset + start - own.start)?;
                }
            }
        }
        Ok(shard)
    }

    /// What the optimizer remembers, by key.
    pub(super) fn optimizer_keys(&self) -> Vec<(String, Kind)> {
        let Some(file) = self.files.first() else { return Vec::new() };
        let units = self.description.units.iter().zip(&self.layouts);
        let units: Vec<_> = units.map(|(unit, layout)| (&*unit.name, layout.shard_len)).collect();
        let kind = |key: String, dims: &[usize]| {
            let kind = Kind::of(key.strip_prefix(OPTIMIZER)?, dims, &units);
            Some((key, kind))
        };
        file.tensors().into_iter().filter_map(|(key, _, dims)| kind(key, &dims)).collect()
    }

    pub(super) fn whole(&mut self, key: &str) -> Result<Tensor> {
        match self.files.first_mut() {
            Some(file) => file.whole(key),
            None => Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?),
        }
    }

    pub(super) fn dtype(&self, key: &str) -> DType {
        let tensors = self.files.first().map(TensorFile::tensors).unwrap_or_default();
        tensors.into_iter().find(|(name, ..)| name == key).map_or(DType::F32, |(_, dtype, _)| dtype)
    }
}
