//! The training loop of document 002, for one process and for a rank.

use std::time::Instant;

use candle_core::Tensor;

use crate::console::say;
use crate::error::Result;
use crate::metrics::{MetricsWriter, Summary};

use super::data::{Batch, Loader};

/// The document prints the mean loss of this many batches.
const PRINT_EVERY: usize = 100;

/// Where the losses of a run go.
pub(super) struct Log<'a> {
    /// `single` or `ddp`.
    pub(super) run: &'static str,
    /// False on all ranks but one.
    pub(super) prints: bool,
    pub(super) metrics: Option<&'a mut MetricsWriter>,
    pub(super) losses: Vec<f32>,
    running: f64,
}

impl<'a> Log<'a> {
    pub(super) fn new(run: &'static str, prints: bool, metrics: Option<&'a mut MetricsWriter>) -> Self {
        Self { run, prints, metrics, losses: Vec::new(), running: 0.0 }
    }

    fn step(&mut self, epoch: usize, batch: usize, loss: f32) -> Result<()> {
        if !self.prints {
            return Ok(());
        }
        self.losses.push(loss);
        if let Some(metrics) = &mut self.metrics {
            metrics.step(Some(self.run), epoch, batch, loss)?;
        }
        self.running += f64::from(loss);
        if (batch + 1).is_multiple_of(PRINT_EVERY) {
            let mean = self.running / PRINT_EVERY as f64;
            say(format_args!("[{}, {}] loss: {mean:.5}", epoch + 1, batch + 1))?;
            self.running = 0.0;
        }
        Ok(())
    }

    pub(super) fn summary(&mut self, seconds: f64, world_size: usize, peak_rss_bytes: &[u64]) -> Result<()> {
        if let Some(metrics) = &mut self.metrics {
            metrics.summary(&Summary { run: Some(self.run), seconds, world_size, peak_rss_bytes })?;
        }
        Ok(())
    }
}

/// Trains; the seconds that it took. `step` takes a step on a batch and gives its loss.
pub(super) fn train(
    loader: &mut Loader,
    epochs: usize,
    log: &mut Log<'_>,
    mut step: impl FnMut(&Batch) -> Result<Tensor>,
) -> Result<f64> {
    let began = Instant::now();
    for epoch in 0..epochs {
        loader.set_epoch(epoch as u64);
        log.running = 0.0;
        for (batch, loaded) in loader.batches()?.enumerate() {
            let loss = step(&loaded?)?.to_scalar::<f32>()?;
            log.step(epoch, batch, loss)?;
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
