//! A data set of your own: `cargo run --release -p girandole --example own_data -- 2`
//!
//! Each rank gets its own rows, in an order that changes from epoch to epoch. A later run can resume in the middle of an epoch.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use girandole::comm::Communicator;
use girandole::launch::{self, RankContext};
use girandole::sampler::{
    BoxError, DataLoader, DataLoaderConfig, Dataset, DistributedSampler, DistributedSamplerConfig,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Numbers and their squares, as if each was read from a file.
struct Squares(usize);

impl Dataset for Squares {
    type Item = (usize, usize);

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> std::result::Result<Self::Item, BoxError> {
        Ok((index, index * index))
    }
}

fn show(rank: RankContext) -> Result<()> {
    let comm = rank.connect()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of =
        |rank| DistributedSamplerConfig { dataset_len: 12, num_replicas: ranks, rank, ..Default::default() };
    let sampler = DistributedSampler::new(of(rank))?;
    // Another thread makes the next batches while this one trains.
    let config = DataLoaderConfig { batch_size: 3, num_workers: 1, ..Default::default() };
    let mut loader = DataLoader::new(Arc::new(Squares(12)), sampler, Ok, config)?;
    for epoch in 0..2 {
        loader.set_epoch(epoch);
        for batch in loader.batches()? {
            println!("rank {rank}: epoch {epoch}, {:?}", batch?);
        }
    }

    // A checkpoint after 2 samples of this rank, and another run that resumes there.
    let before = DistributedSampler::new(of(rank))?;
    let state = before.state(2);
    let mut after = DistributedSampler::new(of(rank))?;
    after.resume(&state)?;
    let (all, left): (Vec<usize>, Vec<usize>) = (before.iter()?.collect(), after.iter()?.collect());
    assert_eq!(all[2..], left);
    println!("rank {rank}: after a break {left:?}");
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, show)
}
