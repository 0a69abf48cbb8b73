//! Subgroups: membership, rank numbers in the group, and that closing one leaves the others usable.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use cli::prelude::*;
use comm::{Communicator, ReduceOp};

use super::stage::{OrderedOutput, numbers, python_bool};

pub(super) fn show(stage: &OrderedOutput<'_>) -> Result<()> {
    let world_size = stage.comm.world_size();
    // All ranks but the last; the handbook's example is 0, 1, 2 of 4.
    let some: Vec<usize> = (0..world_size.max(2) - 1).collect();
    let reversed: Vec<usize> = (0..world_size).rev().collect();
    let custom = new_group(stage, &some)?;
    let other = new_group(stage, &reversed)?;

    stage.title(format_args!("closing the group of {reversed:?}"))?;
    drop(other);
    stage
        .each(format_args!("all_reduce of the rank in the world group {}", sum(stage.comm, stage.device)?))?;
    stage.each(match &custom {
        Some(group) => format!("in the group of {some:?} {}", sum(&**group, stage.device)?),
        None => format!("not in the group of {some:?}"),
    })
}

fn new_group(stage: &OrderedOutput<'_>, ranks: &[usize]) -> Result<Option<Arc<dyn Communicator>>> {
    stage.title(format_args!("new_group({ranks:?})"))?;
    let group = stage.comm.new_group(ranks)?;
    stage.each(match &group {
        Some(group) => format!(
            "in the group {}, get_rank {}, get_world_size {}, get_process_group_ranks {:?}, all_reduce of the rank {}",
            python_bool(true),
            group.rank(),
            group.world_size(),
            group.world_ranks(),
            sum(&**group, stage.device)?
        ),
        None => format!("in the group {}", python_bool(false)),
    })?;
    Ok(group)
}

/// Returns the sum, over a group, of the members' world ranks.
fn sum(group: &dyn Communicator, device: &Device) -> Result<String> {
    let own = group.world_ranks()[group.rank()] as f32;
    let tensor = Tensor::new(&[own], device)?;
    group.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    numbers(&tensor)
}
