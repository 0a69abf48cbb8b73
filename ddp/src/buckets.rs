//! Gradient buckets: the flat tensors that gradients are collected in, and which gradients are still missing.

use std::collections::HashSet;

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId};
use ops::tape::storage_address;

use crate::bucket_plan::{Bucket, Plan};
use crate::comm_hook::{GradBucket, GradSlot};
use crate::parameter::Parameter;

/// Metadata of one parameter's gradient. It holds no tensor: hooks refer to it, and tensors hold hooks, so that would be a
/// reference cycle.
pub(crate) struct Gradient {
    pub(crate) name: String,
    pub(crate) variable: TensorId,
    pub(crate) hooked: TensorId,
    pub(crate) shape: Shape,
    dtype: DType,
    device: Device,
}

impl Gradient {
    pub(crate) fn of(parameter: &Parameter) -> Self {
        let tensor = parameter.tensor();
        Self {
            name: parameter.name().into(),
            variable: parameter.var().as_tensor().id(),
            hooked: tensor.id(),
            shape: tensor.shape().clone(),
            dtype: tensor.dtype(),
            device: tensor.device().clone(),
        }
    }

    /// Returns a flat gradient of zeros.
    pub(crate) fn zeros(&self) -> Result<Tensor> {
        Tensor::zeros(self.shape.elem_count(), self.dtype, &self.device)
    }
}

/// The buckets of one plan. A bucket's flat tensor contains its gradients one after the other, followed by a flag for each: 1
/// if this rank has used the parameter, else 0. After averaging, the flag of a parameter that no rank has used is 0. A rank
/// that is alone has no flat tensors, and keeps the gradients as they come.
pub(crate) struct Buckets {
    pub(crate) plan: Plan,
    is_alone: bool,
    /// By bucket; allocated for each step, since the user may keep the gradients that a step returned.
    flats: Vec<Option<Tensor>>,
    /// By parameter: whether there is a gradient of it, from this pass or accumulated before.
    used: Vec<bool>,
    /// By parameter: its gradient that is in no flat tensor. With several ranks only sums of several of f16 or bf16, in f32,
    /// which replace what the flat tensor contains.
    sums: Vec<Option<Tensor>>,
    /// By bucket: number of parameters that this pass still waits for.
    missing: Vec<usize>,
    /// By parameter: how many gradients a pass may produce. More than one if the parameter is used in something that backward
    /// recomputes, and also elsewhere.
    times: Vec<usize>,
    /// By parameter: how many gradients of this pass are still expected.
    awaited: Vec<usize>,
    /// By parameter: how many gradients have arrived in this pass.
    come: Vec<usize>,
    /// Parameters whose gradients have arrived in this pass, in the order of their first arrival.
    pub(crate) arrived: Vec<usize>,
}

impl Buckets {
    /// `is_alone`: the gradients are not averaged over ranks.
    pub(crate) fn new(plan: Plan, is_alone: bool) -> Self {
        let (buckets, parameters) = (plan.buckets.len(), plan.places.len());
        Self {
            plan,
            is_alone,
            flats: vec![None; buckets],
            used: vec![false; parameters],
            sums: vec![None; parameters],
            missing: vec![0; buckets],
            times: vec![1; parameters],
            awaited: vec![0; parameters],
            come: vec![0; parameters],
            arrived: Vec::with_capacity(parameters),
        }
    }

    /// Returns buckets for another plan, between passes, with the same expected numbers of gradients.
    pub(crate) fn replanned(&self, plan: Plan) -> Self {
        Self { times: self.times.clone(), ..Self::new(plan, self.is_alone) }
    }

    /// Starts a pass, which waits for every gradient.
    pub(crate) fn begin_pass(&mut self) {
        self.arrived.clear();
        self.come.fill(0);
        self.awaited.clone_from(&self.times);
        for (missing, bucket) in self.missing.iter_mut().zip(&self.plan.buckets) {
            *missing = bucket.items.len();
        }
    }

    /// Records that a gradient has arrived.
    pub(crate) fn arrive(&mut self, index: usize) {
        if self.come[index] == 0 {
            self.arrived.push(index);
        }
        self.come[index] += 1;
        self.times[index] = self.times[index].max(self.come[index]);
        if self.awaited[index] == 1 {
            self.stop_waiting_for(index);
        }
        self.awaited[index] = self.awaited[index].saturating_sub(1);
    }

    /// Stores a gradient times `scale`, or adds it to what was accumulated. Without a scale the gradient is ignored, even if it
    /// is NaN.
    pub(crate) fn put(
        &mut self,
        gradients: &[Gradient],
        index: usize,
        grad: &Tensor,
        scale: Option<f64>,
    ) -> Result<()> {
        let Some(scale) = scale else { return Ok(()) };
        let grad = scaled(&grad.detach().contiguous()?.flatten_all()?, scale)?;
        let is_used = std::mem::replace(&mut self.used[index], true);
        let (place, is_half) = (self.plan.places[index], matches!(grad.dtype(), DType::F16 | DType::BF16));
        let flat = match self.is_alone || grad.elem_count() == 0 {
            true => None,
            false => Some(self.flat(gradients, place.bucket)?),
        };
        let before = match (self.sums[index].take(), &flat) {
            (None, Some(flat)) if is_used => Some(flat.narrow(0, place.offset, grad.elem_count())?),
            (sum, _) => sum,
        };
        let sum = match before {
            Some(before) if is_half => (before.to_dtype(DType::F32)? + grad.to_dtype(DType::F32)?)?,
            Some(before) => (before + grad)?,
            None => grad,
        };
        match flat {
            Some(flat) if !(is_used && is_half) => flat.slice_set(&sum, 0, place.offset),
            _ => {
                self.sums[index] = Some(sum);
                Ok(())
            }
        }
    }

