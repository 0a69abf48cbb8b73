//! Starts ranks as processes of this machine, and looks after them.
//!
//! [`run`] is all that most programs need: started by hand it makes ranks of the program, and in a rank, whoever has started
//! that, it trains.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use launch::RankContext;
//!
//! fn train(rank: RankContext) -> comm::Result<()> {
//!     let comm = rank.connect()?;
//!     // ...
//! #   drop(comm);
//!     Ok(())
//! }
//!
//! fn main() -> ExitCode {
//!     launch::run(4, train)
//! }
//! ```
//!
//! Below it, [`spawn`] starts `world_size` copies of any program, gives each its rank through the environment, forwards their
//! output line by line, and returns what they report once all have ended. When one fails the others are ended too, and the
//! error names the first cause. A program that is started this way calls [`worker_guard`] first thing in `main`, as [`run`]
//! does, so that no rank outlives its launcher, however that one ends.

#![deny(unsafe_code)]

mod config;
mod elastic;
mod environment;
mod event;
mod failure;
mod forward;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod herald;
mod layout;
mod lines;
#[cfg(test)]
mod listener;
mod logs;
mod master;
mod master_port;
mod nested;
mod nodes;
mod notes;
mod platform;
mod random;
mod reserved;
mod rounds;
mod run;
mod signals;
mod sink;
mod start;
mod supervise;
mod warden;
mod watch;
mod worker;

use std::sync::mpsc;

use comm::Result;

pub use comm::{EXIT_PEER_FAILED, ExitKind, NodeName, WorkerFailure};
pub use config::SpawnConfig;
pub use elastic::{ElasticJob, elastic_min};
pub use layout::Layout;
pub use logs::LogConfig;
pub use master_port::MasterPort;
pub use notes::{Notes, send_note, wants_notes};
pub use reserved::ReservedPort;
pub use run::{RankContext, run};
pub use signals::on_signal;
pub use worker::{is_worker, report_result, restarts, worker_guard};

/// Starts the ranks of one job as processes of this machine, waits until all have ended, and returns what each one
/// passed to [`report_result`] (its last report), by rank.
///
/// Where a rank fails and [`max_restarts`](SpawnConfig::max_restarts) allows it, all are started again. A job on several
/// machines has a launcher on each, with the same configuration but for [`node_rank`](SpawnConfig::node_rank); they meet
/// at the first one, act as one, and return the same error. Each returns the reports of its own ranks. Where
/// [`elastic`](SpawnConfig::elastic) allows it, the others go on when ranks fail.
///
/// Each rank finds in its environment: what `torchrun` tells its own (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
/// `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT` and so on); the job's secret and id; and
/// `RAYON_NUM_THREADS`, the cores divided by the ranks, unless that is set already. Rank 0 inherits the listening socket
/// of `MASTER_PORT` as its standard input, so that nobody can take the port in between, see [`MasterPort`]; the other
/// ranks' standard input is empty.
///
/// On Linux the kernel ends the ranks together with this process, whatever program they run; on macOS those end that call
/// [`worker_guard`], and the others where [`SpawnConfig::sweep`] is set.
///
/// Standard output and standard error of the ranks go to those of this process, in whole lines. While the call lasts,
/// SIGINT, SIGTERM and SIGHUP are passed on to the ranks; after it they do again what they did before.
///
/// # Errors
/// - [`Error::Worker`](comm::Error::Worker): a rank failed. The others were given
///   [`grace`](SpawnConfig::grace) to end by themselves and were then ended.
/// - [`Error::Nodes`](comm::Error::Nodes), [`Error::NodeRefused`](comm::Error::NodeRefused): the launchers of several nodes
///   did not find each other. [`Error::NodeGone`](comm::Error::NodeGone): one of them was killed, or its machine is gone.
///   [`Error::NodeSilent`](comm::Error::NodeSilent): one of them stands still, and the others have waited for it.
///   [`Error::NodeStopped`](comm::Error::NodeStopped): one of them ended the job for another reason.
/// - [`Error::Interrupted`](comm::Error::Interrupted): one of the signals above arrived, or (as SIGPIPE) nobody reads
///   this process's standard output any more. The ranks were ended.
/// - [`Error::InvalidArgument`](comm::Error::InvalidArgument): a world size of 0, more ranks than this process may have
///   pipes, a program that cannot be run, a meeting point that is not this machine's; a call in a rank, of the rank's own program
///   (`program` of `None`) or of the command that it is a rank of, as its ranks would make the same call.
/// - [`Error::Listen`](comm::Error::Listen): the port to meet at is taken.
/// - [`Error::System`](comm::Error::System): the system has no room for that many processes, or refuses something else;
///   all ranks have ended well, but a log does not have all that they have printed.
///
/// In every case no process that it started is left, unless the system cannot end it (a process that hangs inside
/// the kernel).
///
/// ```no_run
/// use launch::{SpawnConfig, spawn};
///
/// let config = SpawnConfig { program: Some("/bin/sh".into()), args: Some(vec!["-c".into(), "echo $RANK".into()]), ..SpawnConfig::default() };
/// spawn(&SpawnConfig { world_size: 2, ..config })?;
/// # Ok::<(), comm::Error>(())
/// ```
pub fn spawn(config: &SpawnConfig) -> Result<Vec<Option<String>>> {
    config.check()?;
    let (sender, events) = mpsc::channel();
    // As long as there are no ranks, signals do what they always do: nodes may have to wait for each other.
    let nodes = nodes::Nodes::join(config, &sender)?;
    // Before the first rank, so that a signal that comes while they are started reaches them too.
    let _signals = signals::SignalRelay::start(&sender)?;
    rounds::Rounds {
        config,
        nodes,
        inbox: event::Inbox::new(events),
        events: sender,
        signal: None,
        job: None,
        herald: None,
        lost_log: None,
    }
    .run()
}
