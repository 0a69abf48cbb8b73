//! Starts ranks as processes of this machine and supervises them.
//!
//! [`run`] is all that most programs need. In a process started by hand it starts the ranks; in a process that is a
//! rank, whichever launcher has started it, it calls the training function.
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
//! [`spawn`] is the lower level. It starts `world_size` copies of any program, gives each its rank through the
//! environment, forwards their output line by line, and returns what they report once all have ended. When one fails,
//! the others are ended too, and the error names the first cause. A program that is started this way calls
//! [`worker_guard`] first thing in `main`, as [`run`] does, so that no rank outlives its launcher, however that one
//! ends.
//!
//! Read it in this order: [`run`] and [`RankContext`]; [`spawn`] with [`SpawnConfig`]; [`LogConfig`], files for the ranks' output;
//! [`ElasticJob`], which goes on without lost ranks; [`WorkerFailure`], the first cause.
//!
//! With the feature `command`, the module `command` has the options of `girandole launch`.

#![deny(unsafe_code)]

mod check;
#[cfg(feature = "command")]
pub mod command;
mod config;
mod elastic;
mod environment;
mod error;
mod event;
mod failure;
mod failure_announcer;
mod forward;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod init;
mod layout;
mod lines;
#[cfg(test)]
mod listener;
mod logs;
pub mod machine;
mod master;
mod master_port;
mod message;
mod nested;
mod nodes;
mod notes;
mod platform;
mod random;
mod reaper;
mod reserved;
mod rounds;
mod run;
mod signals;
mod sink;
mod start;
mod supervise;
mod threads;
mod watch;
mod worker;
mod worker_failure;

use std::sync::mpsc;

pub use comm::EXIT_PEER_FAILED;
pub use config::SpawnConfig;
pub use elastic::{ElasticJob, elastic_min};
pub use error::{Error, Result};
pub use layout::NodeLayout;
pub use logs::LogConfig;
pub use master_port::MasterPort;
pub use notes::{Notes, send_note, wants_notes};
pub use reserved::ReservedPort;
pub use run::{RankContext, run};
pub use signals::on_signal;
pub use threads::check_threads;
pub use worker::{is_worker, report_result, restarts, worker_guard};
pub use worker_failure::{EXIT_CHECKPOINTED, ExitKind, NodeName, WorkerFailure, signal_name};

/// Starts the ranks of one job as processes of this machine, waits until all have ended, and returns what each one
/// passed to [`report_result`] (its last report), by rank.
///
/// Where a rank fails and [`max_restarts`](SpawnConfig::max_restarts) allows it, all are restarted. A job on several
/// machines has a launcher on each, with the same configuration except for [`node_rank`](SpawnConfig::node_rank). They
/// connect to the first one, act as one, and return the same error. Each returns the reports of its own ranks. Where
/// [`elastic`](SpawnConfig::elastic) allows it, the other ranks continue when ranks fail.
///
/// Each rank finds in its environment: the variables that `torchrun` sets (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
/// `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT` and so on); the job's secret and id; and
/// `RAYON_NUM_THREADS`, the number of cores divided by the number of ranks, unless it is set already. Rank 0 inherits
/// the listening socket of `MASTER_PORT` as its standard input, so that no other process can take the port in between,
/// see [`MasterPort`]; the other ranks' standard input is empty.
///
/// On Linux the kernel ends the ranks together with this process, whatever program they run. On macOS only ranks that
/// call [`worker_guard`] end; the others end where [`SpawnConfig::sweep`] is set.
///
/// Standard output and standard error of the ranks are forwarded to those of this process, in whole lines. During the
/// call, signals are passed on to the ranks; afterwards they have their earlier effect again. SIGINT, SIGTERM and SIGHUP
/// end the job: ranks that have not ended after [`grace`](SpawnConfig::grace), or when another such signal arrives, are
/// killed. The same signal within a second of the first is no other one: GNU `timeout` sends it twice. SIGUSR1 and
/// SIGUSR2 are passed on and end nothing here. An inherited mask that blocks these signals has no effect, in the ranks
/// neither.
///
/// # Errors
/// - [`Error::Worker`]: a rank failed. The others were given
///   [`failure_grace`](SpawnConfig::failure_grace) to end by themselves and were then ended.
/// - [`Error::Nodes`], [`Error::NodeRefused`]: the launchers of several
///   nodes did not find each other. [`Error::NodeGone`]: one of them was killed, or its machine
///   is gone. [`Error::NodeSilent`]: nothing was received from one of them while the others
///   waited for it. [`Error::NodeStopped`]: one of them ended the job for another reason.
/// - [`Error::Interrupted`]: a signal that ends the job arrived, or (as SIGPIPE) this process's
///   standard output has no reader any more. The ranks were ended.
/// - [`Error::Checkpointed`]: ranks have ended with [`EXIT_CHECKPOINTED`], as they were asked to.
///   They are not restarted.
/// - [`comm::Error::InvalidArgument`]: a world size of 0; more ranks than this process may have
///   pipes; a program that cannot be run; a rendezvous address that is not this machine's; a call in a rank that would
///   start the rank's own program (`program` of `None`) or the command that it is a rank of, as its ranks would make
///   the same call.
/// - [`comm::Error::Listen`]: the rendezvous port is taken.
/// - [`comm::Error::System`]: the system cannot start that many processes, or refuses something else; or
///   all ranks have succeeded, but a log is incomplete.
///
/// In every case no process that it started is left running, unless the system cannot end it (a process that hangs
/// inside the kernel).
///
/// ```no_run
/// use launch::{SpawnConfig, spawn};
///
/// let config = SpawnConfig { program: Some("/bin/sh".into()), args: Some(vec!["-c".into(), "echo $RANK".into()]), ..SpawnConfig::default() };
/// spawn(&SpawnConfig { world_size: 2, ..config })?;
/// # Ok::<(), launch::Error>(())
/// ```
pub fn spawn(config: &SpawnConfig) -> Result<Vec<Option<String>>> {
    config.check()?;
    let (sender, events) = mpsc::channel();
    // While there are no ranks, signals keep their default effect: the nodes may have to wait long for each other.
    let nodes = nodes::Nodes::join(config, &sender)?;
    // Started before the first rank, so that a signal that arrives while the ranks are started reaches them too.
    let _signals = signals::SignalRelay::start(&sender)?;
    rounds::Rounds {
        config,
        nodes,
        inbox: event::Inbox::new(events),
        events: sender,
        signal: None,
        job: None,
        announcer: None,
        lost_log: None,
    }
    .run()
}
