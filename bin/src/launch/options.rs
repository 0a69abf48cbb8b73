//! The options of `launch`, and what stands in for those that are not given.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use comm::Tls;
use launch::ElasticJob;

use crate::error::{Error, Result};
use crate::options::{TransportOption, seconds};
use crate::trainer::ElasticRanks;

use super::nproc::ProcessCount;
use super::pet::Pet;
use super::tee::Tee;

/// Options of `launch`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Starts --nproc-per-node copies of PROGRAM, each a rank of one job, forwards what they print line by line, and ends all of \
them when one fails, when it is stopped by a signal, and when it is killed itself. The last line names the first cause; \
the exit code is 0, or that of the first rank that failed (128 + the signal where one ended it; 1 for 75, with which a rank says that another one \
is at fault).

With --elastic MIN:MAX a rank that fails once all have met is lost, and the others go on as long as MIN are left, if PROGRAM \
can: ddp-transformer does, and so do programs on the crate comm that shrink their group; this program's other commands end as \
without it, and whatever does not join through comm does, too. With fewer the job ends, and --max-restarts applies. On \
several machines give it to each launcher. A machine other than node 0's may be lost with its launcher, or leave when a signal \
stops that; where one is gone there is no restart. Ranks of node 0 may be lost as well, but with its launcher or machine the job \
ends. Machines that vanish without a word are missed after the ranks' time-out, and half of the ranks go on only if the lowest \
is among them. Lost ranks are not replaced. The job is done when all ranks that are left are, however long one takes; a rank that \
stands still and was left behind is then ended, and named in a warning.

With --max-restarts all ranks start again after a failure. This program's commands then go on from their last checkpoint \
in --checkpoint-dir; other programs find TORCHELASTIC_RESTART_COUNT in their environment.

On several machines it is started on each, with the same options but for --node-rank; the launchers meet at --master-addr \
and act as one. One that stands still is named after 30 s; once the ranks have ended elsewhere the job ends after --timeout. Off loopback they need a secret, the same on each: 64 hexadecimal digits in GIRANDOLE_SECRET, or in a file of \
mode 0600 that GIRANDOLE_SECRET_FILE names.

A rank finds in its environment what torchrun tells it: RANK, LOCAL_RANK, NODE_RANK, GROUP_RANK, ROLE_RANK, WORLD_SIZE, \
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_*; OMP_NUM_THREADS=1 where it is not set and there are several \
ranks; PYTHONUNBUFFERED=1 where it is not set; and the job's secret. Its standard input is empty: that of launch is not passed on. \
The commands of this program join as that rank. Options \
that are not given are taken from PET_NNODES, PET_NODE_RANK and so on, as torchrun does and Kubeflow sets them (PET_MASTER_ADDR \
with several machines only).

  girandole launch --nproc-per-node 2 -- girandole ddp-linear
  girandole launch --nproc-per-node 4 --max-restarts 3 -- python train.py --epochs 3
  girandole launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 4 -- girandole ddp-transformer")]
