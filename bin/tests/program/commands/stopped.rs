//! Signals while results are being written: no temporary file is left.

use rustix::process::{Pid, Signal};

use crate::common::{Folder, Girandole, Session};

const COMMANDS: [(&str, &[&str]); 3] = [
    ("fsdp-mlp", &["--steps", "1", "--hidden", "1024", "--batch-size", "1", "--world-size", "2"]),
    ("tensor-parallel-mlp", &["--epochs", "1", "--samples", "8", "--hidden-size", "512"]),
    ("ddp-transformer", &["--epochs", "1", "--d-model", "512", "--d-ff", "2048"]),
];

#[test]
fn a_save_that_is_stopped_leaves_the_file_before_it_and_nothing_else() {
    for (command, arguments) in COMMANDS {
        for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
            // The moment is short: a run may end before it is caught.
            while !stopped_in_time(command, arguments, signal) {}
        }
    }
}

/// Returns whether a run was stopped while it was writing.
fn stopped_in_time(command: &'static str, arguments: &[&str], signal: Signal) -> bool {
    let folder = Folder::new();
    let path = folder.path("w.st");
    std::fs::write(&path, "earlier").unwrap();
    let save = [arguments, &["--save", path.to_str().unwrap()]].concat();
    let mut session = Session::start(&Girandole(command), &save);
    let writes = |ranks: &[Pid]| {
        let open = ranks.iter().flat_map(|rank| std::fs::read_dir(format!("/proc/{}/fd", rank.as_raw_pid())));
        let mut targets =
            open.flatten().flatten().map(|file| std::fs::read_link(file.path()).unwrap_or_default());
        targets.any(|target| target.starts_with(folder.path("")))
    };
    let found = session.until_ranks("a file is written", writes);
    let ended = session.stop(signal);
    assert!(found || ended.success(), "{command}: {ended}");
    if cfg!(portable) && signal == Signal::KILL {
        // In this build, files being written have names, and a killed process cannot remove its own: the next save
        // does.
        Girandole(command).succeed(&save);
    }
    let names: Vec<_> =
        std::fs::read_dir(folder.path("")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names, ["w.st"], "{command}, {signal:?}");
    let saved = std::fs::read(&path).unwrap();
    assert!(saved == b"earlier" || saved.len() > 1 << 20, "{command}, {signal:?}: {} bytes", saved.len());
    found
}
