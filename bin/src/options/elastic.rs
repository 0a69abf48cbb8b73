//! `--elastic MIN:MAX` and `--replace K`.

use std::str::FromStr;

use clap::Args;
use comm::launch::ElasticJob;

use crate::error::{Error, Result};
use crate::options::RankOptions;
use crate::trainer::ElasticRanks;

/// Whether a run goes on when ranks are lost.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ElasticOptions {
    /// Start MAX ranks, and go on as long as MIN are left when some are lost
    #[arg(long, value_name = "MIN:MAX", help_heading = "Ranks")]
    pub elastic: Option<ElasticRanks>,
    /// Start up to K new ranks in place of lost ones; they join between two steps
    #[arg(long, value_name = "K", default_value = "0", requires = "elastic", help_heading = "Ranks")]
    pub replace: usize,
}

impl ElasticOptions {
    /// Ranks to start, unless the environment or `--world-size` says otherwise.
    pub(crate) fn world_size(&self, default: usize) -> usize {
        self.elastic.map_or(default, |elastic| elastic.max)
    }

    /// Refuses another number of ranks than may be.
    ///
    /// # Errors
    /// What contradicts the option.
    pub(crate) fn check(&self, world_size: usize, ranks: &RankOptions) -> Result<()> {
        let Some(elastic @ ElasticRanks { min, max }) = self.elastic else { return Ok(()) };
        let refuse =
            |help: String| Err(Error::Option { option: "--elastic", got: elastic.to_string(), help });
        if !(min..=max).contains(&world_size) {
            return refuse(format!("the run begins with {world_size} ranks; give a range in which that is"));
        }
        if !ranks.is_tcp() {
            return refuse("groups change over TCP only; give --backend tcp".into());
        }
        Ok(())
    }

    /// Refuses ranks that something else has started.
    ///
    /// # Errors
    /// The option is given.
    pub(crate) fn check_alone(&self) -> Result<()> {
        let Some(elastic) = self.elastic else { return Ok(()) };
        let help = "the launcher that has started this rank ends them all when one fails; start the command without a launcher";
        Err(Error::Option { option: "--elastic", got: elastic.to_string(), help: help.into() })
    }

    /// What is said to the launcher.
    pub(crate) fn job(&self) -> Option<ElasticJob> {
        self.elastic.map(|ElasticRanks { min, .. }| ElasticJob { min, replace: self.replace })
    }
}

impl FromStr for ElasticRanks {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let parse = || {
            let (min, max) = text.split_once(':')?;
            let (min, max) = (min.parse().ok()?, max.parse().ok()?);
            (min >= 1 && min <= max).then_some(Self { min, max })
        };
        parse().ok_or("give the fewest and the most ranks, such as 2:4")
    }
}

impl std::fmt::Display for ElasticRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_two_numbers() {
        assert_eq!("2:4".parse(), Ok(ElasticRanks { min: 2, max: 4 }));
        for wrong in ["4", "0:4", "4:2", "a:b", "1:2:3", ":", "-1:2", ""] {
            assert!(wrong.parse::<ElasticRanks>().is_err(), "{wrong}");
        }
    }
}
