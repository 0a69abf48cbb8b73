//! The value of `--elastic`: how many ranks there may be.

use std::str::FromStr;

use crate::ElasticJob;

/// Allowed numbers of ranks: a run starts with `max` by default, continues as long as `min` are left, and accepts
/// newcomers up to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElasticRanks {
    /// Minimum number of ranks.
    pub min: usize,
    /// Maximum number of ranks.
    pub max: usize,
}

impl ElasticRanks {
    /// Returns the settings for a launcher.
    pub fn job(self) -> ElasticJob {
        ElasticJob { min: self.min, ..ElasticJob::default() }
    }

    /// Checks that the number of ranks that a run starts with is in the range.
    ///
    /// # Errors
    /// It is not in the range; the error says what to give.
    pub fn check(self, world_size: usize) -> Result<(), String> {
        if (self.min..=self.max).contains(&world_size) {
            return Ok(());
        }
        Err(format!("the run begins with {world_size} ranks; give a range that includes it"))
    }
}

impl FromStr for ElasticRanks {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
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
