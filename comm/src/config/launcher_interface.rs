//! Interface between a launcher and the ranks it starts: environment variables, an inherited listener, lines on standard
//! output.

use std::fs::File;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;

use crate::platform::socket::is_listening;

/// Variable with the launcher's process id. A process that has it is a worker of that launcher.
pub const SPAWNER_PID: &str = "GIRANDOLE_SPAWNER_PID";
/// Variable that is [`LISTENER_STDIN`] where standard input is the listening socket of [`MASTER_PORT`].
pub const LISTENER: &str = "GIRANDOLE_LISTENER";
/// Value of [`LISTENER`].
pub const LISTENER_STDIN: &str = "stdin";
/// Variable with the port on which rank 0 listens.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Variable with the smallest number of ranks with which an elastic job continues.
pub const ELASTIC_MIN: &str = "GIRANDOLE_ELASTIC_MIN";
/// Prefix of the line on standard output with which a rank reports that it has met the others. The numbers of the ranks
/// that were left behind follow.
pub const MET_PREFIX: &str = "\u{1}girandole-met:";

/// Returns whether a launcher of this library started this process.
pub fn is_worker() -> bool {
    std::env::var_os(SPAWNER_PID).is_some()
}

/// Returns the smallest number of ranks with which the job continues when others are lost. `None` where no launcher of an
/// elastic job started this process.
pub fn elastic_min() -> Option<usize> {
    std::env::var(ELASTIC_MIN).ok().and_then(|min| min.parse().ok()).filter(|_| is_worker())
}

/// Returns the socket that listens on `MASTER_PORT`, where the launcher passed it as standard input. It can be taken
/// once: standard input is then replaced by `/dev/null`, so that no child of this process inherits the socket.
pub fn inherited_listener() -> Option<TcpListener> {
    if std::env::var_os(LISTENER)? != LISTENER_STDIN {
        return None;
    }
    let port: u16 = std::env::var(MASTER_PORT).ok()?.parse().ok()?;
    let stdin = io::stdin();
    // A child process of rank 0 inherits the variable too, but has another standard input.
    if !is_listening(stdin.as_fd()) {
        return None;
    }
    // The duplicate is closed on exec.
    let listener = TcpListener::from(stdin.as_fd().try_clone_to_owned().ok()?);
    if listener.local_addr().ok()?.port() != port {
        return None;
    }
    // If this fails, the port stays in use for as long as the process lives, which does no harm.
    if let Ok(nothing) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nothing);
    }
    Some(listener)
}

/// Reports to the launcher, on standard output, that this rank has met the others; `without` are the numbers of the ranks
/// left behind. Does nothing unless the launcher of an elastic job started this process.
pub(crate) fn report_met(without: &[usize]) {
    if elastic_min().is_none() {
        return;
    }
    let mut out = std::io::stdout().lock();
    let numbers: Vec<String> = without.iter().map(usize::to_string).collect();
    // If the line cannot be written, the launcher ends the job when a rank fails.
    let _ =
        out.write_all(format!("{MET_PREFIX}{}\n", numbers.join(" ")).as_bytes()).and_then(|()| out.flush());
}
