//! Keeps collectives alive during work that takes some ranks longer than the timeout of the others.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use crate::agreement::all_agree;
use crate::{Error, Result};

/// The longest time between two all-reduces.
const PERIOD: Duration = Duration::from_secs(1);

/// Does this rank's part of some work, while all ranks repeat a small all-reduce until all are done: however long the
/// work takes, no rank runs into its timeout. Call on every rank. If it fails on one rank, it fails on all.
pub(crate) fn with_keep_alive<T: Send>(
    world: &dyn Communicator,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let result = thread::scope(|scope| {
        let (tell, told) = channel();
        let worker = scope.spawn(move || tell.send(work()));
        let (mut result, mut wait) = (None, Duration::from_millis(1));
        loop {
            if result.is_none() {
                result = match told.recv_timeout(wait) {
                    Ok(result) => Some(result),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        let help = "this is a mistake in girandole";
                        Some(Err(Error::invalid("the work on a file", "a panic", help)))
                    }
                };
            }
            let done = Tensor::new(&[u8::from(result.is_some())], &Device::Cpu)?;
            world.run(Operation::AllReduce { tensor: done.clone(), op: ReduceOp::Min })?;
            if done.to_vec1::<u8>()?[0] == 1
                && let Some(result) = result
            {
                // A panic is in `result` already; unjoined, it would end this thread as well.
                let _ = worker.join();
                return Ok(result);
            }
            wait = (wait * 2).min(PERIOD);
        }
    });
    all_agree(world, result.and_then(|result| result))
}
