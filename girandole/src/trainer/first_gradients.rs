//! Checks the gradients of the first step of a run.

use std::time::Instant;

use candle_core::DType;
use ops::Precision;
use training::OnMissingGradient;
use training::build::Model;

use super::Trainer;
use crate::{Batch, Parallel, Result, Step};

/// The time of a check of gradients, which is not the step's.
#[derive(Debug, Default)]
pub(super) struct CheckTime {
    pub(super) seconds: f64,
    pub(super) busy_ns: u64,
    pub(super) waited_ns: u64,
}

impl<M: Model> Trainer<'_, M> {
    /// Checks the gradients of the first step of a new run, where it costs little: those that `in_f32` computes of it once more, if its
    /// products are in 16 bits.
    pub(super) fn check_first_gradients(
        &mut self,
        batch: &Batch,
        step: &Step,
        in_f32: impl FnOnce(&mut Parallel<M>) -> Result<Step>,
    ) -> Result<CheckTime> {
        let (began, before) = (Instant::now(), self.model.stats());
        let config = &self.config.gradient_check;
        // In 16 bits nothing could be told apart from rounding.
        let is_wide = matches!(self.model.config().dtype, DType::F32 | DType::F64);
        if config.on_lost == OnMissingGradient::Ignore || step.skipped || !is_wide {
            return Ok(CheckTime::default());
        }
        // By places, since targets may be documents or pairs.
        let work = self.model.parameter_count()? as u64 * batch.input.elem_count() as u64;
        if work > self.config.gradient_check_work {
            tracing::debug!("gradients are not checked: {work} multiplications a pass are too many");
            return Ok(CheckTime::default());
        }
        let check = match Precision::of_scope() {
            Precision::Bf16 => {
                let step = in_f32(self.model)?;
                self.model.check_gradient(batch, &step, config)?
            }
            _ => self.model.check_gradient(batch, step, config)?,
        };
        tracing::debug!(
            "gradients of {} parameters checked in {} forward passes; undecided: {:?}",
            check.parameters,
            check.forward_passes,
            check.undecided
        );
        let after = self.model.stats();
        Ok(CheckTime {
            seconds: began.elapsed().as_secs_f64(),
            busy_ns: after.busy_ns.saturating_sub(before.busy_ns),
            waited_ns: after.waited_ns.saturating_sub(before.waited_ns),
        })
    }
}
