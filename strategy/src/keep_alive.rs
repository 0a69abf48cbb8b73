//! Keeps collectives alive during work that takes some ranks longer than the timeout of the others.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, Builder};
use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use crate::{Error, all_agree};

/// The longest time between two all-reduces.
const PERIOD: Duration = Duration::from_secs(1);

/// Does this rank's part of some work, while a thread of each rank repeats a small all-reduce until all are done: however long the
/// work takes, no rank runs into its timeout. The work must not use the groups. Call on every rank of the groups, which are as in
/// [`all_agree`].
///
/// # Errors
/// On every rank, if the work fails on one, or if one gets no thread; failures of communication.
pub fn with_keep_alive<T, E: From<Error> + From<comm::Error> + Display>(
    groups: &[&dyn Communicator],
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let result = alive(groups, Builder::new(), Failed::WaitsForAll, work);
    all_agree(groups.iter().copied(), result.and_then(|result| result))
}

/// Like [`with_keep_alive`] without the agreement: a rank whose work fails returns at once. If it then leaves the group, the others have
/// the error of a lost rank as soon as their own work is done.
///
/// # Errors
/// Those of the work; no thread; failures of communication.
pub fn while_others_work<T, E: From<Error> + From<comm::Error>>(
    group: &dyn Communicator,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    alive(&[group], Builder::new(), Failed::Leaves, work)?
}

/// What a rank does whose work has failed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Failed {
    WaitsForAll,
    Leaves,
}

/// Does some work, and returns its result when all ranks have done theirs. An outer error is one of communication.
fn alive<T, E: From<Error> + From<comm::Error>>(
    groups: &[&dyn Communicator],
    builder: Builder,
    failed: Failed,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<Result<T, E>, E> {
    let waits = |result: &Result<T, E>| result.is_ok() || failed == Failed::WaitsForAll;
    thread::scope(|scope| {
        let (tell, told) = channel();
        let others = builder.name("keep alive".into()).spawn_scoped(scope, move || repeat(groups, &told));
        let others = match others {
            Ok(others) => others,
            Err(error) => {
                let reason = format!("{error}: let this process have more threads");
                let result = Err(comm::Error::system("starting a thread", reason).into());
                return match waits(&result) {
                    true => until_all_are_done(groups).map(|()| result),
                    false => Ok(result),
                }
                .map_err(E::from);
            }
        };
        let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(mistake("a panic")));
        // Otherwise the thread ends when it finds that nothing is told any more.
        if waits(&result) {
            let _ = tell.send(());
        }
        drop(tell);
        let outcome = others.join().unwrap_or_else(|_| Err(mistake("a panic of the thread beside it")));
        match result {
            Err(error) if failed == Failed::Leaves => Ok(Err(error)),
            result => Ok(outcome.map(|()| result)?),
        }
    })
}

fn mistake<E: From<Error>>(got: &str) -> E {
    Error::invalid("work that other ranks wait for", got, "this is a mistake in girandole").into()
}

/// Repeats an all-reduce until this rank is told to be done and all others are, too, or until it cannot be told any more.
fn repeat(groups: &[&dyn Communicator], told: &Receiver<()>) -> crate::Result<()> {
    let mut wait = Duration::from_millis(1);
    loop {
        match told.recv_timeout(wait) {
            Ok(()) => return until_all_are_done(groups),
            Err(RecvTimeoutError::Timeout) => all_are_done(groups, false)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        wait = (wait * 2).min(PERIOD);
    }
}

fn until_all_are_done(groups: &[&dyn Communicator]) -> crate::Result<()> {
    while !all_are_done(groups, true)? {}
    Ok(())
}

fn all_are_done(groups: &[&dyn Communicator], own: bool) -> crate::Result<bool> {
    let done = Tensor::new(&[u8::from(own)], &Device::Cpu)?;
    for group in groups {
        group.run(Operation::AllReduce { tensor: done.clone(), op: ReduceOp::Min })?;
    }
    Ok(done.to_vec1::<u8>()?[0] == 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::channel;
    use std::thread::Builder;

    use comm::{Communicator, Local, Operation};

    use super::{Failed, alive, while_others_work};
    use crate::{Error, Result};

    #[test]
    fn a_rank_that_gets_no_thread_says_so_and_keeps_no_other_waiting() {
        let ends = Local::run(2, |comm| {
            let groups: [&dyn Communicator; 1] = [comm];
            // More memory for its stack than there are addresses.
            let builder = if comm.rank() == 1 { Builder::new().stack_size(1 << 60) } else { Builder::new() };
            let result: Result<Result<usize>> = alive(&groups, builder, Failed::WaitsForAll, || Ok(5));
            Ok(result.unwrap().map_err(|error| error.to_string()))
        });
        let [first, second] = <[_; 2]>::try_from(ends.unwrap()).unwrap();
        assert_eq!(first, Ok(5));
        assert!(second.clone().unwrap_err().contains("starting a thread"), "{second:?}");
    }

    #[test]
    fn a_panic_is_an_error() {
        let work = |_: &dyn Communicator| -> Result<()> { panic!("of a test") };
        let said = Local::run(1, |comm| Ok(while_others_work(comm, || work(comm)).unwrap_err().to_string()));
        assert!(said.unwrap()[0].contains("a panic"));
    }

    #[test]
    fn one_that_fails_leaves_those_that_wait_for_it_in_another_group() {
        let ends = Local::run_shared(3, |comm| {
            let alive = comm.split(Some(0), comm.rank())?.unwrap();
            // Rank 2 has nothing to do, rank 0 waits for rank 1 in its work.
            let work = || match comm.rank() {
                0 => Ok(comm.run(Operation::Recv {
                    tensor: candle_core::Tensor::new(&[0u8], &candle_core::Device::Cpu)?,
                    from: 1,
                })?),
                1 => Err(Error::invalid("rank 1", "nothing", "a test")),
                _ => Ok(()),
            };
            let ended = while_others_work(&*alive, work);
            // It leaves.
            drop(comm);
            Ok(ended.map_err(|error| (matches!(error, Error::Comm(_)), error.to_string())))
        });
        let ends = ends.unwrap();
        assert!(matches!(&ends[1], Err((false, said)) if said.contains("rank 1")), "{ends:?}");
        for rank in [0, 2] {
            assert!(matches!(&ends[rank], Err((true, _))), "{ends:?}");
        }
    }

    #[test]
    fn work_has_collectives_of_other_groups() {
        let ends = Local::run_shared(3, |comm| {
            let alive = comm.split(Some(0), comm.rank())?.unwrap();
            let (tell, told) = channel();
            let work = || {
                comm.run(Operation::Barrier)?;
                tell.send(comm.rank()).unwrap();
                Ok::<_, Error>(comm.rank())
            };
            let rank = while_others_work(&*alive, work).unwrap();
            Ok(told.recv().unwrap() == rank)
        });
        assert_eq!(ends.unwrap(), [true; 3]);
    }
}
