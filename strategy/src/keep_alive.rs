//! Keeps collectives alive during work that takes some ranks longer than the timeout of the others.

use std::fmt::Display;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use crate::{Error, all_agree};

/// The longest time between two all-reduces.
const PERIOD: Duration = Duration::from_secs(1);

/// Does this rank's part of some work, while all ranks repeat a small all-reduce until all are done: however long the
/// work takes, no rank runs into its timeout. Call on every rank of the groups, which are as in [`all_agree`].
///
/// # Errors
/// On every rank, if the work fails on one; failures of communication.
pub fn with_keep_alive<T: Send, E: From<Error> + From<comm::Error> + Display + Send>(
    groups: &[&dyn Communicator],
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
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
                        Some(Err(Error::invalid("the work on a file", "a panic", help).into()))
                    }
                };
            }
            if all_are_done(groups, result.is_some())?
                && let Some(result) = result
            {
                // A panic is in `result` already; unjoined, it would end this thread as well.
                let _ = worker.join();
                return Ok(result);
            }
            wait = (wait * 2).min(PERIOD);
        }
    });
    all_agree(groups.iter().copied(), result.and_then(|result| result))
}

fn all_are_done(groups: &[&dyn Communicator], own: bool) -> crate::Result<bool> {
    let done = Tensor::new(&[u8::from(own)], &Device::Cpu)?;
    for group in groups {
        group.run(Operation::AllReduce { tensor: done.clone(), op: ReduceOp::Min })?;
    }
    Ok(done.to_vec1::<u8>()?[0] == 1)
}
