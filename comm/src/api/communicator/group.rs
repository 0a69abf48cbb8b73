//! Group creation: how `new_group` and `split` agree on the members of a new group before these connect.

use candle_core::{DType, Device, Tensor};

use crate::base::fingerprint::digest;
use crate::{Communicator, Error, Operation, Result};

/// Checks that every rank asks for the same group. The result is the same on every rank if all lists are valid.
pub(crate) fn agree<C: Communicator + ?Sized>(comm: &C, ranks: &[usize]) -> Result<()> {
    let what = "the ranks of a new group";
    if ranks.is_empty() {
        return Err(Error::invalid(what, "none", "give at least one rank"));
    }
    for (index, &rank) in ranks.iter().enumerate() {
        if rank >= comm.world_size() {
            let (operation, world_size) = ("new_group".into(), comm.world_size());
            return Err(Error::RankOutOfRange { operation, rank, world_size });
        }
        if ranks[..index].contains(&rank) {
            return Err(Error::invalid(what, format!("rank {rank} twice"), "give each rank once"));
        }
    }
    let all = all_gather_words(comm, &[digest(ranks.iter().copied()) as i64])?;
    match all.iter().position(|theirs| theirs != &all[0]) {
        None => Ok(()),
        Some(rank) => {
            let got = format!("other ones on rank {rank} than on rank 0 (here {ranks:?})");
            Err(Error::invalid(what, got, "give the same list on every rank, in the same order"))
        }
    }
}

/// Returns the ranks with this rank's color, ordered by key, then by rank. `None` without a color.
pub(crate) fn members_of_color<C: Communicator + ?Sized>(
    comm: &C,
    color: Option<usize>,
    key: usize,
) -> Result<Option<Vec<usize>>> {
    // Any number may be a color or a key, so a separate number says whether there is a color, and large ones are sent
    // by their bits.
    let own = [i64::from(color.is_some()), color.unwrap_or(0) as i64, key as i64];
    let all = all_gather_words(comm, &own)?;
    let mut members: Vec<usize> = (0..all.len()).filter(|rank| all[*rank][..2] == own[..2]).collect();
    members.sort_by_key(|rank| all[*rank][2] as u64);
    Ok(color.map(|_| members))
}

/// Returns the numbers of all ranks, by rank; each passes the same count.
///
/// # Errors
/// Those of [`Communicator::run`].
pub fn all_gather_words<C: Communicator + ?Sized>(comm: &C, own: &[i64]) -> Result<Vec<Vec<i64>>> {
    let output = Tensor::zeros((comm.world_size(), own.len()), DType::I64, &Device::Cpu)?;
    let input = Tensor::new(own, &Device::Cpu)?;
    comm.run(Operation::AllGather { output: output.clone(), input, counts: None })?;
    Ok(output.to_vec2()?)
}
