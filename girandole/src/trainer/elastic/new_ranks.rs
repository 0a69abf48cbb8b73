//! New ranks that wait to join a running job.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use crate::{Error, Result};

/// Polling interval of ranks that are too few and wait for new ones.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns the number of ranks with those that wait to join, as `admits` says of the number of waiting ranks: `None` if none is to
/// be admitted. The same on every rank; every rank of `world` must call it.
///
/// # Cost
/// An all-reduce of 8 bytes.
///
/// # Errors
/// A group that admits no new ranks; failures of communication.
pub fn size_with_new_ranks(
    world: &dyn Communicator,
    admits: impl Fn(usize) -> Option<usize>,
) -> Result<Option<usize>> {
    let (waiting, _) = waiting_ranks(world, false)?;
    Ok(admits(waiting))
}

/// Waits for new ranks if there are fewer than `fewest`, and some can come `within` a time, counted on the first rank. Returns the
/// number of ranks with them, as [`size_with_new_ranks`] does; `None` if there was nothing to wait for. `lost` is the loss that made
/// them fewer. Every rank of `world` must call it.
///
/// # Errors
/// Those of [`size_with_new_ranks`]; no rank has come in time.
pub fn wait_for_new_ranks(
    world: &dyn Communicator,
    fewest: usize,
    within: Option<Duration>,
    lost: Option<&comm::Error>,
    admits: impl Fn(usize) -> Option<usize>,
) -> Result<Option<usize>> {
    let (began, left) = (Instant::now(), world.world_size());
    let Some(within) = within.filter(|_| left < fewest) else { return Ok(None) };
    loop {
        let (waiting, is_late) = waiting_ranks(world, began.elapsed() > within)?;
        let size = admits(waiting);
        if size.is_some() {
            return Ok(size);
        }
        if is_late {
            return Err(match lost {
                Some(lost) => Error::TooFewRanks { left, fewest, lost: lost.clone() },
                None => {
                    let help = format!("no other has come within {} s", within.as_secs());
                    Error::invalid("the ranks", left, help)
                }
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the number of ranks that wait, and whether the first rank says that it `is_late`.
fn waiting_ranks(world: &dyn Communicator, is_late: bool) -> Result<(usize, bool)> {
    let own = match world.rank() {
        0 => [u32::try_from(world.elastic()?.waiting()).unwrap_or(u32::MAX), u32::from(is_late)],
        _ => [0; 2],
    };
    let of_first = Tensor::new(&own, &Device::Cpu)?;
    world.run(Operation::AllReduce { tensor: of_first.clone(), op: ReduceOp::Max })?;
    let of_first = of_first.to_vec1::<u32>()?;
    Ok((of_first[0] as usize, of_first[1] > 0))
}
