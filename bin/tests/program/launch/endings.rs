//! However a job ends, no process of it is left: neither ranks nor their child processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, clean, girandole, is_ignored, text};
use crate::launch::shell::shell;

/// Longer than anything that is waited for, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A launched job, with the processes that its ranks have printed.
struct Job {
    launcher: Child,
    processes: Vec<Process>,
}

/// A process, identified by its start time as well, as process ids are reused.
struct Process {
    pid: i32,
    started: String,
}

impl Job {
    /// Starts two ranks; their first `lines` lines of output are process ids.
    fn start(script: &str, lines: usize) -> Self {
        Self::started(shell(2, script), lines)
    }

    fn started(mut command: Command, lines: usize) -> Self {
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(launcher.stdout.take().unwrap());
        let pids = stdout.lines().take(lines).map(|line| line.unwrap().parse::<i32>().unwrap());
        let processes = pids
            .map(|pid| Process { pid, started: stat(pid).map_or(String::new(), |stat| stat.1) })
            .collect();
        Self { launcher, processes }
    }

    fn end(&mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.launcher), signal).unwrap();
        self.launcher.wait().unwrap()
    }

    fn nothing_is_left(&self) {
        let began = Instant::now();
        while let Some(process) = self.processes.iter().find(|process| process.runs()) {
            assert!(began.elapsed() < LIMIT, "process {} is left", process.pid);
            std::thread::yield_now();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
        for process in self.processes.iter().filter(|process| process.runs()) {
            let _ = kill_process(Pid::from_raw(process.pid).unwrap(), Signal::KILL);
        }
    }
}

impl Process {
    fn runs(&self) -> bool {
        // A zombie that waits to be reaped by its new parent does not count.
        stat(self.pid).is_some_and(|(state, started)| started == self.started && !"ZX".contains(&state))
    }
}

/// Returns the state and the start time of a process.
fn stat(pid: i32) -> Option<(String, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split(' ').map(str::to_string);
    Some((fields.next()?, fields.nth(18)?))
}

/// A shell with a child process that has left its process group and terminal.
const FAMILY: &str = "setsid sleep 1000 & echo $!; echo $$; wait";

#[test]
fn when_the_launcher_is_killed() {
    let mut job = Job::start(FAMILY, 4);
    assert!(!job.end(Signal::KILL).success());
    job.nothing_is_left();
}

/// The elastic job's temporary files are removed, too.
#[test]
fn when_the_launcher_of_an_elastic_job_is_killed() {
    let folder = Folder::new();
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", "2", "--elastic", "1:2", "--", "sh", "-c", FAMILY]);
    command.env("TMPDIR", folder.path(""));
    let left = || std::fs::read_dir(folder.path("")).unwrap().count();
    let mut job = Job::started(command, 4);
    assert_eq!(left(), 1);
    assert!(!job.end(Signal::KILL).success());
    job.nothing_is_left();
    let began = Instant::now();
    while left() > 0 {
        assert!(began.elapsed() < LIMIT, "the job's folder is left");
        std::thread::yield_now();
    }
}

/// These processes cannot be recognized by their environment.
#[test]
fn when_the_launcher_of_programs_without_an_environment_is_killed() {
    let mut job = Job::start("exec env -i sh -c 'echo $$; exec sleep 1000'", 2);
    assert!(!job.end(Signal::KILL).success());
    job.nothing_is_left();
}

#[test]
fn when_it_is_stopped_by_a_signal() {
    for (signal, name, number) in [(Signal::INT, "SIGINT", 2), (Signal::TERM, "SIGTERM", 15)] {
        if is_ignored(number) {
            eprintln!("{name} is ignored here: nothing to test");
            continue;
        }
        let mut job = Job::start(FAMILY, 4);
        assert_eq!(job.end(signal).code(), Some(128 + number));
        // The launcher returns only after its processes have ended.
        assert!(!job.processes.iter().any(Process::runs));
        let mut remarks = job.launcher.stderr.take().unwrap();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut remarks, &mut bytes).unwrap();
        assert_eq!(text(&bytes), format!("error: stopped by {name}; all ranks have ended\n"));
    }
}

#[test]
fn when_a_rank_fails() {
    let mut job = Job::start(&FAMILY.replace("wait", "[ $RANK = 0 ] || exit 3; wait"), 4);
    assert_eq!(job.launcher.wait().unwrap().code(), Some(3));
    assert!(!job.processes.iter().any(Process::runs));
}

#[test]
fn when_all_ranks_end_and_leave_something_behind() {
    let mut job = Job::start(&FAMILY.replace("; wait", ""), 4);
    assert_eq!(job.launcher.wait().unwrap().code(), Some(0));
    assert!(!job.processes.iter().any(Process::runs));
}

#[test]
fn when_it_is_stopped_by_a_signal_that_its_parent_has_blocked() {
    let mut command = Command::new("env");
    clean(&mut command).args(["--block-signal=TERM", env!("CARGO_BIN_EXE_girandole"), "launch"]);
    command.args(["--nproc-per-node", "2", "--", "sh", "-c", FAMILY]).stdin(Stdio::null());
    let mut job = Job::started(command, 4);
    assert_eq!(job.end(Signal::TERM).code(), Some(128 + 15));
    let remarks = std::io::read_to_string(job.launcher.stderr.take().unwrap()).unwrap();
    // The ranks did not have to be killed.
    assert_eq!(remarks, "error: stopped by SIGTERM; all ranks have ended\n");
}

/// Starts processes that lose their parent, and says which of them are left, be it as zombies, when all have ended.
const ORPHANS: &str = r#"for i in 1 2 3 4 5; do pids="$pids $(sh -c 'sleep 0.1 >/dev/null & echo $!')"; done
for i in $(seq 600); do
    left=; for pid in $pids; do [ -d /proc/$pid ] && left="$left $pid"; done
    [ -z "$left" ] && break; sleep 0.1
done
echo "left:$left"; [ $RANK = 0 ] || exit 7"#;

#[test]
fn as_the_first_process_of_a_container_it_reaps_what_has_no_parent() {
    let unshare = || {
        let mut command = Command::new("unshare");
        clean(&mut command).args(["--map-root-user", "--pid", "--fork", "--mount-proc"]);
        command
    };
    if !unshare().arg("true").output().is_ok_and(|output| output.status.success()) {
        return eprintln!("no process namespace can be made here: nothing to test");
    }
    let mut command = unshare();
    command.args([
        env!("CARGO_BIN_EXE_girandole"),
        "launch",
        "--nproc-per-node",
        "2",
        "--",
        "sh",
        "-c",
        ORPHANS,
    ]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(text(&output.stdout), "left:\nleft:\n", "{}", text(&output.stderr));
    // A rank's exit code is not taken for an orphan's.
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
}
