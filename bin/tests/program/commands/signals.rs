//! Signals to a command without ranks, or before ranks are started.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, clean, girandole, is_ignored, text};

/// Longer than anything that is waited for, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

const SIGNALS: [(Signal, &str); 3] =
    [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")];

/// Bytes that are written to a pipe at once or not at all.
const PAGE: usize = 4096;

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

/// Starts single-process training on a terminal, made by `script` (util-linux); what the terminal receives goes to
/// `output`.
fn on_a_terminal(redirected: &str, output: Stdio) -> Child {
    let program =
        format!("exec {} ddp-linear --epochs 1000000 {redirected}", env!("CARGO_BIN_EXE_girandole"));
    let mut script = Command::new("script");
    clean(&mut script).args(["-qec", &program, "/dev/null"]).env("SHELL", "/bin/sh").env("TERM", "xterm");
    script.stdin(Stdio::piped()).stdout(output).spawn().unwrap()
}

/// Returns the process that `script` has started.
fn child_of(script: &Child) -> Pid {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", script.id())).unwrap();
    Pid::from_raw(children.trim().parse().unwrap()).unwrap()
}

#[test]
fn while_one_process_trains_alone() {
    for (signal, name) in SIGNALS.into_iter().filter(|(signal, _)| !is_ignored(signal.as_raw())) {
        let mut child = start(&["ddp-linear", "--epochs", "1000000"]);
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut lines = stdout.lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("[2, ")));
        // Standard output is still read: a closed pipe would end the process for another reason.
        std::thread::spawn(move || lines.for_each(drop));
        end(child, signal, name);
    }
}

#[test]
fn lines_of_an_earlier_run_are_kept() {
    if is_ignored(2) {
        return eprintln!("SIGINT is ignored here: nothing to test");
    }
    let folder = Folder::new();
    let (path, earlier) = (folder.argument("m.jsonl"), folder.path("m.jsonl.earlier"));
    std::fs::write(&path, "of an earlier run\n").unwrap();
    let mut child = start(&["ddp-linear", "--epochs", "1000000", "--metrics", &path]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("[2, ")));
    std::thread::spawn(move || lines.for_each(drop));
    end(child, Signal::INT, "SIGINT");
    assert_eq!(std::fs::read_to_string(earlier).unwrap(), "of an earlier run\n");
}

/// Output blocks on a pipe that nobody reads, which blocks the printing thread, and with it the progress bar on the
/// terminal.
#[test]
fn while_its_output_is_held_up() {
    if is_ignored(15) {
        return eprintln!("SIGTERM is ignored here: nothing to test");
    }
    let folder = Folder::new();
    let path = folder.argument("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    // Opened for reading, too: opening a pipe only for writing waits for a reader.
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let mut pipe =
        std::fs::File::options().read(true).write(true).custom_flags(nonblocking).open(&path).unwrap();
    // Filled but for a page, which is soon full.
    while pipe.write(&[b'\n'; PAGE]).is_ok() {}
    pipe.read_exact(&mut [0; PAGE]).unwrap();
    let filled = rustix::io::ioctl_fionread(&pipe).unwrap();
    let mut script = on_a_terminal(&format!(">'{path}'"), Stdio::null());
    let began = Instant::now();
    // A line that does not fit into the rest of the page waits, so the number of bytes in it varies.
    let mut held = (0, Instant::now());
    while held.0 < filled + PAGE as u64 / 2 || held.1.elapsed() < Duration::from_millis(500) {
        assert!(began.elapsed() < LIMIT, "{held:?}");
        let bytes = rustix::io::ioctl_fionread(&pipe).unwrap();
        if bytes != held.0 {
            held = (bytes, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(child_of(&script), Signal::TERM).unwrap();
    assert_eq!(script.wait().unwrap().code(), Some(143));
}

#[test]
fn on_a_terminal_no_bar_is_left() {
    if is_ignored(2) {
        return eprintln!("SIGINT is ignored here: nothing to test");
    }
    let mut script = on_a_terminal("", Stdio::piped());
    let mut shown = Vec::new();
    let mut stdout = script.stdout.take().unwrap();
    let mut read = |all: bool| {
        let mut chunk = [0; 4096];
        while all || !String::from_utf8_lossy(&shown).contains(" %  step ") {
            let count = stdout.read(&mut chunk).unwrap();
            if count == 0 {
                break;
            }
            shown.extend_from_slice(&chunk[..count]);
        }
    };
    read(false);
    kill_process(child_of(&script), Signal::INT).unwrap();
    read(true);
    assert_eq!(script.wait().unwrap().code(), Some(130));
    let shown = String::from_utf8_lossy(&shown);
    // The bar is erased from its line, and nothing else remains there.
    let (_, last) = shown.rsplit_once("\u{1b}[2K").unwrap();
    assert_eq!(last.trim_end(), "error: stopped by SIGINT", "{last:?}");
}

#[test]
fn from_the_first_moments_on() {
    if is_ignored(2) {
        return eprintln!("SIGINT is ignored here: nothing to test");
    }
    for arguments in [&["ddp-linear", "--epochs", "1000000"][..], &["launch", "sleep", "1000"]] {
        let child = start(arguments);
        // As soon as it handles signals, whatever it is doing then.
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
