//! Elasticity options: `--elastic MIN:MAX` and `--replace K`.

use clap::Args;
use comm::{Elastic, TcpConfig};
use launch::command::ElasticRanks;
use launch::{ElasticJob, SpawnConfig};

use crate::error::{Error, Result};
use crate::options::RankOptions;

/// Whether a run goes on when ranks are lost.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ElasticOptions {
    /// Start MAX ranks, and continue as long as MIN are left [default: launch's]
    #[arg(long, value_name = "MIN:MAX", help_heading = "Ranks")]
    pub elastic: Option<ElasticRanks>,
    /// Start up to K new ranks to replace lost ones
    #[arg(long, value_name = "K", default_value = "0", requires = "elastic", help_heading = "Ranks")]
    pub replace: usize,
}

impl ElasticOptions {
    /// Returns the default number of ranks to start, which the environment and `--world-size` override.
    pub(crate) fn world_size(&self, default: usize) -> usize {
        self.elastic.map_or(default, |elastic| elastic.max)
    }

    /// Returns the range of `--elastic`, or else the minimum that the launcher of this rank passes on.
    pub(crate) fn ranks(&self) -> Option<ElasticRanks> {
        let of_launcher = || launch::elastic_min().map(|min| ElasticRanks { min, max: usize::MAX });
        self.elastic.or_else(of_launcher)
    }

    /// Checks that a run that starts its ranks itself can satisfy these options.
    ///
    /// # Errors
    /// Contradictory options; more replacements than possible.
    pub(crate) fn check(&self, world_size: usize, ranks: &RankOptions) -> Result<()> {
        self.check_ranks(world_size, ranks)?;
        let config = SpawnConfig { world_size, elastic: self.job(), ..SpawnConfig::default() };
        config.check().map_err(|error| match error {
            comm::Error::InvalidArgument { what, got, help } if what == "elastic.replace" => {
                Error::Option { option: "--replace", got, help }
            }
            other => other.into(),
        })
    }

    /// Checks the number of ranks and the backend.
    fn check_ranks(&self, world_size: usize, ranks: &RankOptions) -> Result<()> {
        if let Some(elastic) = self.elastic {
            let got = elastic.to_string();
            elastic.check(world_size).map_err(|help| Error::Option { option: "--elastic", got, help })?;
        }
        if self.ranks().is_some() && !ranks.is_tcp() {
            let got = format!("{:?}", ranks.backend).to_lowercase();
            let help = "groups change over TCP only: give tcp, or no --elastic".into();
            return Err(Error::Option { option: "--backend", got, help });
        }
        Ok(())
    }

    /// Applies the options to a rank that another launcher started.
    ///
    /// # Errors
    /// `--elastic` with a launcher that ends all ranks when one fails; contradictory options.
    pub(crate) fn apply_to_rank(&self, config: &mut TcpConfig, ranks: &RankOptions) -> Result<()> {
        self.check_ranks(config.world_size, ranks)?;
        if self.replace > 0 {
            let help = "the launcher of this rank does not replace lost ranks; leave the option out".into();
            return Err(Error::Option { option: "--replace", got: self.replace.to_string(), help });
        }
        let Some(elastic) = self.elastic else { return Ok(()) };
        if let Some(launcher) = launcher_that_ends_all() {
            let help = format!("{launcher}; start the ranks with girandole launch --elastic");
            return Err(Error::Option { option: "--elastic", got: elastic.to_string(), help });
        }
        config.elastic.get_or_insert_with(Elastic::default);
        Ok(())
    }

    /// Returns the settings for the launcher.
    pub(crate) fn job(&self) -> Option<ElasticJob> {
        self.elastic.map(|elastic| ElasticJob { replace: self.replace, ..elastic.job() })
    }
}

/// Describes the launcher of this rank if it ends all ranks when one fails; else `None`.
fn launcher_that_ends_all() -> Option<&'static str> {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let by_rank = is_set("RANK");
    match () {
        () if launch::is_worker() => match launch::elastic_min() {
            Some(_) => None,
            None => Some("the launcher was not given --elastic, and ends all ranks when one fails"),
        },
        () if is_set("TORCHELASTIC_RUN_ID") => Some("torchrun ends all ranks when one fails"),
        () if is_set("PET_NODE_RANK") => Some("Kubeflow ends or restarts all ranks when one fails"),
        () if !by_rank && (is_set("OMPI_COMM_WORLD_RANK") || is_set("PMI_RANK")) => {
            Some("an MPI launcher ends all ranks when one fails")
        }
        // Slurm does not, unless srun was given -K, and neither does anything if ranks were started one by one.
        () => None,
    }
}
