//! A run that is watched while it loses ranks, and the runs that it must equal.

use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, Girandole, Session, text};

/// What is run.
pub(crate) struct Job {
    pub(crate) command: &'static str,
    pub(crate) options: &'static [&'static str],
}

/// A run of some ranks that is being watched.
pub(crate) struct Watched {
    pub(crate) session: Session,
    folder: Folder,
    pub(crate) ranks: Vec<Pid>,
}

impl Watched {
    pub(crate) fn start(job: &Job, elastic: &str, more: &[&str]) -> Self {
        let folder = Folder::new();
        let (lines, saved) = (folder.argument("m.jsonl"), folder.argument("saved"));
        let own = ["--elastic", elastic, "--metrics", &lines, "--save", &saved];
        let mut session = Session::start(&Girandole(job.command), &[job.options, &own, more].concat());
        let path = folder.path("m.jsonl");
        session.until("60 steps", || steps(&path) >= 60);
        let ranks = session.ranks();
        Self { session, folder, ranks }
    }

    pub(crate) fn kill(&self, rank: usize) {
        kill_process(self.ranks[rank], Signal::KILL).unwrap();
    }

    /// Waits until it has done so many more steps than it has now.
    pub(crate) fn more(&mut self, more: usize) {
        let path = self.folder.path("m.jsonl");
        let now = steps(&path);
        self.session.until("more steps", || steps(&path) >= now + more);
    }

    pub(crate) fn end(self) -> (Output, Folder) {
        let output = self.session.end();
        assert!(output.status.success(), "{}", text(&output.stderr));
        (output, self.folder)
    }
}

fn steps(path: &Path) -> usize {
    std::fs::read(path).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

/// Where the ranks went on, as they say: step, epoch.
pub(crate) fn places(output: &Output) -> Vec<(usize, usize)> {
    let number = |line: &str, before: &str| -> Option<usize> {
        line.split(before).nth(1)?.split([',', ')']).next()?.parse().ok()
    };
    let remarks = text(&output.stderr);
    let place = |line: &str| Some((number(line, "(step ")?, number(line, "go on at epoch ")?));
    remarks.lines().filter(|line| line.contains("go on at epoch")).filter_map(place).collect()
}

/// Weights of a run that had so many ranks up to this place, and others from there on, in as many runs, each of which goes on
/// from the checkpoint of the one before.
pub(crate) fn replayed(
    job: &Job,
    stages: &[(usize, (usize, usize))],
    (last, epochs): (usize, usize),
    folder: &Folder,
) -> Vec<u8> {
    let command = Girandole(job.command);
    let (dir, saved) = (folder.argument("checkpoints"), folder.argument("replayed"));
    let mut resume = String::from("--resume");
    let mut reached = 0;
    for (world_size, (step, epoch)) in stages {
        if std::mem::replace(&mut reached, *step) == *step {
            // No step was taken by these ranks.
            continue;
        }
        let (every, until) = (step.to_string(), (epoch + 1).to_string());
        let (world_size, keep) =
            (world_size.to_string(), ["--checkpoint-dir", &dir, "--checkpoint-every", &every]);
        let own = ["--world-size", &world_size, "--epochs", &until, &resume];
        command.succeed(&[job.options, &keep, &own].concat());
        resume = format!("--resume={}", checkpoint_of(&folder.path("checkpoints"), *step).display());
    }
    let (world_size, epochs) = (last.to_string(), epochs.to_string());
    let own = [
        "--world-size",
        &world_size,
        "--epochs",
        &epochs,
        &resume,
        "--checkpoint-dir",
        &dir,
        "--save",
        &saved,
    ];
    command.succeed(&[job.options, &own].concat());
    std::fs::read(saved).unwrap()
}

/// The checkpoint after so many steps.
fn checkpoint_of(dir: &Path, step: usize) -> PathBuf {
    let folders =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let wanted = format!("\"step\": {step},");
    let is_it = |folder: &PathBuf| {
        std::fs::read_to_string(folder.join("checkpoint.json"))
            .is_ok_and(|manifest| manifest.contains(&wanted))
    };
    folders.into_iter().find(is_it).unwrap_or_else(|| panic!("no checkpoint of step {step}"))
}
