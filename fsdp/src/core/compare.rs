//! Checks after backward: all ranks communicated for the same units in the same order; which parameters have a gradient on
//! any rank.

use candle_core::{DType, Device, Tensor};
use comm::internal::{Digest, odd_one};

use super::{Core, State};
use crate::{Error, Result};

/// Bits of a word that ranks exchange.
const BITS: usize = 64;

impl Core {
    /// Checks that all ranks communicated for the same units in the same order: otherwise two units of equal size could have
    /// been mixed up. The same all-gather exchanges which parameters have a gradient, so that all ranks return a gradient for
    /// a parameter, or none does.
    pub(super) fn compare(&self, state: &mut State) -> Result<()> {
        let history = std::mem::replace(&mut state.history, Digest::new());
        let world = &*self.groups.world;
        if world.world_size() == 1 {
            return Ok(());
        }
        let present = state.present.chunks(BITS).map(|bits| {
            bits.iter().rev().fold(0u64, |word, &present| (word << 1) | u64::from(present)).cast_signed()
        });
        let words: Vec<i64> = std::iter::once(history.value().cast_signed()).chain(present).collect();
        let all = Tensor::zeros(world.world_size() * words.len(), DType::I64, &Device::Cpu)?;
        let input = Tensor::new(&words[..], &Device::Cpu)?;
        world.run(comm::Operation::AllGather { output: all.clone(), input, counts: None })?;
        let all = all.to_vec1::<i64>()?;
        let ranks = || all.chunks(words.len());
        if let Some((rank, odd_rank)) = odd_one(&ranks().map(|words| words[0]).collect::<Vec<_>>()) {
            let number = |rank: usize| world.world_ranks()[rank];
            return Err(Error::OrderMismatch { odd_rank: number(odd_rank), rank: number(rank) });
        }
        for (index, present) in state.present.iter_mut().enumerate() {
            *present = ranks().any(|words| (words[1 + index / BITS] >> (index % BITS)) & 1 == 1);
        }
        Ok(())
    }

    /// Applies [`crate::FsdpConfig::audit`] once, when all ranks know which parameters have a gradient.
    pub(super) fn audit(&self, state: &mut State) -> Result<()> {
        if !std::mem::take(&mut state.unaudited) {
            return Ok(());
        }
        let params = self.params().zip(&state.present);
        let parameters = params.map(|(param, &has)| (param.name.as_str(), param.tensor.dims(), has));
        Ok(self.config.audit.act("Fsdp", self.groups.world.rank() == 0, parameters)?)
    }
}