pub struct LaunchOptions {
    /// Ranks to start here: a number, gpu (one for each GPU), cpu (one for each core), auto (gpu where there are some, else
    /// cpu) [default: 1]
    #[arg(
        long,
        visible_alias = "nproc_per_node",
        value_name = "N|gpu|cpu|auto",
        allow_negative_numbers = true
    )]
    nproc_per_node: Option<ProcessCount>,
    /// Machines, each with a launcher of its own and as many ranks [default: 1]
    #[arg(long, value_name = "N", value_parser = nodes, allow_negative_numbers = true)]
    nnodes: Option<usize>,
    /// This machine's number among them, from 0
    #[arg(long, visible_alias = "node_rank", value_name = "R", allow_negative_numbers = true)]
    node_rank: Option<usize>,
    /// The address at which the ranks meet, one of node 0 [default: 127.0.0.1]
    #[arg(long, visible_alias = "master_addr", value_name = "HOST")]
    master_addr: Option<String>,
    /// Its port; on several nodes the launchers meet there [default: one that is free; on several nodes 29500]
    #[arg(
        long,
        visible_alias = "master_port",
        value_name = "PORT",
        value_parser = clap::value_parser!(u16).range(1..),
        allow_negative_numbers = true
    )]
    master_port: Option<u16>,
    /// How often all ranks start again after one has failed [default: 0]
    #[arg(long, visible_alias = "max_restarts", value_name = "K", allow_negative_numbers = true)]
    max_restarts: Option<usize>,
    /// Go on as long as MIN ranks are left when some are lost, of those of all machines, which are MAX at most
    #[arg(long, value_name = "MIN:MAX", allow_negative_numbers = true)]
    elastic: Option<ElasticRanks>,
    /// Keep what each rank prints in DIR/RUN/attempt_N/RANK/stdout.log and stderr.log
    #[arg(long, visible_alias = "log_dir", value_name = "DIR")]
    pub(super) log_dir: Option<PathBuf>,
    /// With --log-dir: show it, too; 1 standard output, 2 standard error, 3 both
    #[arg(
        long,
        value_name = "1|2|3",
        num_args = 0..=1,
        default_missing_value = "3",
        requires = "log_dir",
        allow_negative_numbers = true
    )]
    pub(super) tee: Option<Tee>,
    /// How long the launchers of several nodes wait for each other: for all to come, and in the end for one that is silent
    /// [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(super) timeout: Option<Duration>,
    #[command(flatten)]
    pub(super) transport: TransportOption,
    /// The program that each rank runs, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(super) command: Vec<OsString>,
}

/// A number of nodes; `torchrun` takes a range, too.
fn nodes(text: &str) -> std::result::Result<usize, String> {
    let number = |text: &str| text.parse().ok().filter(|&nodes: &usize| nodes > 0);
    let count = match text.split_once(':') {
        Some((least, most)) if number(least) != number(most) => {
            return Err("all nodes are there from the beginning: give one number; --elastic lets a job go on when some are lost".into());
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

    /// How many nodes there are, and which one this is.
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
            Some(rank) => Err(Error::Option { option, got: rank.to_string(), help: help() }),
            None if count == 1 => Ok((1, 0)),
            None => Err(Error::Option { option: "--node-rank", got: "nothing".into(), help: help() }),
        }
    }

    pub(super) fn max_restarts(&self, pet: &Pet) -> Result<usize> {
        let given = self
            .max_restarts
            .map_or_else(|| pet.parse_with("PET_MAX_RESTARTS", whole), |given| Ok(Some(given)));
        Ok(given?.unwrap_or(0))
    }

    /// How a job of so many ranks goes on without some of them.
    pub(super) fn elastic(&self, world_size: usize) -> Result<Option<ElasticJob>> {
        let Some(elastic) = self.elastic else { return Ok(None) };
        elastic.check(world_size)?;
        Ok(Some(elastic.job()))
    }

    pub(super) fn master_addr(&self, pet: &Pet, nodes: usize) -> Result<Option<String>> {
        // On one node there is nobody else to find.
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
    /// `--tls`, else what the environment says, as it is with ranks.
    pub(super) fn tls(&self) -> Result<Tls> {
        let value = std::env::var("GIRANDOLE_TLS").ok().filter(|value| !value.is_empty());
        let wrong = |got: &String| Error::Option {
            option: "GIRANDOLE_TLS",
            got: got.clone(),
            help: "give off, hosts or all".into(),
        };
        let told = value.map(|value| value.trim().parse().map_err(|_| wrong(&value))).transpose()?;
        Ok(self.transport.tls.or(told).unwrap_or_default())
    }
}

fn whole(text: &str) -> std::result::Result<usize, String> {
    text.parse().map_err(|_| "give a whole number, 0 or more".to_string())
}
