//! Signals to a command that has no ranks yet, or none at all.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{girandole, is_ignored, text};

/// Nothing that is waited for takes this long, not even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

const SIGNALS: [(Signal, &str); 3] =
    [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")];

fn start(arguments: &[&str]) -> Child {
    let mut command = girandole();
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn end(mut child: Child, signal: Signal, name: &str) {
    kill_process(Pid::from_child(&child), signal).unwrap();
    let mut remarks = Vec::new();
    child.stderr.take().unwrap().read_to_end(&mut remarks).unwrap();
    let (status, remarks) = (child.wait().unwrap(), text(&remarks));
    assert_eq!(status.code(), Some(128 + signal.as_raw()), "{status} {remarks}");
    assert_eq!(remarks.lines().last(), Some(format!("error: stopped by {name}").as_str()), "{remarks}");
}

#[test]
fn while_one_process_trains_alone() {
    for (signal, name) in SIGNALS.into_iter().filter(|(signal, _)| !is_ignored(signal.as_raw())) {
        let mut child = start(&["ddp-linear", "--epochs", "1000000"]);
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut lines = stdout.lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("[2, ")));
        // They are still read: who cannot print ends for another reason.
        std::thread::spawn(move || lines.for_each(drop));
        end(child, signal, name);
    }
}

#[test]
fn from_the_first_moments_on() {
    if is_ignored(2) {
        return eprintln!("SIGINT is ignored here: nothing to test");
    }
    for arguments in [&["ddp-linear", "--epochs", "1000000"][..], &["launch", "sleep", "1000"]] {
        let child = start(arguments);
        // As soon as it takes notice of signals, wherever it has come to.
        let began = Instant::now();
        let takes_notice = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() >> 1 & 1 == 1)
        };
        while !takes_notice() {
            assert!(began.elapsed() < LIMIT, "{arguments:?}");
            std::hint::spin_loop();
        }
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{arguments:?}: {} {remarks}", output.status);
        assert!(remarks.lines().last().unwrap().starts_with("error: stopped by SIGINT"), "{remarks}");
    }
}
