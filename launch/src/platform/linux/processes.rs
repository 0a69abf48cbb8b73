//! Finds and kills processes that belong to a job, wherever they come from.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::platform::Killed;

/// What a process is to a job.
enum Kind {
    /// It is of the job, and has been sent a signal that kills it.
    Ours(OwnedFd),
    Another,
    /// It has no environment that can be read: it may just be executing a program, and have it a moment later.
    Undecided,
}

/// Kills every process with this variable, `NAME=value`, in its environment, and waits until they have ended, a second at most. Of
/// processes without an environment, those count as undecided that have been started since this one was: a process that is executing a
/// program has none for a moment.
pub(crate) fn kill_all_with(variable: &[u8]) -> Killed {
    let (mut found, own_start) = (Killed::default(), start_of_living("self"));
    let Ok(processes) = std::fs::read_dir("/proc") else { return found };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut killed = Vec::new();
    for pid in pids.filter_map(Pid::from_raw) {
        match kill(pid, variable, own_start) {
            Kind::Ours(handle) => killed.push(handle),
            Kind::Undecided => found.undecided += 1,
            Kind::Another => {}
        }
    }
    // One that is ending has no environment any more, and so would not be found again.
    for handle in &killed {
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&second));
    }
    found.count = killed.len();
    found
}

fn kill(pid: Pid, variable: &[u8], own_start: Option<u64>) -> Kind {
    // The pidfd guarantees that the process that is checked is the one that is killed, even if its id is reused. The
    // environment of a process that has ended, or that belongs to another user, cannot be read.
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Kind::Another };
    let id = pid.as_raw_nonzero().to_string();
    let Ok(environment) = std::fs::read(format!("/proc/{id}/environ")) else { return Kind::Another };
    if environment.is_empty() {
        let is_new = start_of_living(&id).zip(own_start).is_some_and(|(start, own)| start >= own);
        return if is_new { Kind::Undecided } else { Kind::Another };
    }
    let ours = environment.split(|&byte| byte == 0).any(|other| other == variable);
    match ours && pidfd_send_signal(&handle, Signal::KILL).is_ok() {
        true => Kind::Ours(handle),
        false => Kind::Another,
    }
}

/// Returns when a process was started, in the system's ticks; `None` if it has ended, or is a thread of the system.
fn start_of_living(id: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let (state, start, memory) = (*fields.first()?, fields.get(19)?.parse().ok()?, *fields.get(20)?);
    (!"ZX".contains(state) && memory != "0").then_some(start)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A process without an environment may be one that is executing a program.
    #[test]
    fn a_new_process_without_an_environment_is_undecided() {
        let before = kill_all_with(b"NO_SUCH_VARIABLE=1");
        assert_eq!(before.count, 0);
        let mut child = Command::new("sleep").arg("1000").env_clear().spawn().unwrap();
        let pid = Pid::from_child(&child);
        let own = start_of_living("self");
        let is_undecided = |own| matches!(kill(pid, b"NO_SUCH_VARIABLE=1", own), Kind::Undecided);
        let (new, old) = (is_undecided(own), is_undecided(own.map(|_| u64::MAX)));
        child.kill().unwrap();
        // A zombie is none.
        let began = std::time::Instant::now();
        while is_undecided(own) {
            assert!(began.elapsed() < std::time::Duration::from_secs(60));
        }
        child.wait().unwrap();
        assert!(new && !old);
    }
}
