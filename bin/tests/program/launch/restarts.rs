//! Restarts of failed ranks.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sampler::Generator;

use crate::common::{Folder, girandole, losses, refuse_with, succeed, text};
use crate::launch::shell::ranks_of;

/// Longer than anything that is waited for, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn all_ranks_start_again_as_often_as_they_may() {
    let script = "echo $RANK:$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; [ $RANK = 1 ] || exec sleep 1000; \
                  [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3";
    let twice = |restarts: &str, script: &str| {
        let mut command = girandole();
        command
            .args(["launch", "--nproc-per-node", "2", "--max-restarts", restarts, "--", "sh", "-c", script]);
        command.output().unwrap()
    };
    let output = twice(
        "5",
        &script.replace("exec sleep 1000", "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exec sleep 1000"),
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["0:0/5", "0:1/5", "0:2/5", "1:0/5", "1:1/5", "1:2/5"]);

    let output = twice("1", script);
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{remarks}");
    let [again, end] = remarks.lines().collect::<Vec<_>>()[..] else { panic!("{remarks}") };
    assert!(
        again.starts_with("warning: rank 1 (pid ") && again.ends_with("start again (restart 1 of 1)"),
        "{remarks}"
    );
    assert!(end.starts_with("error: rank 1 (pid ") && end.ends_with("exited with code 3"), "{remarks}");
}

#[test]
fn a_wrong_option_of_our_own_command_is_not_tried_again() {
    let mut command = girandole();
    command.args([
        "launch", "--nproc-per-node", "2", "--max-restarts", "3", "girandole", "ddp-linear", "--world-size",
        "3",
    ]);
    let output = command.output().unwrap();
    let remarks = text(&output.stderr);
    assert!(output.status.code() == Some(2) && !remarks.contains("start again"), "{remarks}");
}

const LONG: [&str; 7] = ["ddp-transformer", "--samples", "20", "--reshuffle", "--epochs", "200", "--save"];

