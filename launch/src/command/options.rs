//! The options of `launch`, and their defaults from the environment.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use comm::{Error, Result, Tls};

use super::elastic::ElasticRanks;
use super::nproc::ProcessCount;
use super::pet::Pet;
use super::tee::Tee;
use super::transport::TransportOption;
use super::values::seconds;
use crate::ElasticJob;

/// Options of `launch`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Starts --nproc-per-node copies of PROGRAM, each a rank of one job, and forwards their output line by
line. It ends all of them when one fails, when it is stopped by a signal, and when it is killed
itself. SIGUSR1 and SIGUSR2 are passed on to them, and end nothing here. Its last line names the first cause. Its exit code is 0, or that of the first rank that failed:
128 + the signal if a signal ended it; 1 for 75, the code by which a rank says that another rank
failed.

Elastic jobs (--elastic MIN:MAX): a rank that fails after all have met is lost, and the others continue
as long as MIN are left, if PROGRAM supports that. ddp-trainer, ddp-transformer, ddp-mlp, cifar10,
pretrain, finetune and prefer do, and so do programs that shrink their group with the crate comm; all other programs end as
without the option. With fewer than MIN ranks the job ends, and --max-restarts applies. Lost ranks are not replaced. The job is
done when all remaining ranks are; a rank that hangs and was left behind is then ended, with a warning
that names it.

On several machines give --elastic to each launcher. A machine other than node 0 may be lost with its
launcher, or leave when a signal stops its launcher; after that there is no restart. Ranks of node 0
may be lost, but if its launcher or machine is lost the job ends. Machines that vanish silently are
noticed after the ranks' timeout; if exactly half of the ranks are left, they continue only if they
include the lowest rank.

Restarts (--max-restarts): all ranks start again after a failure. This program's commands then continue
from their last checkpoint in --checkpoint-dir; other programs find TORCHELASTIC_RESTART_COUNT in their
environment.

Several machines (--nnodes): start it on each machine with the same options except --node-rank. The
launchers meet at --master-addr and act as one. A launcher that stops responding is named after 30 s;
once the ranks have ended elsewhere, the job ends after --timeout. If --master-addr is not on loopback
the launchers need the same secret on each machine: 64 hexadecimal digits in GIRANDOLE_SECRET, or in a
file of mode 0600 that GIRANDOLE_SECRET_FILE names.

Environment of a rank: the variables of torchrun (RANK, LOCAL_RANK, NODE_RANK, GROUP_RANK, ROLE_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_*); OMP_NUM_THREADS=1 if there
are several ranks, and PYTHONUNBUFFERED=1, unless they are set; and the job's secret. This program's
commands join as that rank. Standard input of a rank is empty.

Options may have underscores, as torchrun's (--nproc_per_node). Those that are not given are taken from
PET_NNODES, PET_NODE_RANK and so on, as torchrun does and Kubeflow sets them (PET_MASTER_ADDR only with
several machines).

  girandole launch --nproc-per-node 2 -- girandole ddp-linear
  girandole launch --nproc-per-node 4 --max-restarts 3 -- python train.py --epochs 3
  girandole launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- girandole ddp-linear")]
pub struct LaunchOptions {
    /// Ranks to start on this machine [default: 1]
    ///
    /// A number, gpu (one per GPU), cpu (one per core) or auto (gpu if there are any, else cpu).
    #[arg(long, alias = "nproc_per_node", value_name = "N|gpu|cpu|auto", allow_negative_numbers = true)]
    nproc_per_node: Option<ProcessCount>,
    /// Machines, each with its own launcher and equally many ranks [default: 1]
    #[arg(long, value_name = "N", value_parser = nodes)]
    nnodes: Option<usize>,
    /// Number of this machine, from 0
    #[arg(long, alias = "node_rank", value_name = "R", value_parser = whole)]
    node_rank: Option<usize>,
    /// Address of node 0, where the ranks meet [default: 127.0.0.1]
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    master_addr: Option<String>,
    /// Port there, also of the launchers [default: a free one; 29500 on several nodes]
    #[arg(long, alias = "master_port", value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// How often to restart all ranks after one failed [default: 0]
    #[arg(long, alias = "max_restarts", value_name = "K", value_parser = whole)]
    max_restarts: Option<usize>,
    /// Continue when ranks are lost, as long as MIN are left
    ///
    /// MIN and MAX count the ranks of all machines. At most MAX ranks may be started.
    #[arg(long, value_name = "MIN:MAX", allow_negative_numbers = true)]
    elastic: Option<ElasticRanks>,
    /// Folder for the output of each rank
    ///
    /// The files are DIR/RUN/attempt_N/RANK/stdout.log and stderr.log.
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    pub(super) log_dir: Option<PathBuf>,
    /// With --log-dir: also print it; 1 standard output, 2 standard error, 3 both
    #[arg(long, value_name = "1|2|3", num_args = 0..=1, default_missing_value = "3", requires = "log_dir", allow_negative_numbers = true)]
    pub(super) tee: Option<Tee>,
    /// How long the launchers of several nodes wait for each other [default: 300]
    ///
    /// They wait so long for all to connect, and at the end for one that is silent.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) timeout: Option<Duration>,
    /// How long ranks may take to end after a signal [default: 30]
    ///
    /// Then they are killed. SIGINT, SIGTERM and SIGHUP are passed on to the ranks. A second one kills them at
    /// once, but not the same one within a second, which is the same wish (GNU timeout sends its signal twice).
    /// After a failure the other ranks get SIGTERM, and as much time.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) grace: Option<Duration>,
    /// Name of the ranks' role, for programs that read ROLE_NAME [default: default]
    #[arg(long, value_name = "NAME")]
    pub(super) role: Option<String>,
    /// Show the output of these local ranks only, such as 0,1
    ///
    /// With --log-dir, the files have that of all.
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", value_delimiter = ',', value_parser = whole)]
    pub(super) local_ranks_filter: Option<Vec<usize>>,
    #[command(flatten)]
    pub(super) transport: TransportOption,
    /// Program that each rank runs, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(super) command: Vec<OsString>,
}