    /// Adds a flat gradient to the averaged one.
    pub(crate) fn add(&mut self, index: usize, grad: &Tensor) -> Result<()> {
        let place = self.plan.places[index];
        let Some(flat) = self.flats[place.bucket].as_ref().filter(|_| grad.elem_count() > 0) else {
            return Ok(());
        };
        let sum = (flat.narrow(0, place.offset, grad.elem_count())? + grad)?;
        flat.slice_set(&sum, 0, place.offset)
    }

    /// Records that no more gradients of this parameter arrive in this pass.
    pub(crate) fn stop_waiting_for(&mut self, index: usize) {
        if std::mem::take(&mut self.awaited[index]) > 0 {
            self.missing[self.plan.places[index].bucket] -= 1;
        }
    }

    pub(crate) fn is_complete(&self, bucket: usize) -> bool {
        self.missing[bucket] == 0
    }

    /// Returns a bucket that is ready to be averaged, with its gradients times `factor`.
    pub(crate) fn prepare(
        &mut self,
        gradients: &[Gradient],
        bucket: usize,
        factor: f64,
    ) -> Result<GradBucket> {
        let mut flat = self.flat(gradients, bucket)?;
        let Bucket { elements, items } = &self.plan.buckets[bucket];
        for &index in items {
            if let Some(sum) = self.sums[index].take().filter(|sum| sum.elem_count() > 0) {
                flat.slice_set(&sum.to_dtype(flat.dtype())?, 0, self.plan.places[index].offset)?;
            }
        }
        if factor != 1.0 {
            flat = scaled(&flat, factor)?;
            self.flats[bucket] = Some(flat.clone());
        }
        let flags = if items.iter().all(|&index| self.used[index]) {
            Tensor::ones(items.len(), flat.dtype(), flat.device())?
        } else {
            let flags: Vec<f32> = items.iter().map(|&index| f32::from(u8::from(self.used[index]))).collect();
            Tensor::new(flags, flat.device())?.to_dtype(flat.dtype())?
        };
        flat.slice_set(&flags, 0, *elements)?;
        let slot = |&parameter: &usize| GradSlot {
            parameter,
            shape: gradients[parameter].shape.clone(),
            offset: self.plan.places[parameter].offset,
        };
        Ok(GradBucket { flat, slots: items.iter().map(slot).collect() })
    }

    /// Returns the gradients, averaged or times `factor`, each with the index of its parameter, and empties the buckets. `None`
    /// for parameters that were not used.
    pub(crate) fn take(
        &mut self,
        gradients: &[Gradient],
        factor: f64,
    ) -> Result<Vec<(usize, Option<Tensor>)>> {
        if self.is_alone { self.take_own(gradients, factor) } else { self.take_averaged(gradients) }
    }

    /// Returns the averaged gradients as views of the flat tensors; `None` for parameters that no rank has used.
    fn take_averaged(&mut self, gradients: &[Gradient]) -> Result<Vec<(usize, Option<Tensor>)>> {
        let mut all = Vec::with_capacity(gradients.len());
        for (Bucket { elements, items }, flat) in self.plan.buckets.iter().zip(&mut self.flats) {
            let Some(flat) = flat.take() else { continue };
            let mut used: Vec<bool> =
                items.iter().map(|&index| std::mem::replace(&mut self.used[index], false)).collect();
            // If this rank has used all parameters, the flags need not be read, which would synchronise with an accelerator.
            if used.contains(&false) {
                let flags = flat.narrow(0, *elements, items.len())?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                used = flags.iter().map(|&flag| flag > 0.0).collect();
            }
            for (&index, used) in items.iter().zip(used) {
                let (shape, offset) = (&gradients[index].shape, self.plan.places[index].offset);
                let view = match shape.elem_count() {
                    _ if !used => None,
                    0 => Some(Tensor::zeros(shape, flat.dtype(), flat.device())?),
                    elements => Some(flat.narrow(0, offset, elements)?.reshape(shape)?),
                };
                all.push((index, view));
            }
        }
        Ok(all)
    }

    /// Returns this rank's own gradients, times `factor`; `None` for parameters that it has not used.
    fn take_own(&mut self, gradients: &[Gradient], factor: f64) -> Result<Vec<(usize, Option<Tensor>)>> {
        self.used.fill(false);
        let mut addresses = HashSet::new();
        let mut all = Vec::with_capacity(gradients.len());
        for (index, Gradient { shape, dtype, .. }) in gradients.iter().enumerate() {
            // Several parameters may have one gradient, and the user may change either.
            let own = |sum: Tensor| match addresses.insert(storage_address(&sum)) {
                true => scaled(&sum.to_dtype(*dtype)?, factor)?.reshape(shape),
                false => scaled(&sum.to_dtype(*dtype)?, factor)?.reshape(shape)?.force_contiguous(),
            };
            all.push((index, self.sums[index].take().map(own).transpose()?));
        }
        Ok(all)
    }

    fn flat(&mut self, gradients: &[Gradient], bucket: usize) -> Result<Tensor> {
        if let Some(flat) = &self.flats[bucket] {
            return Ok(flat.clone());
        }
        let Bucket { elements, items } = &self.plan.buckets[bucket];
        let first = &gradients[items[0]];
        let flat = Tensor::zeros(elements + items.len(), first.dtype, &first.device)?;
        self.flats[bucket] = Some(flat.clone());
        Ok(flat)
    }
}

pub(crate) fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 { Ok(tensor.clone()) } else { tensor.affine(factor, 0.0) }
}
