//! When a trainer writes checkpoints, and the identity that a run must share with the checkpoint it resumes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use training::Checkpoints;

use crate::options::NO_INIT;
use crate::resume::COMMAND;

use super::Position;

/// Everything that determines a run's results: a run is resumed only from a checkpoint with the same identity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunIdentity {
    /// The command.
    pub command: String,
    /// Number of ranks with different data. It may differ on a resume: the rest of the epoch is then redistributed.
    pub world_size: usize,
    /// Options as typed, with their values: seed, learning rate, sizes. Without `--epochs`: a run may be extended.
    pub settings: BTreeMap<String, String>,
    /// End of this run: a checkpoint beyond it is rejected. Not stored in checkpoints. Default: none.
    #[serde(skip)]
    pub end: Option<RunEnd>,
}

/// End of a run, by the option that sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// After so many epochs: `--epochs`.
    Epochs(usize),
    /// After so many steps: `--steps`.
    Steps(usize),
}

impl RunEnd {
    /// Whether a run at this position is complete.
    pub(super) fn is_reached(self, at: Position) -> bool {
        match self {
            Self::Epochs(epochs) => at.epoch >= epochs,
            Self::Steps(steps) => at.step >= steps,
        }
    }

    /// Returns the option and its value if this position is beyond the end.
    pub(super) fn passed(self, at: Position) -> Option<(&'static str, usize)> {
        match self {
            Self::Epochs(epochs) => ((at.epoch, at.batch) > (epochs, 0)).then_some(("--epochs", epochs)),
            Self::Steps(steps) => (at.step > steps).then_some(("--steps", steps)),
        }
    }
}

/// A setting of a checkpoint that is no option, as the command is not.
const WORLD_SIZE: &str = "world_size";
/// The option whose file is not read when a run is resumed.
pub(super) const INIT: &str = "--init";
/// Stands for the value of an option that is missing in a checkpoint or a run.
const UNKNOWN: &str = "nothing";

impl RunIdentity {
    /// Creates the identity of a run with these options and values.
    pub fn new(
        command: &str,
        world_size: usize,
        settings: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        Self { command: command.into(), world_size, settings: settings.into_iter().collect(), end: None }
    }

    /// Returns the settings that checkpoints store.
    pub(super) fn into_settings(self) -> BTreeMap<String, String> {
        let own =
            [(COMMAND.to_string(), self.command), (WORLD_SIZE.to_string(), self.world_size.to_string())];
        self.settings.into_iter().chain(own).collect()
    }

    /// Returns the identity of the run that has stored these settings.
    pub(super) fn of_settings(mut settings: BTreeMap<String, String>) -> Self {
        let command = settings.remove(COMMAND).unwrap_or_default();
        let world_size = settings.remove(WORLD_SIZE).and_then(|ranks| ranks.parse().ok()).unwrap_or_default();
        Self { command, world_size, settings, end: None }
    }

    /// Returns the first option in which this run differs from the saved one: its name, its value, the saved value.
    pub(super) fn difference<'a>(&'a self, saved: &'a Self) -> Option<(&'a str, &'a str, &'a str)> {
        let value = |settings: &'a BTreeMap<String, String>, option: &str| {
            settings.get(option).map_or(UNKNOWN, String::as_str)
        };
        let options = self.settings.keys().chain(saved.settings.keys());
        let mut pairs = options
            .map(|option| (option.as_str(), value(&self.settings, option), value(&saved.settings, option)));
        // Initial weights need not be given again.
        pairs.find(|(option, own, saved)| own != saved && !(*option == INIT && *own == NO_INIT))
    }
}

/// Default number of steps between checkpoints without epochs; the help of `--checkpoint-every` states the same number.
pub(super) const EVERY: usize = 20;

/// When and where a trainer writes checkpoints. See [`Trainer::keep_checkpoints`](super::Trainer::keep_checkpoints).
#[derive(Clone)]
pub struct CheckpointSchedule {
    /// The checkpoint folder.
    pub checkpoints: Checkpoints,
    /// Steps between checkpoints; `None`: one at the end of each epoch.
    pub every: Option<usize>,
    /// Identity of the run.
    pub run: RunIdentity,
    /// Step of the last checkpoint.
    pub(super) last: Option<usize>,
}

impl CheckpointSchedule {
    /// Creates a schedule that has written no checkpoint yet.
    pub fn new(checkpoints: Checkpoints, every: Option<usize>, run: RunIdentity) -> Self {
        Self { checkpoints, every, run, last: None }
    }

    /// Whether a checkpoint is due after this step; `epoch_ends` tells whether the step ends an epoch.
    pub(super) fn is_due(&self, step: usize, epoch_ends: bool) -> bool {
        self.every.map_or(epoch_ends, |every| step.is_multiple_of(every))
    }

    pub(super) fn is_saved(&self, step: usize) -> bool {
        self.last == Some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let run = |settings: &[(&'static str, &str)]| {
            RunIdentity::new(
                "x",
                2,
                settings.iter().map(|(option, value)| (option.to_string(), value.to_string())),
            )
        };
        let own = run(&[("--lr", "0.1"), ("--seed", "42")]);
        assert_eq!(own.difference(&own), None);
        assert_eq!(own.difference(&run(&[("--lr", "0.1"), ("--seed", "7")])), Some(("--seed", "42", "7")));
        let more = run(&[("--lr", "0.1"), ("--seed", "42"), ("--mask", "none")]);
        assert_eq!(own.difference(&more), Some(("--mask", "nothing", "none")));
        assert_eq!(more.difference(&own), Some(("--mask", "none", "nothing")));
        let [first, second] =
            ["a file with SHA-256 12", "a file with SHA-256 13"].map(|data| run(&[("--data", data)]));
        assert!(first.difference(&second).is_some());
    }

    #[test]
    fn initial_weights_that_are_given_again_are_the_same() {
        let [none, first, second] = [NO_INIT, "a file with SHA-256 12", "a file with SHA-256 13"]
            .map(|init| RunIdentity::new("x", 2, [(INIT.into(), init.to_string())]));
        for (own, saved) in [(&none, &first), (&first, &first), (&none, &none)] {
            assert_eq!(own.difference(saved), None);
        }
        assert!(first.difference(&second).is_some() && first.difference(&none).is_some());
    }

    #[test]
    fn what_is_beyond_the_end_is_told() {
        let at = |epoch, batch, step| Position { epoch, batch, step };
        for (end, at, passed) in [
            (RunEnd::Epochs(2), at(2, 0, 10), None),
            (RunEnd::Epochs(2), at(1, 4, 9), None),
            (RunEnd::Epochs(2), at(2, 1, 11), Some(("--epochs", 2))),
            (RunEnd::Epochs(2), at(3, 0, 15), Some(("--epochs", 2))),
            (RunEnd::Steps(7), at(0, 0, 7), None),
            (RunEnd::Steps(7), at(0, 0, 8), Some(("--steps", 7))),
        ] {
            assert_eq!(end.passed(at), passed);
        }
    }
}
