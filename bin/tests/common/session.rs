//! Runs that are killed and resumed.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sampler::Generator;

use super::{Folder, Girandole, losses, text};

/// Longer than anything that is waited for, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A running command. It and its ranks are killed on drop.
pub(crate) struct Session {
    child: Child,
}

impl Session {
    pub(crate) fn start(command: &Girandole, arguments: &[&str]) -> Self {
        let mut command = command.command();
        command.args(arguments);
        Self::of(command)
    }

    /// Starts a command that has its arguments and its environment.
    pub(crate) fn of(mut command: Command) -> Self {
        Self { child: command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap() }
    }

    pub(crate) fn launcher(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns its ranks that have been started so far.
    pub(crate) fn ranks(&self) -> Vec<Pid> {
        let pid = self.child.id();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        // The launcher's cleanup process, which an elastic job has, is no rank.
        let is_rank = |pid: &&str| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(b"RANK="))
        };
        let ranks = children.split_whitespace().filter(is_rank);
        ranks.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }

    /// Kills one of its ranks that has not been killed before, any of them, including the first and new ones.
    pub(crate) fn kill_another(&self, killed: &mut Vec<Pid>, random: &mut Generator) {
        let mut left = self.ranks();
        left.retain(|rank| !killed.contains(rank));
        let next = left[random.next_u32() as usize % left.len()];
        kill_process(next, Signal::KILL).unwrap();
        killed.push(next);
    }

    /// Waits until a condition holds or the command has ended.
    pub(crate) fn until(&mut self, what: &str, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() && self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < LIMIT, "{what}: not yet");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a condition on its ranks holds; returns false if the command ends first.
    pub(crate) fn until_ranks(&mut self, what: &str, done: impl Fn(&[Pid]) -> bool) -> bool {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if done(&self.ranks()) {
                return true;
            }
            assert!(began.elapsed() < LIMIT, "{what}: not yet");
            // Shorter than what is waited for, and the ranks have the processor meanwhile.
            std::thread::sleep(Duration::from_micros(200));
        }
        false
    }

    /// Kills one of its processes, 0 being the launcher, and waits until all have ended.
    pub(crate) fn kill(mut self, which: usize) {
        let ranks = self.ranks();
        let mut all = vec![Pid::from_child(&self.child)];
        all.extend(&ranks);
        // It may have just ended by itself.
        let _ = kill_process(all[which % all.len()], Signal::KILL);
        self.child.wait().unwrap();
        let began = Instant::now();
        while ranks.iter().any(|rank| runs(*rank)) {
            assert!(began.elapsed() < LIMIT, "{ranks:?} still run");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends the launcher a signal, and waits until all processes have ended. Returns how it ended.
    pub(crate) fn stop(mut self, signal: Signal) -> ExitStatus {
        let ranks = self.ranks();
        // It may have just ended by itself.
        let _ = kill_process(Pid::from_child(&self.child), signal);
        let ended = self.child.wait().unwrap();
        let began = Instant::now();
        while ranks.iter().any(|rank| runs(*rank)) {
            assert!(began.elapsed() < LIMIT, "{ranks:?} still run");
            std::thread::sleep(Duration::from_millis(1));
        }
        ended
    }

    pub(crate) fn end(mut self) -> Output {
        let mut stderr = String::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        }
        Output { status: self.child.wait().unwrap(), stdout: Vec::new(), stderr: stderr.into_bytes() }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process runs; a zombie that waits to be reaped by its new parent does not count.
fn runs(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Environment variable for the number of kills, and its default.
const KILLS: (&str, usize) = ("GIRANDOLE_FAULT_ROUNDS", 5);

/// Kills a run at random moments, resumes it each time, and finally compares it with an undisturbed run: weights bitwise, and the
/// losses of all steps.
pub(crate) fn kill_and_resume(command: &Girandole, arguments: &[&str]) {
    let kills = std::env::var(KILLS.0).map_or(KILLS.1, |kills| kills.parse().unwrap());
    let folder = Folder::new();
    let (dir, lines) = (folder.argument("checkpoints"), folder.argument("metrics.jsonl"));
    let (saved, whole) = (folder.argument("saved"), folder.argument("whole"));
    let keep = ["--checkpoint-dir", &dir, "--checkpoint-every", "7", "--resume", "--metrics", &lines];
    let resuming = [arguments, &keep].concat();
    let mut generator = Generator::new(kills as u64);
    let mut random = |below: u32| generator.next_u32() % below;
    for _ in 0..kills {
        // So many epochs that it cannot end by itself.
        let mut session = Session::start(command, &[&resuming[..], &["--epochs", "1000000"]].concat());
        let before = std::fs::read(folder.path("checkpoints/latest")).ok();
        if random(4) > 0 {
            // Otherwise it is killed at any point: perhaps before it has joined or read the checkpoint.
            session.until("a checkpoint more", || {
                std::fs::read(folder.path("checkpoints/latest")).ok() != before
            });
        }
        std::thread::sleep(Duration::from_micros(random(20_000).into()));
        session.kill(random(4) as usize);
    }
    let epoch = latest_epoch(&folder.path("checkpoints"));
    assert!(epoch > 0, "it has come to epoch {epoch} only");
    let epochs = (epoch + 2).to_string();
    let last = command.succeed(&[&resuming[..], &["--epochs", &epochs, "--save", &saved]].concat());
    assert!(text(&last.stderr).contains(&format!("going on from {dir} at epoch ")), "{}", text(&last.stderr));
    let undisturbed = folder.argument("whole.jsonl");
    command
        .succeed(&[arguments, &["--epochs", &epochs, "--save", &whole, "--metrics", &undisturbed]].concat());
    assert!(
        std::fs::read(saved).unwrap() == std::fs::read(whole).unwrap(),
        "other weights at epoch {epochs}"
    );
    assert_eq!(losses(lines.as_ref()), losses(undisturbed.as_ref()));
}

fn latest_epoch(dir: &Path) -> u64 {
    let latest = std::fs::read_to_string(dir.join("latest")).unwrap();
    let (folder, _) = latest.split_once(' ').unwrap();
    let json = std::fs::read_to_string(dir.join(folder).join("checkpoint.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["epoch"].as_u64().unwrap()
}
