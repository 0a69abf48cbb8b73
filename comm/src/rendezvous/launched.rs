//! What a rank is handed by the launcher that started it, and what it tells that launcher while it meets the others.

use std::fs::File;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;

use crate::platform::socket::is_listening;

/// The launcher's process id. Its presence makes a process a worker.
pub const SPAWNER_PID: &str = "GIRANDOLE_SPAWNER_PID";
/// Says, by [`LISTENER_STDIN`], that the standard input is the listening socket of [`MASTER_PORT`].
pub const LISTENER: &str = "GIRANDOLE_LISTENER";
/// See [`LISTENER`].
pub const LISTENER_STDIN: &str = "stdin";
/// Where rank 0 listens.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// The fewest ranks that go on.
pub const ELASTIC_MIN: &str = "GIRANDOLE_ELASTIC_MIN";
/// Marks a line that says that the rank has met the others; the ranks follow that they have left behind.
pub const MET_PREFIX: &str = "\u{1}girandole-met:";

/// True where a launcher of this library started this process.
pub fn is_worker() -> bool {
    std::env::var_os(SPAWNER_PID).is_some()
}

/// The fewest ranks that go on when others are lost, as this process's launcher tells.
pub fn elastic_min() -> Option<usize> {
    std::env::var(ELASTIC_MIN).ok().and_then(|min| min.parse().ok()).filter(|_| is_worker())
}

/// The socket that listens on `MASTER_PORT`, where the launcher handed one over as standard input. It is taken once:
/// the standard input is empty afterwards, so that no child of this process holds the socket too.
pub fn inherited_listener() -> Option<TcpListener> {
    if std::env::var_os(LISTENER)? != LISTENER_STDIN {
        return None;
    }
    let port: u16 = std::env::var(MASTER_PORT).ok()?.parse().ok()?;
    let stdin = io::stdin();
    // A child of rank 0 finds the variable too, but another standard input.
    if !is_listening(stdin.as_fd()) {
        return None;
    }
    // The copy is closed when another program is executed.
    let listener = TcpListener::from(stdin.as_fd().try_clone_to_owned().ok()?);
    if listener.local_addr().ok()?.port() != port {
        return None;
    }
    // Failing that, the port stays taken for as long as the process lives: a pity, no more.
    if let Ok(nothing) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nothing);
    }
    Some(listener)
}

/// Tells the launcher that this rank has met the others, `without` those that they have left behind. Does nothing where no
/// launcher of an elastic job started it.
pub(crate) fn tell_met(without: &[usize]) {
    if elastic_min().is_none() {
        return;
    }
    let mut out = std::io::stdout().lock();
    let numbers: Vec<String> = without.iter().map(usize::to_string).collect();
    // Where it cannot be written the launcher ends the job when a rank fails.
    let _ =
        out.write_all(format!("{MET_PREFIX}{}\n", numbers.join(" ")).as_bytes()).and_then(|()| out.flush());
}
