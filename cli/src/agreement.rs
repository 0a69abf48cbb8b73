//! Agreement on options: ranks that were started with different ones would train different models.

use std::path::PathBuf;
use std::sync::OnceLock;

use clap::{Arg, ArgAction, ArgMatches, Command};
use comm::{Communicator, Setting, host_name, setting_difference};
use serde::{Deserialize, Serialize};
use training::FileHash;

use crate::error::{Error, Result};
use crate::options::CommonOptions;

/// Options that a rank may have for itself; all others must be the same on all ranks.
pub const OWN: [&str; 31] = [
    // Where a rank computes and how it meets the others, which the meeting itself checks.
    "world-size",
    "backend",
    "device",
    "transport",
    "tls",
    "init-method",
    "timeout",
    "grace",
    // They change no number.
    "num-workers",
    "pin-memory",
    "no-memory-check",
    // What is printed and written, and where.
    "log-every",
    "print-every",
    "metrics",
    "report",
    "save",
    "picture",
    "pictures",
    "json",
    "out",
    "overwrite",
    "tensorboard",
    // What is read, which each host may have in another place: its content is compared.
    "data",
    "evaluate",
    "data-dir",
    "messages",
    "prompt-file",
    "init",
    "model",
    "adapters",
    // Its options are compared as if they had been typed.
    "recipe",
];

/// Options of which only is compared whether they are given, as all ranks then take part in something.
pub const JOINT: [&str; 3] = ["checkpoint-dir", "resume", "trace"];

/// The options of this process, by their command; empty if it has not parsed them with [`program`](crate::program).
static OPTIONS: OnceLock<Vec<Setting>> = OnceLock::new();

/// Stores the options of a command; called once, as a process parses its command line once.
pub(crate) fn store_options(commands: &Command, found: &ArgMatches) {
    let Some((name, found)) = found.subcommand() else { return };
    let Some(command) = commands.find_subcommand(name) else { return };
    let options = command.get_arguments().filter_map(|option| setting(option, found));
    let _ = OPTIONS.set([Setting::new("the command", name)].into_iter().chain(options).collect());
}

/// Returns an option with its value, after defaults and the recipe.
fn setting(option: &Arg, found: &ArgMatches) -> Option<Setting> {
    let long = option.get_long().filter(|long| !["help", "version"].contains(long))?;
    let name = format!("--{long}");
    let values = found.try_get_raw(option.get_id().as_str()).ok().flatten();
    let values: Option<Vec<_>> = values.map(|values| values.map(|value| value.to_string_lossy()).collect());
    let Some(values) = values else { return Some(Setting::absent(name)) };
    Some(match option.get_action() {
        ArgAction::SetTrue if values.iter().any(|value| value == "true") => Setting::new(name, ""),
        ArgAction::SetTrue => Setting::absent(name),
        _ => {
            let numbers = values.iter().flat_map(|value| value.split(',')).map(number);
            Setting::new(name, numbers.collect::<Vec<_>>().join(",")).shown_as(values.join(","))
        }
    })
}

/// Returns one text for all ways to write a number; any other text as it is.
fn number(text: &str) -> String {
    match (text.parse::<i128>(), text.parse::<f64>()) {
        (Ok(whole), _) => whole.to_string(),
        (_, Ok(number)) => number.to_string(),
        _ => text.to_string(),
    }
}

/// Returns the options that must be the same on all ranks. `joint` are more options of which only is compared whether
/// they are given.
fn of_all_ranks(joint: &[&str]) -> Vec<Setting> {
    let options = OPTIONS.get().into_iter().flatten();
    let compared = options.filter_map(|option| match option.name.trim_start_matches("--") {
        name if JOINT.contains(&name) || joint.contains(&name) => {
            let value = option.value.as_ref().map(|_| String::new());
            Some(Setting { value, ..option.clone() })
        }
        name if OWN.contains(&name) => None,
        _ => Some(option.clone()),
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
                let difference =
                    comm::SettingDifference::new((own.rank, &own.host, odd), (*rank, host, expected));
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
    use clap::Parser;

    use super::*;

    /// Options of all kinds.
    #[derive(Debug, Parser)]
    struct Program {
        #[arg(long, default_value = "0.01")]
        lr: f64,
        #[arg(long, default_value = "0.9,0.95")]
        betas: String,
        #[arg(long)]
        mesh: Option<String>,
        #[arg(long)]
        reshuffle: bool,
        #[arg(long, value_delimiter = ',', default_value = "a,b")]
        names: Vec<String>,
    }

    /// The options of a command line as they are compared, and as they are shown.
    fn options(words: &[&str]) -> (Vec<Option<String>>, Vec<String>) {
        use clap::CommandFactory;

        let command = Program::command();
        let found = command.clone().try_get_matches_from([&["program"], words].concat()).unwrap();
        let all: Vec<Setting> =
            command.get_arguments().filter_map(|option| setting(option, &found)).collect();
        (all.iter().map(|one| one.value.clone()).collect(), all.iter().map(Setting::to_string).collect())
    }

    #[test]
    fn options_are_compared_by_value_and_shown_as_they_are_typed() {
        let (defaults, shown) = options(&[]);
        assert_eq!(shown, ["--lr 0.01", "--betas 0.9,0.95", "no --mesh", "no --reshuffle", "--names a,b"]);
        let (same, shown) =
            options(&["--lr", "1e-2", "--betas", "0.90,0.95", "--names", "a", "--names", "b"]);
        assert_eq!(same, defaults);
        assert_eq!(shown[..2], ["--lr 1e-2", "--betas 0.90,0.95"]);
        for (place, other) in [
            (0, &["--lr", "0.02"][..]),
            (1, &["--betas=0.9,0.99"]),
            (2, &["--mesh=dp=2"]),
            (3, &["--reshuffle"]),
            (4, &["--names=a"]),
        ] {
            let (other, _) = options(other);
            let differ: Vec<usize> = (0..5).filter(|index| other[*index] != defaults[*index]).collect();
            assert_eq!(differ, [place]);
        }
    }

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
