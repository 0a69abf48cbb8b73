//! Agreement on options: ranks that were started with different ones would train different models.

use std::path::PathBuf;

use comm::Communicator;
use comm::internal::host_name;
use girandole::settings::{Setting, setting_difference};
use serde::{Deserialize, Serialize};
use training::FileHash;

use crate::error::{Error, Result};
use crate::option_values;
use crate::options::CommonOptions;

/// Options that a rank may have for itself; all others must be the same on all ranks.
pub const OWN: [&str; 31] = [
    // Where a rank computes and how it meets the others, which the meeting itself checks.
    "world-size", "backend", "device", "transport", "tls", "init-method", "timeout", "grace",
    // They change no number.
    "num-workers", "pin-memory", "no-memory-check",
    // What is printed and written, and where.
    "log-every", "print-every", "metrics", "report", "save", "picture", "pictures", "json", "out",
    "overwrite", "tensorboard",
    // What is read, which each host may have in another place: its content is compared.
    "data", "evaluate", "data-dir", "messages", "prompt-file", "init", "model", "adapters",
    // Its options are compared as if they had been typed.
    "recipe",
];

/// Options of which only is compared whether they are given, as all ranks then take part in something.
pub const JOINT: [&str; 3] = ["checkpoint-dir", "resume", "trace"];

/// Returns the options that must be the same on all ranks. `joint` are more options of which only is compared whether
/// they are given.
fn of_all_ranks(joint: &[&str]) -> Vec<Setting> {
    let compared =
        option_values::settings().filter_map(|option| match option.name.trim_start_matches("--") {
            name if JOINT.contains(&name) || joint.contains(&name) => {
                Some(Setting { value: option.value.map(|_| String::new()), ..option })
            }
            name if OWN.contains(&name) => None,
            _ => Some(option),
        });
    compared.collect()
}

/// Checks that all ranks were started with the same options. Every rank must call it. `joint` are options of which only is
/// compared whether they are given, beside [`JOINT`]. A program that parses its options in another way than by
/// [`program`](crate::program) gives them.
///
/// # Errors
/// The first option that differs, on every rank; failures of communication.
pub fn agree_on_options(
    world: &dyn Communicator,
    joint: &[&str],
    given: impl FnOnce() -> Vec<(String, String)>,
) -> Result<()> {
    let mut options = of_all_ranks(joint);
    if options.is_empty() {
        options.extend(given().into_iter().map(|(name, value)| Setting::new(name, value)));
    }
    agree(world, &options)
}

/// Checks that settings are the same on all ranks. Every rank must call it.
///
/// # Errors
/// The first one that differs, on every rank; failures of communication.
pub fn agree(world: &dyn Communicator, settings: &[Setting]) -> Result<()> {
    setting_difference(world, settings)?.map_or(Ok(()), |difference| Err(Error::Differ(Box::new(difference))))
}

/// What a rank that joins a running job is told of the options of the others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RunningJob {
    rank: usize,
    host: String,
    options: Vec<Setting>,
}

impl RunningJob {
    /// Returns what this rank tells others.
    pub(crate) fn of(world: &dyn Communicator) -> Self {
        let rank = world.world_ranks()[world.rank()];
        Self { rank, host: host_name(), options: of_all_ranks(&[]) }
    }

    /// Checks that this rank, which joins the job, was started with the same options.
    ///
    /// # Errors
    /// The first option that differs.
    pub(crate) fn check(&self, world: &dyn Communicator) -> Result<()> {
        let own = Self::of(world);
        let differs =
            |(own, other): &(&Setting, &Setting)| (&own.name, &own.value) != (&other.name, &other.value);
        match own.options.iter().zip(&self.options).find(differs) {
            None => Ok(()),
            Some((odd, expected)) => {
                let Self { rank, host, .. } = self;
                let difference = girandole::settings::SettingDifference::new(
                    (own.rank, &own.host, odd),
                    (*rank, host, expected),
                );
                Err(Error::Differ(Box::new(difference)))
            }
        }
    }
}

/// Returns a file whose content must be the same on all ranks, wherever each has it.
///
/// # Errors
/// A file that cannot be read.
pub fn content_of(option: &str, files: &[PathBuf]) -> Result<Vec<Setting>> {
    let one = |path: &PathBuf| {
        let hash = FileHash::of(path).map_err(|error| training::FileError::read(path, error))?;
        let FileHash { bytes, sha256 } = hash;
        let content = format!("{bytes} bytes with SHA-256 {sha256}");
        Ok(Setting::new(option, &content).shown_as(format_args!("{} of {content}", path.display())))
    };
    match files {
        [] => Ok(vec![Setting::absent(option)]),
        files => files.iter().map(one).collect(),
    }
}

impl CommonOptions {
    /// Returns the files that are read, whose contents must be the same on all ranks.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn contents(&self) -> Result<Vec<Setting>> {
        let file = |option, path: &Option<PathBuf>| content_of(option, path.as_slice());
        Ok([file("--data", &self.data)?, file("--init", &self.init)?].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_compared_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            content_of("--data", &[path]).unwrap().remove(0)
        };
        let [one, same, other] = [file("one", "text"), file("same", "text"), file("other", "more text")];
        assert_eq!(one.value, same.value);
        assert_ne!(one.value, other.value);
        assert!(other.to_string().contains("other of 9 bytes with SHA-256 "), "{other}");
        assert_eq!(content_of("--data", &[]).unwrap()[0].to_string(), "no --data");
        assert!(content_of("--data", &[folder.path().join("none")]).is_err());
    }
}