#[test]
fn three_kills_at_random_moments_cost_nothing_but_time() {
    let folder = Folder::new();
    let [saved, whole, dir, lines, undisturbed] =
        ["saved", "whole", "checkpoints", "m.jsonl", "whole.jsonl"].map(|name| folder.argument(name));
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", "2", "--max-restarts", "3", "--", "girandole"]).args(LONG);
    command.args([&saved, "--checkpoint-dir", &dir, "--checkpoint-every", "7", "--metrics", &lines]);
    let mut job = Job(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut generator = Generator::new(u64::from(std::process::id()));
    for _ in 0..3 {
        let latest = || std::fs::read(folder.path("checkpoints/latest")).ok();
        let before = latest();
        let ranks = job.wait_for(|job| Some(ranks_of(&job.0)).filter(|ranks| ranks.len() == 2));
        if !generator.next_u32().is_multiple_of(3) {
            job.wait_for(|_| Some(()).filter(|()| latest() != before));
        }
        std::thread::sleep(Duration::from_micros(u64::from(generator.next_u32() % 50_000)));
        kill_process(ranks[generator.next_u32() as usize % 2], Signal::KILL).unwrap();
        // The other ranks end, and all are restarted.
        job.wait_for(|job| Some(()).filter(|()| ranks_of(&job.0).iter().all(|rank| !ranks.contains(rank))));
    }
    let remarks = job.end();
    assert_eq!(
        remarks.matches("was killed by signal SIGKILL; all ranks start again").count(),
        3,
        "{remarks}"
    );
    let mut alone = girandole();
    succeed(alone.args(LONG).args([&whole, "--world-size", "2", "--metrics", &undisturbed]));
    assert!(std::fs::read(saved).unwrap() == std::fs::read(whole).unwrap(), "other weights: {remarks}");
    assert_eq!(losses(Path::new(&lines)), losses(Path::new(&undisturbed)));
}

/// A job that is killed on drop.
struct Job(Child);

impl Job {
    fn wait_for<T>(&mut self, seen: impl Fn(&Self) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(seen) = seen(self) {
                return seen;
            }
            assert!(began.elapsed() < LIMIT, "not seen");
            assert!(self.0.try_wait().unwrap().is_none(), "the job has ended: {}", self.end());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for its end, which must be a success; returns standard error.
    fn end(&mut self) -> String {
        let mut remarks = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut remarks).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}: {remarks}");
        remarks
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_signal_ends_the_job_in_spite_of_restarts() {
    let mut command = girandole();
    command.args([
        "launch", "--nproc-per-node", "2", "--max-restarts", "9", "sh", "-c", "echo $$; exec sleep 1000",
    ]);
    let mut job = Job(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    job.wait_for(|job| Some(()).filter(|()| ranks_of(&job.0).len() == 2));
    kill_process(Pid::from_child(&job.0), Signal::TERM).unwrap();
    assert_eq!(job.0.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn what_ranks_print_is_kept_by_attempt_and_rank() {
    let folder = Folder::new();
    let dir = folder.argument("logs");
    let script = "echo out $RANK; echo err $RANK >&2; [ $RANK = 0 ] || exit 3";
    let run = |more: &[&str]| {
        let mut command = girandole();
        command.args(["launch", "--nproc-per-node", "2", "--log-dir", &dir]).args(more);
        command.args(["--", "sh", "-c", script]).output().unwrap()
    };
    let quiet = run(&["--max-restarts", "1"]);
    assert_eq!((quiet.status.code(), text(&quiet.stdout).as_str()), (Some(3), ""));
    let remarks = text(&quiet.stderr);
    assert!(
        remarks.starts_with(&format!("note: what the ranks print goes to files in {dir}; ")),
        "{remarks}"
    );
    let last: Vec<&str> = remarks.lines().rev().take(3).collect();
    assert!(
        last[0].starts_with("error: rank 1 (pid ") && last[0].ends_with(" exited with code 3"),
        "{remarks}"
    );
    let log = last[1].strip_prefix("all that rank 1 wrote on stderr: ").unwrap();
    assert_eq!((last[2], std::fs::read_to_string(log).unwrap().as_str()), ("    err 1", "err 1\n"));
    let attempts = Path::new(log).ancestors().nth(3).unwrap();
    for (file, content) in [("attempt_0/0/stdout.log", "out 0\n"), ("attempt_1/1/stderr.log", "err 1\n")] {
        assert_eq!(std::fs::read_to_string(attempts.join(file)).unwrap(), content, "{file}");
    }
    let mut shown = text(&run(&["--tee"]).stdout).lines().map(str::to_string).collect::<Vec<_>>();
    shown.sort();
    assert_eq!(shown, ["out 0", "out 1"]);
    let errors = run(&["--tee", "2"]);
    assert!(errors.stdout.is_empty() && text(&errors.stderr).starts_with("err "), "{}", text(&errors.stderr));
}

#[test]
fn what_cannot_be_is_told() {
    let folder = Folder::new();
    std::fs::write(folder.path("file"), "").unwrap();
    let file = folder.argument("file/below");
    for (arguments, part) in [
        (&["--max-restarts", "-1", "true"][..], "--max-restarts"),
        (&["--log-dir", &file, "true"], "error: --log-dir: got "),
        (&["--tee", "true"], "give 1 (standard output)"),
        (&["--tee", "--", "true"], "--log-dir"),
    ] {
        let mut command: Command = girandole();
        let (line, code) = refuse_with(command.arg("launch"), arguments);
        assert!(line.contains(part) && code == 2, "{line}");
    }
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""]).arg(girandole().get_program()).arg("launch");
    let logs = folder.argument("logs");
    let (line, code) = refuse_with(&mut limited, &["--nproc-per-node", "10", "--log-dir", &logs, "true"]);
    let part = "error: --nproc-per-node: got 10; this process may have 64 files open, enough for 6 ranks on this machine with their logs; ";
    assert!(line.starts_with(part) && code == 2, "{line}");
}
