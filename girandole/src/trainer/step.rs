//! One training step.

use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;
use training::build::Model;
use training::{LossScaler, OnMissingGradient, clip_factor};

use super::{StepReport, Trainer};
use crate::{Error, Result, Step};

/// The time of a check of gradients, which is not the step's.
#[derive(Debug, Default)]
struct CheckTime {
    seconds: f64,
    busy_ns: u64,
    waited_ns: u64,
}

impl<M: Model> Trainer<'_, M> {
    /// Computes the next step. Batches without targets are skipped, unless there are no others.
    pub(super) fn train_step(&mut self) -> Result<StepReport> {
        let mut left_out = 0;
        loop {
            let (before, buffers) = (self.batches.state(), self.kept_buffers()?);
            let loss_scale = self.model.loss_scaler().map(LossScaler::state);
            match self.step_once() {
                Err(Error::NoTargets) if left_out < self.batches.data.rows() => {
                    left_out += self.config.batch_size;
                }
                Err(error) => {
                    // When a rank is lost, the same rows are used again.
                    if error.loss().is_some() {
                        self.batches.resume(&before)?;
                        buffers.iter().try_for_each(|(var, value)| var.set(value))?;
                        self.model.resume_loss_scale(loss_scale);
                    }
                    return Err(error);
                }
                report => return report,
            }
        }
    }

    /// Copies the running statistics, because a step may be repeated and its forward changes them. Empty in runs that
    /// are not elastic.
    fn kept_buffers(&self) -> Result<Vec<(Var, Tensor)>> {
        if self.config.fewest_ranks.is_none() {
            return Ok(Vec::new());
        }
        let kept = |(_, var): (String, Var)| Ok((var.clone(), var.as_detached_tensor().copy()?));
        self.model.buffers().into_iter().map(kept).collect()
    }

    fn step_once(&mut self) -> Result<StepReport> {
        let (epoch, before) = (self.batches.epoch(), self.model.stats());
        let batch = self.batches.next(&**self.model.data_ranks(), &self.model.config().device)?;
        let batch = batch.map_err(Error::from);
        let loss_scale = self.model.loss_scaler().map_or(1.0, LossScaler::factor);
        self.model.set_next_step(self.done.step as u64);
        let checked = batch.as_ref().ok().cloned().filter(|_| self.done.step == 0);
        let step = tracing::info_span!("forward and backward").in_scope(|| self.model.step_of(batch))?;
        let check = match checked {
            Some(batch) => {
                tracing::info_span!("gradient check").in_scope(|| self.check_gradient(&batch, &step))?
            }
            None => CheckTime::default(),
        };
        let factor = self.config.schedule.factor(self.done.step, self.config.steps);
        let learning_rate = self.config.learning_rate * factor;
        let grad_norm = match step.skipped {
            true => self.skip(step.loss, loss_scale)?,
            false => self.change(&step.grads, learning_rate)?,
        };
        self.done.step += 1;
        let stats = self.model.stats();
        let seconds =
            |after: u64, before: u64, check: u64| after.saturating_sub(before + check) as f64 * 1e-9;
        Ok(StepReport {
            step: self.done.step,
            epoch,
            loss: step.loss,
            grad_norm,
            loss_scale,
            skipped: step.skipped,
            learning_rate,
            targets: step.targets,
            // The run adds the time since the last step.
            seconds: -check.seconds,
            communication_seconds: seconds(stats.busy_ns, before.busy_ns, check.busy_ns),
            waiting_seconds: seconds(stats.waited_ns, before.waited_ns, check.waited_ns),
        })
    }

    /// Checks the gradients of the first step of a new run, where it costs little.
    fn check_gradient(&mut self, (input, targets): &(Tensor, Tensor), step: &Step) -> Result<CheckTime> {
        let (began, before) = (Instant::now(), self.model.stats());
        let (config, ranks) = (&self.config.gradient_check, self.model.data_ranks().world_size());
        // In 16 bits nothing could be told apart from rounding.
        let is_wide = matches!(self.model.config().dtype, DType::F32 | DType::F64);
        if config.on_lost == OnMissingGradient::Ignore || step.skipped || !is_wide {
            return Ok(CheckTime::default());
        }
        let work = self.model.parameter_count()? as u64 * (step.targets / ranks) as u64;
        if work > self.config.gradient_check_work {
            tracing::debug!("gradients are not checked: {work} multiplications a pass are too many");
            return Ok(CheckTime::default());
        }
        let check = self.model.check_gradient(input, targets, step, config)?;
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

    /// Makes one optimizer step, and returns the norm of all gradients.
    fn change(&mut self, grads: &GradStore, learning_rate: f64) -> Result<f64> {
        self.optimizer.set_learning_rate(learning_rate);
        let norm = self.model.grad_norm(grads)?;
        self.model.check_finite(grads, norm, self.done.step as u64 + 1)?;
        let scale = self.config.clip.map_or(Ok(1.0), |clip| clip_factor(norm, clip))?;
        self.wait_for_copies();
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step_scaled(grads, scale))?;
        self.reserve_copies()?;
        Ok(norm)
    }

    /// Accepts a step whose gradients were not finite, and returns the norm. Fails if the loss scale cannot be the
    /// reason: it is too small, or the loss, which is not scaled, is not finite either. A single such loss may be due
    /// to its batch; after two, it is the model.
    fn skip(&self, loss: f64, loss_scale: f64) -> Result<f64> {
        /// With this scale, a value that overflows f16 is 16 million or more without the scale.
        const LEAST: f64 = 1.0 / 256.0;
        let parameter = if loss_scale < LEAST {
            format!("the gradients of a loss that is scaled by {loss_scale}")
        } else if !loss.is_finite() && self.done.latest.is_some_and(|latest| !latest.loss.is_finite()) {
            format!("the loss, which is {loss} and was not finite in the step before")
        } else {
            return Ok(f64::INFINITY);
        };
        Err(Error::NotFinite { step: self.done.step as u64 + 1, parameter, norm: f64::INFINITY })
    }
}
