//! Runs that are observed while they lose ranks, and undisturbed runs with equal results.

use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, Girandole, Session, text};

/// The command to run.
pub(crate) struct Job {
    pub(crate) command: &'static str,
    pub(crate) options: &'static [&'static str],
}

/// A running job under observation.
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

    /// Waits until it has done `more` further steps.
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

/// Returns where the ranks continued, from their notes: step and epoch.
pub(crate) fn places(output: &Output) -> Vec<(usize, usize)> {
    let number = |line: &str, before: &str| -> Option<usize> {
        line.split(before).nth(1)?.split([',', ')']).next()?.parse().ok()
    };
    let remarks = text(&output.stderr);
    let place = |line: &str| Some((number(line, "(step ")?, number(line, "go on at epoch ")?));
    remarks.lines().filter(|line| line.contains("go on at epoch")).filter_map(place).collect()
}

/// Returns the weights of a run whose number of ranks changes at these positions, as a sequence of runs, each of
/// which resumes from the checkpoint of the one before.
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
            // These ranks took no step.
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
        "--world-size", &world_size, "--epochs", &epochs, &resume, "--checkpoint-dir", &dir, "--save", &saved,
    ];
    command.succeed(&[job.options, &own].concat());
    std::fs::read(saved).unwrap()
}

/// Returns the checkpoint after this step.
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
