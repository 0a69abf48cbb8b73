//! Batches of `fsdp-mlp`: generated for each step, or read from a file.

use std::collections::VecDeque;

use candle_core::{Device, Tensor};
use cli::prelude::*;
use cli::trainer::{self, Position, Source};
use sampler::{DistributedSampler, Generator, Sampler};
use serde_json::Value;
use training::TensorFile;

use super::model::CLASSES;
use super::options::FsdpMlpOptions;

/// Samples from a file.
#[derive(Debug, Clone)]
pub(super) struct Samples {
    x: Tensor,
    y: Tensor,
}

impl Samples {
    pub(super) fn read(file: &TensorFile, features: usize) -> Result<Self> {
        file.only(&["x", "y"])?;
        let x = file.samples("x", features, &Device::Cpu)?;
        let y = Tensor::new(file.classes("y", x.dim(0)?, CLASSES)?, &Device::Cpu)?;
        Ok(Self { x, y })
    }
}

/// This rank's stream of batches, without epochs.
#[derive(Clone)]
pub(super) struct Batches {
    origin: Origin,
    batch_size: usize,
    steps: usize,
    device: Device,
}

#[derive(Clone)]
enum Origin {
    Drawn { generator: Box<Generator>, features: usize },
    Read { samples: Samples, sampler: DistributedSampler, epoch: u64, left: VecDeque<u32> },
}

impl Source for Batches {
    type Batch = (Tensor, Tensor);

    fn remaining(&self, at: Position) -> usize {
        self.steps.saturating_sub(at.step)
    }

    fn batches(&mut self, at: Position) -> Result<trainer::Batches<(Tensor, Tensor)>> {
        let mut all = self.clone();
        Ok(Box::new((at.step..self.steps).map(move |_| all.next())))
    }

    /// Skips the batches of completed steps by generating them again.
    fn resume(&mut self, _: &Value, at: Position) -> Result<()> {
        (0..at.step).try_for_each(|_| self.next().map(drop))
    }

    fn changed(&self, then: usize) -> String {
        format!("; it was made with world size {then}, so the data are others from here on")
    }
}

impl Batches {
    pub(super) fn new(options: &FsdpMlpOptions, samples: Option<Samples>, rank: &Rank) -> Result<Self> {
        let origin = match samples {
            Some(samples) => {
                let sampler = rank.sampler(samples.x.dim(0)?, true)?;
                Origin::Read { samples, sampler, epoch: 0, left: VecDeque::new() }
            }
            None => {
                let seed = options.common.seed.wrapping_add(rank.comm.rank() as u64);
                Origin::Drawn { generator: Box::new(Generator::new(seed)), features: options.features }
            }
        };
        let &FsdpMlpOptions { batch_size, steps, .. } = options;
        Ok(Self { origin, batch_size, steps, device: options.common.device()? })
    }

    /// Returns the next batch: features and classes.
    pub(super) fn next(&mut self) -> Result<(Tensor, Tensor)> {
        let (x, y) = self.on_host()?;
        Ok((x.to_device(&self.device)?, y.to_device(&self.device)?))
    }

    fn on_host(&mut self) -> Result<(Tensor, Tensor)> {
        let len = self.batch_size;
        match &mut self.origin {
            Origin::Drawn { generator, features } => {
                let x = generator.randn(len.saturating_mul(*features))?;
                let y = generator.randint(len, 0, CLASSES as i64)?;
                let y: Vec<u32> = y.into_iter().map(|class| class as u32).collect();
                Ok((Tensor::from_vec(x, (len, *features), &Device::Cpu)?, Tensor::new(y, &Device::Cpu)?))
            }
            Origin::Read { samples, sampler, epoch, left } => {
                if left.is_empty() {
                    sampler.set_epoch(*epoch);
                    left.extend(sampler.iter()?.map(|index| index as u32));
                    *epoch += 1;
                }
                let indices: Vec<u32> = left.drain(..len.min(left.len())).collect();
                let indices = Tensor::new(indices, &Device::Cpu)?;
                Ok((samples.x.index_select(&indices, 0)?, samples.y.index_select(&indices, 0)?))
            }
        }
    }
}
