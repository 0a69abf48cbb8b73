//! A sampler of your own: `cargo run --release -p girandole --example own_sampler -- 2`
//!
//! Rows of different lengths are padded to the longest one of their batch. This sampler puts rows of similar length into one batch, so
//! that there is little padding. The order of batches changes from epoch to epoch, and each rank takes every `world_size`-th batch.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use girandole::comm::Communicator;
use girandole::launch::{self, RankContext};
use girandole::sampler::{
    BoxError, DataLoader, DataLoaderConfig, Generator, Indices, Sampler, SamplerError, SequentialSampler,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BATCH: usize = 4;

struct ByLength {
    /// Rows, from short to long.
    sorted: Vec<usize>,
    rank: usize,
    ranks: usize,
    epoch: u64,
}

impl Sampler for ByLength {
    /// Every rank gets equally many batches: a last, incomplete round is left out.
    fn len(&self) -> usize {
        self.sorted.len() / (BATCH * self.ranks) * BATCH
    }

    fn indices(&mut self) -> std::result::Result<Indices, SamplerError> {
        // All ranks draw the same order.
        let order = Generator::new(self.epoch).randperm(self.sorted.len() / BATCH)?;
        let own = order.into_iter().skip(self.rank).step_by(self.ranks).take(self.len() / BATCH);
        let sorted = self.sorted.clone();
        Ok(Box::new(own.flat_map(move |batch| sorted[batch * BATCH..][..BATCH].to_vec())))
    }

    fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }
}

/// Pads all rows with 0 to the longest length.
fn pad(rows: Vec<Vec<u32>>) -> std::result::Result<Tensor, BoxError> {
    let (count, len) = (rows.len(), rows.iter().map(Vec::len).max().unwrap_or(0));
    let padded = rows.into_iter().flat_map(|row| row.into_iter().chain([0].repeat(len)).take(len));
    Ok(Tensor::from_vec(padded.collect(), (count, len), &Device::Cpu)?)
}

fn show(rank: RankContext) -> Result<()> {
    let comm = rank.connect()?;
    let rows: Arc<Vec<Vec<u32>>> =
        Arc::new((1..=32).map(|row| vec![row; 3 + row as usize * 7 % 29]).collect());
    let mut sorted: Vec<usize> = (0..rows.len()).collect();
    sorted.sort_by_key(|&row| rows[row].len());
    let sampler = ByLength { sorted, rank: comm.rank(), ranks: comm.world_size(), epoch: 0 };
    let config = DataLoaderConfig { batch_size: BATCH, ..Default::default() };
    let mut loader = DataLoader::new(rows.clone(), sampler, pad, config.clone())?;
    for epoch in 0..2 {
        loader.set_epoch(epoch);
        for batch in loader.batches()? {
            println!("rank {}: epoch {epoch}, {:?}", comm.rank(), batch?.to_vec2::<u32>()?);
        }
    }
    let mut plain = DataLoader::new(rows.clone(), SequentialSampler::new(rows.len()), pad, config)?;
    let numbers: usize = plain.batches()?.map(|batch| batch.map_or(0, |batch| batch.elem_count())).sum();
    println!("rank {}: in the order of the data set all batches have {numbers} numbers", comm.rank());
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, show)
}