/// Parses a number of nodes; a `torchrun` range MIN:MAX is accepted if both are equal.
fn nodes(text: &str) -> std::result::Result<usize, String> {
    let number = |text: &str| text.parse().ok().filter(|&nodes: &usize| nodes > 0);
    let count = match text.split_once(':') {
        Some((least, most)) if number(least) != number(most) => {
            return Err(format!(
                "all nodes are there from the beginning: give one number; --elastic lets a job go on when some are lost \
                 (its MIN:MAX counts ranks: those of {least} and of {most} nodes)"
            ));
        }
        Some((least, _)) => number(least),
        None => number(text),
    };
    count.ok_or_else(|| "give a whole number, 1 or more".into())
}

impl LaunchOptions {
    pub(super) fn nproc_per_node(&self, pet: &Pet) -> Result<ProcessCount> {
        let given =
            self.nproc_per_node.map_or_else(|| pet.parse("PET_NPROC_PER_NODE"), |given| Ok(Some(given)))?;
        Ok(given.unwrap_or(ProcessCount::Number(1)))
    }

    /// Returns the number of nodes, and the index of this one.
    pub(super) fn nodes(&self, pet: &Pet) -> Result<(usize, usize)> {
        let count =
            self.nnodes.map_or_else(|| pet.parse_with("PET_NNODES", nodes), |given| Ok(Some(given)))?;
        let count = count.unwrap_or(1);
        let (given, option) = match self.node_rank {
            Some(rank) => (Some(rank), "--node-rank"),
            None => (pet.parse_with("PET_NODE_RANK", whole)?, "PET_NODE_RANK"),
        };
        let help =
            || format!("with {count} {}, give 0 to {}", if count == 1 { "node" } else { "nodes" }, count - 1);
        match given {
            Some(rank) if rank < count => Ok((count, rank)),
            Some(rank) => Err(Error::invalid(option, rank, help())),
            None if count == 1 => Ok((1, 0)),
            None => Err(Error::invalid("--node-rank", "nothing", help())),
        }
    }

    pub(super) fn max_restarts(&self, pet: &Pet) -> Result<usize> {
        let given = self
            .max_restarts
            .map_or_else(|| pet.parse_with("PET_MAX_RESTARTS", whole), |given| Ok(Some(given)));
        Ok(given?.unwrap_or(0))
    }

    /// Returns the elastic settings of a job with `world_size` ranks.
    pub(super) fn elastic(&self, world_size: usize) -> Result<Option<ElasticJob>> {
        let Some(elastic) = self.elastic else { return Ok(None) };
        elastic.check(world_size).map_err(|help| Error::invalid("--elastic", elastic, help))?;
        Ok(Some(elastic.job()))
    }

    pub(super) fn master_addr(&self, pet: &Pet, nodes: usize) -> Result<Option<String>> {
        // With a single node, the address of another launcher is not needed.
        match &self.master_addr {
            None if nodes > 1 => pet.text("PET_MASTER_ADDR"),
            given => Ok(given.clone()),
        }
    }

    pub(super) fn master_port(&self, pet: &Pet) -> Result<Option<u16>> {
        let port = |text: &str| {
            text.parse().ok().filter(|&port: &u16| port > 0).ok_or("give 1 to 65535".to_string())
        };
        self.master_port.map_or_else(|| pet.parse_with("PET_MASTER_PORT", port), |given| Ok(Some(given)))
    }
}

impl LaunchOptions {
    /// Returns `--tls`, or else the environment's setting, as for ranks.
    pub(super) fn tls(&self) -> Result<Tls> {
        let value = std::env::var("GIRANDOLE_TLS").ok().filter(|value| !value.is_empty());
        let wrong = |got: &String| Error::invalid("GIRANDOLE_TLS", got, "give off, hosts or all");
        let told = value.map(|value| value.trim().parse().map_err(|_| wrong(&value))).transpose()?;
        Ok(self.transport.tls.or(told).unwrap_or_default())
    }
}

fn whole(text: &str) -> std::result::Result<usize, String> {
    text.parse().map_err(|_| "give a whole number, 0 or more".to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        options: LaunchOptions,
    }

    #[test]
    fn what_is_no_number_is_refused_with_what_to_give() {
        for option in ["--node-rank", "--max-restarts"] {
            for got in ["x", "-1"] {
                let said = Program::try_parse_from(["launch", option, got, "true"]).unwrap_err().to_string();
                assert!(said.contains(option) && said.contains("give a whole number, 0 or more"), "{said}");
            }
        }
        let parsed = Program::try_parse_from(["launch", "--max-restarts", "0", "true"]).unwrap();
        assert_eq!(parsed.options.max_restarts, Some(0));
    }
}
