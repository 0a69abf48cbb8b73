//! Settings that must be the same on all ranks, such as a program's options: which one differs, and where.

use std::fmt;

use serde::{Deserialize, Serialize};

use comm::internal::{LineDifference, host_name, line_difference};
use comm::{Communicator, Result, all_gather_object};

/// A setting of this rank that must be the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its name, as its user writes it: `--lr`.
    pub name: String,
    /// What is compared. `None` if it was not given.
    pub value: Option<String>,
    /// What a message shows in place of the value, such as a file's path where its content is compared. Default: the value.
    pub shown: Option<String>,
}

impl Setting {
    /// Creates a setting that has a value.
    pub fn new(name: impl Into<String>, value: impl fmt::Display) -> Self {
        Self { name: name.into(), value: Some(value.to_string()), shown: None }
    }

    /// Creates a setting that was not given.
    pub fn absent(name: impl Into<String>) -> Self {
        Self { name: name.into(), value: None, shown: None }
    }

    /// Returns the same setting, shown in another way.
    #[must_use]
    pub fn shown_as(self, shown: impl fmt::Display) -> Self {
        Self { shown: Some(shown.to_string()), ..self }
    }
}

/// `--lr 0.1`; `--reshuffle` where the value is empty; `no --mesh` where it was not given.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shown.as_ref().or(self.value.as_ref()) {
            None => write!(f, "no {}", self.name),
            Some(shown) if shown.is_empty() => f.write_str(&self.name),
            Some(shown) => write!(f, "{} {shown}", self.name),
        }
    }
}

/// A setting that is not the same on all ranks. Ranks are those of the whole job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {odd_rank} (host {odd_host}) was given {odd}, and rank {rank} (host {host}) {expected}: give all ranks the same"
)]
#[non_exhaustive]
pub struct SettingDifference {
    /// A rank that differs from most others.
    pub odd_rank: usize,
    /// Its host.
    pub odd_host: String,
    /// Its setting.
    pub odd: Setting,
    /// A rank to compare it with.
    pub rank: usize,
    /// That rank's host.
    pub host: String,
    /// That rank's setting.
    pub expected: Setting,
}

impl SettingDifference {
    /// Creates the difference between the settings of two ranks, each with its host.
    pub fn new(
        (odd_rank, odd_host, odd): (usize, &str, &Setting),
        (rank, host, expected): (usize, &str, &Setting),
    ) -> Self {
        let (odd_host, host) = (odd_host.into(), host.into());
        Self { odd_rank, odd_host, odd: odd.clone(), rank, host, expected: expected.clone() }
    }
}

/// Compares settings, which all ranks pass in the same order. Returns `None` if they are equal, else the first that
/// differs, which is the same on every rank. Every rank must call it.
///
/// # Cost
/// That of [`line_difference`]; only where a setting differs, one more exchange.
///
/// # Errors
/// Those of [`Communicator::run`].
///
/// ```
/// use girandole::comm::{Communicator, Local};
/// use girandole::settings::{Setting, setting_difference};
///
/// let found = Local::run(3, |comm| {
///     let lr = if comm.rank() == 2 { 1.0 } else { 0.01 };
///     setting_difference(comm, &[Setting::new("--epochs", 10), Setting::new("--lr", lr)])
/// })?;
/// let found = found[0].as_ref().ok_or("nothing differs")?;
/// assert_eq!((found.odd_rank, found.odd.to_string(), found.expected.to_string()), (2, "--lr 1".into(), "--lr 0.01".into()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn setting_difference(
    comm: &dyn Communicator,
    settings: &[Setting],
) -> Result<Option<SettingDifference>> {
    let lines: Vec<String> =
        settings.iter().map(|Setting { name, value, .. }| format!("{name} {value:?}")).collect();
    let Some(LineDifference { odd_rank, rank, place, .. }) = line_difference(comm, 0, &lines)? else {
        return Ok(None);
    };
    // A rank that has fewer settings than the others.
    let own = settings.get(place).cloned().unwrap_or_else(|| Setting::absent("more"));
    let all: Vec<(String, Setting)> = all_gather_object(comm, &(host_name(), own))?;
    let of = |number: usize| {
        let index = comm.world_ranks().iter().position(|world| *world == number);
        let (host, setting) = &all[index.unwrap_or_default()];
        (number, host.as_str(), setting)
    };
    Ok(Some(SettingDifference::new(of(odd_rank), of(rank))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use comm::Local;

    /// What all ranks are told if each has these settings.
    fn said(ranks: usize, settings: fn(usize) -> Vec<Setting>) -> Option<String> {
        let said = Local::run(ranks, |comm| {
            Ok(setting_difference(comm, &settings(comm.rank()))?.map(|difference| difference.to_string()))
        });
        let said = said.unwrap();
        assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
        said[0].as_ref().map(|said| said.replace(&format!(" (host {})", host_name()), ""))
    }

    #[test]
    fn a_setting_that_differs_is_named_with_both_values_and_ranks() {
        assert_eq!(said(3, |_| vec![Setting::new("--lr", 0.1), Setting::absent("--mesh")]), None);
        let values = said(3, |rank| vec![Setting::new("--epochs", 2), Setting::new("--lr", rank / 2)]);
        assert_eq!(values.unwrap(), "rank 2 was given --lr 1, and rank 0 --lr 0: give all ranks the same");
        let flag = said(2, |rank| match rank {
            0 => vec![Setting::absent("--reshuffle")],
            _ => vec![Setting::new("--reshuffle", "")],
        });
        let expected = "rank 1 was given --reshuffle, and rank 0 no --reshuffle: give all ranks the same";
        assert_eq!(flag.unwrap(), expected);
        let fewer = said(2, |rank| vec![Setting::new("--lr", 1); 2 - rank]);
        assert_eq!(fewer.unwrap(), "rank 1 was given no more, and rank 0 --lr 1: give all ranks the same");
    }

    #[test]
    fn what_is_only_shown_is_not_compared() {
        let file = |rank: usize, content: usize| {
            vec![Setting::new("--data", content).shown_as(format_args!("{rank}.txt of {content} bytes"))]
        };
        assert_eq!(said(2, |rank| vec![Setting::new("--data", 7).shown_as(rank)]), None);
        let found =
            Local::run(2, |comm| setting_difference(comm, &file(comm.rank(), 5 + comm.rank()))).unwrap();
        let found = found[1].clone().unwrap();
        assert_eq!(found.odd.to_string(), "--data 1.txt of 6 bytes");
        assert_eq!(found.expected.to_string(), "--data 0.txt of 5 bytes");
    }
}
