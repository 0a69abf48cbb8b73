//! Inside of a unit: each parameter that is asked for becomes this rank's piece of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use comm::Digest;

use crate::builder::{Built, Param, Plan};
use crate::hook::{ParamIndex, parameter};
use crate::layout::{Layout, piece};
use crate::storage::{is_supported, is_trainable};
use crate::values::cut;
use crate::{Error, Strategy, UnitConfig, lock};

/// What a unit has asked for while it is built.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Names, and what the model computes with.
    params: Vec<(String, Tensor)>,
    /// This rank's piece of a large parameter, all of a small one.
    values: Vec<Tensor>,
    names: HashMap<String, usize>,
    digest: Digest,
    closed: bool,
}

impl Asked {
    /// What was asked for; nothing more can be.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    fn known(&self, name: &str) -> Option<Tensor> {
        self.names.get(name).map(|&param| self.params[param].1.clone())
    }

    pub(crate) fn finish(
        self,
        plan: &Plan,
        unit: &str,
        (dtype, computed): (DType, DType),
        config: &UnitConfig,
    ) -> Result<Built> {
        let lens: Vec<usize> = self.params.iter().map(|(_, tensor)| tensor.elem_count()).collect();
        if lens.iter().sum::<usize>() == 0 {
            return Err(Error::EmptyUnit { unit: unit.into() }.into());
        }
        let layout = Layout::new(&lens, plan.config.pack_elements, plan.shards);
        let rank = plan.shard_rank;
        let mut params = Vec::with_capacity(lens.len());
        // A value is freed as soon as it lies in its variable.
        for (param, ((name, tensor), value)) in self.params.into_iter().zip(self.values).enumerate() {
            let Some((part, slot)) = layout.find(param) else { continue };
            let shard = Var::zeros(part.variable_len(slot, rank), dtype, plan.anchor.device())?;
            let (kept, _) = part.kept(slot, rank);
            // Of a large one, there is no more than what is kept.
            let first = if part.is_packed { kept.start } else { 0 };
            if !kept.is_empty() {
                shard.slice_set(&value.narrow(0, first, kept.len())?, 0, 0)?;
            }
            params.push(Param { name, tensor, shard });
        }
        let kept = plan.config.strategy != Strategy::FullShard;
        Ok(Built {
            name: unit.into(),
            params,
            layout,
            rank,
            dtype: computed,
            keep: config.keep_after_forward.unwrap_or(kept),
            digest: self.digest,
        })
    }
}

/// The builder inside a unit.
pub(crate) struct Sharding<'a> {
    pub(crate) inner: VarBuilder<'a>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) asked: Arc<Mutex<Asked>>,
    pub(crate) unit: String,
    pub(crate) index: usize,
    /// Of shards, and of what the unit computes with.
    pub(crate) dtypes: (DType, DType),
}

impl<'a> Sharding<'a> {
    fn provide(
        &self,
        name: &str,
        shape: Option<&Shape>,
        dtype: DType,
        read: impl FnOnce(DType) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let unit = || self.unit.clone();
        let parameter = || name.to_string();
        if lock(&self.asked).closed {
            return Err(Error::TooLate { parameter: parameter(), unit: unit() }.into());
        }
        if self.plan.config.is_buffer(name) {
            return self.buffer(name, || read(self.dtypes.0));
        }
        if dtype != self.dtypes.1 {
            return Err(match is_trainable(dtype) {
                true => {
                    let expected = self.dtypes.1;
                    Error::MixedDtypes { parameter: parameter(), unit: unit(), got: dtype, expected }.into()
                }
                false => Error::UnsupportedDtype { parameter: parameter(), unit: unit(), dtype }.into(),
            });
        }
        if let Some(tensor) = lock(&self.asked).known(name) {
            return match shape.filter(|shape| *shape != tensor.shape()) {
                None => Ok(tensor),
                Some(then) => {
                    let (first, then) = (format!("{:?}", tensor.dims()), format!("{:?}", then.dims()));
                    Err(Error::Ambiguous { parameter: parameter(), first, then }.into())
                }
            };
        }
        let owner = lock(&self.plan.model).owners.insert(parameter(), unit());
        if let Some(first) = owner.filter(|owner| *owner != self.unit) {
            return Err(Error::SharedParameter { parameter: parameter(), first, second: unit() }.into());
        }
        self.shard(name, read(self.dtypes.0)?)
    }

    /// Keeps this rank's piece of a parameter, and gives a tensor without elements in its place.
    fn shard(&self, name: &str, value: Tensor) -> Result<Tensor> {
        if !is_trainable(value.dtype()) {
            let (parameter, unit, dtype) = (name.into(), self.unit.clone(), value.dtype());
            return Err(Error::UnsupportedDtype { parameter, unit, dtype }.into());
        }
        if !is_supported(value.device()) || !value.device().same_device(self.plan.anchor.device()) {
            let device = format!("{:?}", value.device().location());
            return Err(Error::UnsupportedDevice { parameter: name.into(), device }.into());
        }
        let mut asked = lock(&self.asked);
        let param = asked.params.len();
        let place = ParamIndex { unit: self.index, param };
        let tensor =
            parameter(&self.plan.anchor, place, value.shape(), self.dtypes.1, self.plan.link.clone())?;
        let flat = value.detach().contiguous()?.flatten_all()?;
        let digest = asked.digest.floats(&flat).map_err(comm::carry)?;
        asked.digest = digest.text(name);
        let len = flat.elem_count();
        let whole = len < self.plan.config.pack_elements || len == 0;
        let range = match whole {
            true => 0..len,
            false => {
                let piece = piece(len, self.plan.shards);
                let start = (piece * self.plan.shard_rank).min(len);
                start..(start + piece).min(len)
            }
        };
        asked.values.push(cut(&flat, range)?);
        asked.params.push((name.into(), tensor.clone()));
        asked.names.insert(name.into(), param);
        Ok(tensor)
    }

    fn buffer(&self, name: &str, read: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let mut model = lock(&self.plan.model);
        if let Some((_, known)) = model.buffers.iter().find(|(known, _)| known == name) {
            return Ok(known.as_tensor().clone());
        }
        let value = read()?;
        let dtype = self.plan.config.buffer_dtype.filter(|_| is_trainable(value.dtype()));
        let var = Var::from_tensor(&value.to_dtype(dtype.unwrap_or(value.dtype()))?)?;
        model.buffers.push((name.into(), var.clone()));
        Ok(var.as_tensor().clone())
    }

    fn inner(&self, device: &Device) -> VarBuilder<'a> {
        let inner = self.inner.clone();
        if inner.device().same_device(device) { inner } else { inner.set_device(device.clone()) }
    }
}

impl SimpleBackend for Sharding<'_> {
    fn get(&self, shape: Shape, name: &str, hints: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = |dtype| self.inner(device).get_with_hints_dtype(shape.clone(), name, hints, dtype);
        self.provide(name, Some(&shape), dtype, read)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.provide(name, None, dtype, |dtype| self.inner(device).get_unchecked_dtype(name, dtype))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}
