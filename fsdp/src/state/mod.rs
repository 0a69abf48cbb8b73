//! Whole-model state: parameters by name; checkpoints and files.

mod checkpoint;
mod load;
mod save;
mod saved;

pub use checkpoint::full_tensors;

use candle_core::{DType, Device, Tensor};
use comm::Operation;

use crate::storage::{is_trainable, piece, tensor};
use crate::{Fsdp, Result};

/// Returns true if a buffer of dtype `own` can be read from a tensor of dtype `saved`.
fn fits(saved: DType, own: DType) -> bool {
    saved == own || (is_trainable(saved) && is_trainable(own))
}

impl<M> Fsdp<M> {
    /// Returns all parameters whole, by the names under which the model requested them, in order of construction, and then the
    /// buffers of rank 0; on rank 0 only, `None` on the others. Must be called on every rank.
    ///
    /// # Memory
    /// On rank 0 the whole model.
    ///
    /// # Errors
    /// The first cause, if an earlier call failed; failures of communication.
    pub fn full_state(&self) -> Result<Option<Vec<(String, Tensor)>>> {
        let is_first = self.core().groups.world.rank() == 0;
        let mut all = vec![None; self.core().params().count() + self.buffers().len()];
        self.visit_places(&mut |place, name, tensor| all[place] = Some((name.to_string(), tensor)))?;
        Ok(is_first.then(|| all.into_iter().flatten().collect()))
    }

    /// Passes each parameter whole, unit by unit, and then each buffer to `visit` on rank 0, with its place in order of
    /// construction. Must be called on every rank.
    fn visit_places(&self, visit: &mut dyn FnMut(usize, &str, Tensor)) -> Result<()> {
        let mut first = 0;
        for (unit, built) in self.core().units.iter().enumerate() {
            self.visit_unit(unit, &mut |param, name, tensor| visit(first + param, name, tensor))?;
            first += built.params.len();
        }
        if self.core().groups.world.rank() == 0 {
            for (place, (name, var)) in self.buffers().iter().enumerate() {
                visit(first + place, name, var.as_detached_tensor().to_device(&Device::Cpu)?);
            }
        }
        Ok(())
    }

    /// Passes each parameter of a unit, whole, to `visit` on rank 0, part by part, with one part in memory at a time. Must be
    /// called on every rank.
    fn visit_unit(&self, unit: usize, visit: &mut dyn FnMut(usize, &str, Tensor)) -> Result<()> {
        let built = &self.core().units[unit];
        let is_first = self.core().groups.world.rank() == 0;
        self.core().between_passes(|| {
            for part in &built.layout.parts {
                let Some(whole) = self.whole(built.piece(part)?)?.filter(|_| is_first) else {
                    continue;
                };
                let whole = whole.to_device(&Device::Cpu)?;
                if let ([slot], false) = (&part.slots[..], part.is_packed) {
                    let param = &built.params[slot.param];
                    let value = whole.narrow(0, 0, slot.len)?.reshape(param.tensor.shape())?;
                    visit(slot.param, &param.name, value);
                    continue;
                }
                for slot in &part.slots {
                    let param = &built.params[slot.param];
                    let value = tensor(piece(&whole, slot.start, slot.len)?, slot.len);
                    visit(slot.param, &param.name, value.reshape(param.tensor.shape())?);
                }
            }
            Ok(())
        })
    }

    /// Gathers the pieces of a part, padding included, on the first rank of the shard group; `None` on the others.
    fn whole(&self, own: Tensor) -> Result<Option<Tensor>> {
        let (len, dtype, device) = (own.elem_count(), own.dtype(), own.device().clone());
        let Some(comm) = &self.core().groups.shard else {
            let whole = Tensor::zeros(len, dtype, &device)?;
            if len > 0 {
                whole.slice_set(&own, 0, 0)?;
            }
            return Ok(Some(whole));
        };
        let output = match comm.rank() {
            0 => Some(Tensor::zeros(len * comm.world_size(), dtype, &device)?),
            _ => None,
        };
        comm.run(Operation::Gather { output: output.clone(), input: own, root: 0, counts: None })?;
        Ok(output)
    }
}
