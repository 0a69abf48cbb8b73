//! The training loop of the from-scratch tutorial, for one process and for a rank.

use candle_core::Tensor;

use crate::error::Result;
use crate::python::Fixed;
use crate::run_log::RunLog;

use super::data::{Batch, Loader};

/// The tutorial prints the mean loss of this many batches.
const PRINT_EVERY: usize = 100;

/// Trains. `step` takes a step on a batch and gives its loss; the rank that prints has a log.
pub(super) fn train(
    loader: &mut Loader,
    epochs: usize,
    mut log: Option<&mut RunLog<'_>>,
    mut step: impl FnMut(&Batch) -> Result<Tensor>,
) -> Result<()> {
    for epoch in 0..epochs {
        loader.set_epoch(epoch as u64);
        let mut running = 0.0;
        for (batch, loaded) in loader.batches()?.enumerate() {
            let loss = step(&loaded?)?.to_scalar::<f32>()?;
            let Some(log) = log.as_deref_mut() else { continue };
            log.step(epoch, batch, loss)?;
            running += f64::from(loss);
            if (batch + 1).is_multiple_of(PRINT_EVERY) {
                let mean = Fixed::<5>(running / PRINT_EVERY as f64);
                log.say(format_args!("[{}, {}] loss: {mean}", epoch + 1, batch + 1))?;
                running = 0.0;
            }
        }
    }
    Ok(())
}
