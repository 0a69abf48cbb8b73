//! Checks after backward: all ranks communicated for the same units in the same order; which parameters have a gradient on
//! any rank.

use comm::Communicator;
use comm::internal::{Digest, all_gather_words, odd_one};

use super::{Core, State};
use crate::built::Param;
use crate::{Error, Result};

/// Bits of a word that ranks exchange.
const BITS: usize = 64;

impl Core {
    /// Checks that all ranks communicated for the same units in the same order: otherwise two units of equal size could have
    /// been mixed up. The same all-gather exchanges which parameters have a gradient, so that all ranks return a gradient for
    /// a parameter, or none does.
    pub(super) fn compare(&self, state: &mut State) -> Result<()> {
        let history = std::mem::replace(&mut state.history, Digest::new());
        for (group, comm) in
            self.groups.averaged_over.groups().enumerate().filter(|(_, comm)| comm.world_size() > 1)
        {
            let is_own = |param: &Param| self.groups.averaged_over.index_of(&param.name) == group;
            let params = self.params().enumerate().filter(|(_, param)| is_own(param));
            let own: Vec<usize> = params.map(|(index, _)| index).collect();
            self.compare_among(&**comm, &own, history, &mut state.present)?;
        }
        Ok(())
    }

    /// Compares the communication of ranks, and combines what they know of the parameters `own`, which all of them have.
    fn compare_among(
        &self,
        comm: &dyn Communicator,
        own: &[usize],
        history: Digest,
        present: &mut [bool],
    ) -> Result<()> {
        let bits = own.chunks(BITS).map(|own| {
            own.iter().rev().fold(0u64, |word, &index| (word << 1) | u64::from(present[index])).cast_signed()
        });
        let words: Vec<i64> = std::iter::once(history.value().cast_signed()).chain(bits).collect();
        let all = all_gather_words(comm, &words)?;
        if let Some((rank, odd_rank)) = odd_one(&all.iter().map(|words| words[0]).collect::<Vec<_>>()) {
            let number = |rank: usize| comm.world_ranks()[rank];
            return Err(Error::OrderMismatch { odd_rank: number(odd_rank), rank: number(rank) });
        }
        for (bit, &index) in own.iter().enumerate() {
            present[index] = all.iter().any(|words| (words[1 + bit / BITS] >> (bit % BITS)) & 1 == 1);
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
        Ok(self.config.audit.act("Fsdp", self.groups.world().rank() == 0, parameters)?)
    }
}
