//! Subgroups of a group of threads: the first member creates the shared state, the others take it by its number.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::base::members::{Members, rank_in};
use crate::{Communicator, Error, Message, Operation, Result, Topology};

use super::Local;

impl Local {
    /// Called on the members, by all at the same point of their sequence of operations.
    pub(super) fn join_group(&self, ranks: &[usize]) -> Result<Local> {
        let place = rank_in(self.rank, ranks)?;
        let members = Members::subgroup(ranks.iter().map(|rank| self.members.world_rank(*rank)));
        let number = Tensor::new(&[0i64], &Device::Cpu)?;
        let shared = if place == 0 {
            let shared = Arc::new(self.shared.subgroup(ranks.len()));
            let number = Tensor::new(&[self.shared.offer(&shared, ranks.len() - 1)], &Device::Cpu)?;
            let invite = |to: &usize| Message::Send { tensor: number.clone(), to: *to };
            self.run(Operation::Batch { messages: ranks[1..].iter().map(invite).collect() })?;
            shared
        } else {
            self.run(Operation::Recv { tensor: number.clone(), from: ranks[0] })?;
            let number = number.to_vec1::<i64>()?[0];
            self.shared.take(number).ok_or_else(|| Error::system("a new group", "it is gone"))?
        };
        Ok(Self::member(place, &shared, members, Topology::one_host(ranks.len())))
    }
}
