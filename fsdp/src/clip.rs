//! Clipping by the norm of all shards' gradients together.

use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use candle_core::backprop::GradStore;
use comm::{Communicator, first_of, global_norm};
use training::{clip_by_norm, first_not_finite, grad_norm};

use crate::builder::Built;
use crate::{Error, Fsdp, Result};

/// What is counted in the norm of all gradients beside this model's, and what is not.
#[derive(Default)]
pub(crate) struct Norm {
    /// Of ranks that have other parts of a larger model.
    others: Vec<Arc<dyn Communicator>>,
    /// By unit, the elements of this rank's shard that are counted; empty where all of them are.
    counted: Vec<Vec<Range<usize>>>,
}

impl<M> Fsdp<M> {
    /// Says that this model is one part of a larger one, the others of which the ranks along `others` have: the groups along axes of
    /// a mesh other than this model's, such as those of pipeline stages and of tensor parallelism, in the same order on every rank.
    /// From now on [`grad_norm`](Self::grad_norm), [`clip_grad_norm`](Self::clip_grad_norm) and
    /// [`LossScaler::unscale`](crate::LossScaler::unscale) are of all parts together, and to be called on all these ranks.
    ///
    /// Of a parameter that several of these ranks have whole (a norm between divided layers, tied embeddings), `counts` must be
    /// true on one of them; all others are counted on each rank.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local, Mesh};
    /// # use fsdp::{Fsdp, FsdpConfig};
    /// # use candle_core::Tensor;
    /// let norms = Local::run_shared(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("pp", 2), ("shard", 2), ("replicate", 1)])?;
    ///     # let ones = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
    ///     # let tensors = [("weight".to_string(), ones)];
    ///     # let vb = VarBuilder::from_tensors(tensors.into(), DType::F32, &Device::Cpu);
    ///     let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "replicate"), vb, &FsdpConfig::default(), |units| {
    ///         units.unit(|vb| linear_no_bias(2, 1, vb))
    ///     })?;
    ///     fsdp.set_norm_over(vec![mesh.axis("pp")?.clone()], |_| true);
    ///     let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
    ///     let mut grads = fsdp.backward(&fsdp.forward(&x)?.sum_all()?)?;
    ///     Ok(fsdp.clip_grad_norm(&mut grads, 1.0)?)
    /// })?;
    /// assert!(norms.iter().all(|norm| (norm - 50f64.sqrt()).abs() < 1e-6)); // of both stages
    /// # Ok::<(), fsdp::Error>(())
    /// ```
    pub fn set_norm_over(&mut self, others: Vec<Arc<dyn Communicator>>, counts: impl Fn(&str) -> bool) {
        let rank = self.core().groups.shard_rank();
        let counted = |unit: &Built| unit.counted(rank, &counts);
        let counted: Vec<_> = self.core().units.iter().map(counted).collect();
        self.norm = Norm { others, counted };
    }

    /// The 2-norm of the gradients of all parameters together, on all ranks: the same bits on each. To be called on every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-gather of 8 bytes of each rank that has another shard.
    ///
    /// # Errors
    /// candle's; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.core().check()?;
        let own = match self.norm.counted.is_empty() {
            true => grad_norm(grads, &self.vars())?,
            false => self.counted_norm(grads)?,
        };
        Ok(global_norm(self.parts(), own)?)
    }

    /// Scales the gradients so that their norm together is at most `max_norm`; gives the norm that they had. To be called on
    /// every rank, with what [`Fsdp::backward`] gave.
    ///
    /// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all are multiplied with `max_norm / (norm + 1e-6)`
    /// where that is below 1. The norm is this model's; where it is a part of a larger one, see
    /// [`set_norm_over`](Self::set_norm_over).
    ///
    /// # Cost
    /// That of [`Fsdp::grad_norm`], and another pass where they are clipped.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] where a gradient holds a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. Nothing is changed then.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            return Err(Error::NotFinite { unit: self.first_not_finite(grads)?, norm });
        }
        clip_by_norm(grads, &self.vars(), norm, max_norm)?;
        Ok(norm)
    }

    /// The ranks that have other parts.
    fn parts(&self) -> impl Iterator<Item = &dyn Communicator> {
        self.core().groups.shard.iter().chain(&self.norm.others).map(|group| &**group)
    }

    /// The norm of what is counted of this rank's gradients.
    fn counted_norm(&self, grads: &GradStore) -> Result<f64> {
        let mut squares = 0.0;
        for (unit, ranges) in self.core().units.iter().zip(&self.norm.counted) {
            let Some(grad) = grads.get(&unit.shard) else { continue };
            for range in ranges {
                let piece = grad.narrow(0, range.start, range.len())?.to_dtype(DType::F64)?;
                squares += piece.sqr()?.sum_all()?.to_scalar::<f64>()?;
            }
        }
        Ok(squares.sqrt())
    }

    /// A unit with a gradient that holds a NaN or an infinity on some rank: the same on each.
    fn first_not_finite(&self, grads: &GradStore) -> Result<String> {
        let units = &self.core().units;
        let own = first_not_finite(grads, &self.vars())?.map(|place| format!("unit {}", units[place].name));
        // None where only the sum of all squares is too large.
        Ok(first_of(self.parts(), own)?.map_or("all units together".into(), |(_, unit)| unit))
    }
}

impl Built {
    /// The elements of a rank's shard that are of these parameters; without padding.
    fn counted(&self, rank: usize, counts: impl Fn(&str) -> bool) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        for part in &self.layout.parts {
            let kept = part.range(rank);
            for slot in part.slots.iter().filter(|slot| counts(&self.params[slot.param].name)) {
                let start = slot.start.max(kept.start);
                let end = (slot.start + slot.len).min(kept.end);
                if start < end {
                    ranges.push(part.offset + start - kept.start..part.offset + end - kept.start);
                }
            }
        }
        ranges
    }
}
