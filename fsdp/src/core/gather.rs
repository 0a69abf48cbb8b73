//! Gathering a unit's parameters from all ranks, and releasing them.

use candle_core::{DType, Storage, Tensor};
use comm::Operation;

use super::{Core, Held, State};
use crate::Result;
use crate::built::BuiltUnit;
use crate::layout::Part;
use crate::storage::{piece, replace_storage, take_storage};

impl Core {
    /// Starts to gather a unit, unless that is in progress or done.
    pub(super) fn begin_gather(&self, state: &mut State, unit: usize) -> Result<()> {
        if !matches!(state.units[unit].held, Held::Nowhere) {
            return Ok(());
        }
        state.record_communication(0, unit);
        let built = &self.units[unit];
        let span = tracing::info_span!("gather", unit = built.name);
        let _entered = span.enter();
        let mut coming = Vec::with_capacity(built.layout.parts.len());
        for part in &built.layout.parts {
            let before = state.pool.bytes();
            let (count, device) = (part.piece * built.layout.ranks, built.device());
            let buffer = state.pool.take(built.dtype, count, device)?;
            self.account(before, state.pool.bytes());
            coming.push(self.begin_part(built, part, buffer)?);
        }
        for bytes in &built.bytes {
            let count = bytes.shard.elem_count() * built.layout.ranks;
            self.parameters.add(count);
            state.units[unit].copied += count;
            let buffer = Tensor::zeros(count, DType::U8, built.device())?;
            coming.push(self.begin_all_gather(buffer, bytes.shard.clone())?);
        }
        state.units[unit].held = Held::Coming(coming);
        Ok(())
    }

    fn begin_part(
        &self,
        built: &BuiltUnit,
        part: &Part,
        buffer: Tensor,
    ) -> Result<(Tensor, Option<comm::Work>)> {
        if part.piece == 0 {
            return Ok((buffer, None));
        }
        self.begin_all_gather(buffer, built.piece(part)?.to_dtype(built.dtype)?)
    }

    fn begin_all_gather(&self, buffer: Tensor, own: Tensor) -> Result<(Tensor, Option<comm::Work>)> {
        let work = match &self.groups.shard {
            Some(comm) => {
                let (output, input) = (buffer.clone(), own);
                Some(comm.submit(Operation::AllGather { output, input, counts: None })?)
            }
            None => {
                buffer.slice_set(&own, 0, 0)?;
                None
            }
        };
        Ok((buffer, work))
    }

    /// Gathers a unit's parameters, and waits until they are complete.
    pub(super) fn gather(&self, state: &mut State, unit: usize) -> Result<()> {
        self.begin_gather(state, unit)?;
        let held = std::mem::replace(&mut state.units[unit].held, Held::Here);
        let Held::Coming(coming) = held else { return Ok(()) };
        let built = &self.units[unit];
        let _span = tracing::info_span!("wait", unit = built.name).entered();
        let mut coming = coming.into_iter();
        for (part, (buffer, work)) in built.layout.parts.iter().zip(coming.by_ref()) {
            work.map_or(Ok(()), comm::Work::wait)?;
            let count = buffer.elem_count();
            match part.is_packed {
                true => {
                    for slot in &part.slots {
                        let value = piece(&buffer, slot.start, slot.len)?;
                        let bytes = slot.len * built.dtype.size_in_bytes();
                        self.parameters.add(bytes);
                        state.units[unit].copied += bytes;
                        replace_storage(&built.params[slot.param].tensor, value)?;
                    }
                    self.give_back(state, take_storage(&buffer)?, count);
                }
                // A large parameter is the only one in its part.
                false => match part.slots[..] {
                    [slot] => {
                        drop(replace_storage(&built.params[slot.param].tensor, take_storage(&buffer)?)?)
                    }
                    _ => self.give_back(state, take_storage(&buffer)?, count),
                },
            }
        }
        for (bytes, (buffer, work)) in built.bytes.iter().zip(coming) {
            work.map_or(Ok(()), comm::Work::wait)?;
            drop(replace_storage(&bytes.tensor, take_storage(&buffer)?)?);
        }
        Ok(())
    }

    /// Frees a unit's gathered parameters: computing with them from now on is an error.
    pub(super) fn release(&self, state: &mut State, unit: usize) -> Result<()> {
        // An all-gather in progress cannot be cancelled.
        self.finish_gather(state, unit)?;
        if matches!(std::mem::take(&mut state.units[unit].held), Held::Nowhere) {
            return Ok(());
        }
        let built = &self.units[unit];
        for part in &built.layout.parts {
            for slot in &part.slots {
                let storage = take_storage(&built.params[slot.param].tensor)?;
                if !part.is_packed {
                    self.give_back(state, storage, part.piece * built.layout.ranks);
                }
            }
        }
        for bytes in &built.bytes {
            drop(take_storage(&bytes.tensor)?);
        }
        self.parameters.sub(std::mem::take(&mut state.units[unit].copied));
        Ok(())
    }

    fn finish_gather(&self, state: &mut State, unit: usize) -> Result<()> {
        match state.units[unit].held {
            Held::Coming(_) => self.gather(state, unit),
            Held::Nowhere | Held::Here => Ok(()),
        }
    }

    pub(super) fn release_all(&self, state: &mut State) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.release(state, unit))
    }

    fn give_back(&self, state: &mut State, buffer: Storage, count: usize) {
        let before = state.pool.bytes();
        state.pool.give_back(buffer, count);
        self.account(before, state.pool.bytes());
    }

    fn account(&self, before: usize, after: usize) {
        self.parameters.add(after.saturating_sub(before));
        self.parameters.sub(before.saturating_sub(after));
    }
}
