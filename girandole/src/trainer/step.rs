//! **The heart: a training step from top to bottom.** Start reading the crate here; all other files are what this one names.
//!
//! | part of a step | here | where it is done |
//! | --- | --- | --- |
//! | rows of this rank, and the batch: read ahead, in the order of the run | [`Trainer::step_once`] | `data.rs`, `sampler::RunLoader` |
//! | with `cp`: the places of its rows that this rank has | | `parallel/axes.rs` (`part_of`), `context-parallel/src/places.rs` |
//! | micro-batches, and the divisor of the loss: the targets of all ranks | [`Parallel::forward_backward`] | `parallel/micro_batches.rs` (`prepare`) |
//! | documents, places and random keys of rows: of the thread, for attention and dropout to find | | `ops/src/rows`, [`ops::RowContext`] |
//! | forward and backward in the layout | | the model; with `pp` `parallel/stages.rs`, `pipeline/src/executor.rs` |
//! | who averages with whom | | `parallel/axes.rs` (`averaged_over`, `same_shard`), `parallel/build.rs` |
//! | averaging of gradients, while backward runs | | `dp`: `ddp/src/reducer`; `shard`: `fsdp/src/core/reduce.rs`; `pp`: `pipeline/src/average.rs`; `pp` and `shard`: `parallel/flat_shards.rs` |
//! | sums of gradients over `tp`, which averages nothing | | `tensor-parallel/src/shards.rs` |
//! | scaled losses (f16) | | `parallel/mod.rs`, `training::LossScaler` |
//! | check of the first gradients | [`Trainer::step_once`] | `first_gradients.rs` |
//! | norm over all ranks, clipping | [`Trainer::update`] | `strategy/src/norm.rs` |
//! | learning rate | [`Trainer::step_once`] | `learning_rate.rs` |
//! | optimizer | [`Trainer::update`] | `optimizer.rs`; `training::{Adam, Muon, Sgd}`, `strategy::OwnedMatrices` |
//! | corrections of experts' routers | [`Trainer::update`] | `parallel/balance.rs` |
//! | average of groups that train on their own (`far`, DiLoCo) | after the step: `rounds.rs` | `far/mod.rs` |
//! | report | [`Trainer::step_once`] | `observer.rs`; the commands write it as metrics: `cli/src/language/speed.rs`, `report/src/metrics` |
//!
//! Around it: the loop over steps, evaluations and checkpoints is in `trainer/mod.rs`; what happens when a rank is lost is in
//! `trainer/elastic`; how a model gets its parameters in a layout is in `parallel/build.rs`.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use ops::{Balance, Documents, Precision, Preferences, backward};
use strategy::DistributedModel;
use training::LossScaler;
use training::build::Model;
use training::internal::{GradSums, KeptVars, clip_factor};

use super::first_gradients::CheckTime;
use super::{StepReport, Trainer};
use crate::parallel::{Kind, MicroBatch, Prepared};
use crate::{Batch, Error, ExpertLoad, Parallel, Result, Step};

impl<M: Model> Trainer<'_, M> {
    /// Computes the next step. Batches without targets are left out, unless there are no others.
    pub(super) fn train_step(&mut self) -> Result<StepReport> {
        let mut left_out = 0;
        loop {
            let before = self.before_step()?;
            match self.step_once() {
                Err(Error::NoTargets) if left_out < self.batches.data.rows() => {
                    left_out += self.config.batch_size;
                }
                Err(error) if error.loss().is_some() => {
                    self.undo_step(&before)?;
                    return Err(error);
                }
                report => return report,
            }
        }
    }

    fn step_once(&mut self) -> Result<StepReport> {
        let (epoch, before) = (self.batches.epoch(), self.model.stats());
        let loss_scale = self.model.loss_scaler().map_or(1.0, LossScaler::factor);

        // This rank's rows of the next batch. Ranks along `pp` and `tp` have the same ones.
        let batch = self.batches.next(self.model.share_of_batch(), &self.model.config().device)?;
        // If they cannot be read here, the other ranks are told in the step.
        let batch = batch.map_err(Error::from);
        let first = batch.as_ref().ok().cloned().filter(|_| self.done.step == 0);

        // Forward and backward, in the model's layout; gradients are averaged over all ranks.
        self.model.set_next_step(self.done.step as u64);
        let step = tracing::info_span!("forward and backward").in_scope(|| self.model.step_of(batch))?;
        let check = match first {
            None => CheckTime::default(),
            Some(batch) => {
                let span = tracing::info_span!("gradient check");
                span.in_scope(|| {
                    self.check_first_gradients(&batch, &step, |model| model.step_in_f32(&batch))
                })?
            }
        };

        // Norm, clipping and optimizer.
        let factor = self.config.schedule.factor(self.done.step, self.config.steps);
        let learning_rate = self.config.learning_rate * factor;
        let grad_norm = match step.skipped {
            true => self.skip(step.loss, loss_scale)?,
            false => self.update(&step.grads, learning_rate)?,
        };
        self.done.step += 1;
        // Groups that train on their own (`far`) average after several steps, by the targets in these.
        let targets = if step.skipped { 0 } else { step.targets };
        self.optimizer.far().into_iter().for_each(|far| far.count(targets));

        let stats = self.model.stats();
        let seconds =
            |after: u64, before: u64, check: u64| after.saturating_sub(before + check) as f64 * 1e-9;
        Ok(StepReport {
            step: self.done.step,
            epoch,
            loss: step.loss,
            balance_loss: step.balance_loss,
            busiest_expert: self.model.expert_loads().iter().map(ExpertLoad::busiest).reduce(f64::max),
            grad_norm,
            loss_scale,
            skipped: step.skipped,
            learning_rate,
            targets: step.preferences.map_or(step.targets, |pairs| pairs.tokens) * self.model.layout().far,
            preferences: step.preferences,
            // The run adds the time since the last step.
            seconds: -check.seconds,
            communication_seconds: seconds(stats.busy_ns, before.busy_ns, check.busy_ns),
            waiting_seconds: seconds(stats.waited_ns, before.waited_ns, check.waited_ns),
        })
    }

    /// Changes the parameters by the gradients, and returns the norm of these over all ranks, before clipping.
    fn update(&mut self, grads: &GradStore, learning_rate: f64) -> Result<f64> {
        let norm = self.model.grad_norm(grads)?;
        self.model.check_finite(grads, norm, self.done.step as u64 + 1)?;
        let scale = self.config.clip.map_or(Ok(1.0), |clip| clip_factor(norm, clip))?;
        // A checkpoint that is written in the background has copied the parameters by now.
        self.wait_for_copies();
        self.optimizer.set_learning_rate(learning_rate);
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(self.model, grads, scale))?;
        self.model.move_corrections()?;
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

impl<M: Model> Parallel<M> {
    /// Computes one step on this rank's rows: forward, backward, and all communication. Ranks that differ only in `pp`, `cp`
    /// or `tp` get the same rows; ranks along `dp`, `shard` and `ep` get different rows, the same number each.
    ///
    /// The random numbers of rows, such as dropout's, depend on their index in the batch. Rows are assigned to ranks in
    /// turn: of two ranks the first has rows 0, 2, 4 and so on.
    ///
    /// The loss is the mean over all targets that count, of all ranks and micro-batches together, however they are
    /// distributed.
    ///
    /// With [`ParallelConfig::loss_scale`](crate::ParallelConfig) the loss is scaled for backward, and the returned
    /// gradients are those of the unscaled loss; gradients of f16 and bf16 parameters are returned as f32.
    ///
    /// # Shapes
    /// The first dimension of both is rows, at least one for each of
    /// [`ParallelConfig::micro_batches`](crate::ParallelConfig); with `pp` their number must be a multiple of it.
    ///
    /// # Cost
    /// That of the strategies; the number of targets and the loss are summed over the ranks, 8 bytes each.
    ///
    /// # Errors
    /// Fewer rows than micro-batches, or with `pp` not a multiple of them; no target that counts on any rank; errors of
    /// the model and the strategy.
    pub fn step(&mut self, input: &Tensor, targets: &Tensor) -> Result<Step> {
        self.step_batch(&(input.clone(), targets.clone()).into())
    }

    /// Like [`step`](Self::step), with rows that may be packed: attention keeps their documents apart and positions begin anew in
    /// each, so that the loss is that of the documents alone. Ranks that differ only in `pp`, `cp` or `tp` get the same documents.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); documents of other rows; a model in which no attention asks for the documents
    /// ([`Documents::current`]).
    pub fn step_batch(&mut self, batch: &Batch) -> Result<Step> {
        self.step_of(Ok(batch.clone()))
    }

    /// Like [`step_batch`](Self::step_batch), with a batch that this rank may have failed to make: the error is sent to the others.
    pub(crate) fn step_of(&mut self, batch: Result<Batch>) -> Result<Step> {
        self.check()?;
        let step = self.forward_backward(batch);
        self.note(step)
    }

    /// Computes the last step once more, with products in f32, and leaves of it nothing but what it returns: running statistics, loads
    /// of experts and the loss scale are afterwards as before. Call on every rank, with the batch of the step.
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn step_in_f32(&mut self, batch: &Batch) -> Result<Step> {
        self.check()?;
        let kept = KeptVars::of(self.buffers().iter().map(|(_, var)| var))?;
        let before = self.before_step();
        let step = Precision::F32.scope(|| self.forward_backward(Ok(batch.clone())));
        self.restore(before);
        drop(kept);
        self.note(step)
    }

    fn forward_backward(&mut self, batch: Result<Batch>) -> Result<Step> {
        let Prepared { batch, parts, total, loss_factor, .. } = self.prepare(batch, usize::MAX)?;
        self.steps += 1;
        let asked = Documents::asked();
        let balances: Vec<Balance> = parts.iter().filter_map(|part| part.rows.balance.clone()).collect();
        let pairs: Vec<Preferences> = parts.iter().filter_map(|part| part.rows.preferences.clone()).collect();
        // With this factor of the sum of a micro-batch's losses, the average of all ranks is the mean over all targets.
        let loss_factor = loss_factor * self.scaler.as_ref().map_or(1.0, LossScaler::factor);
        let (sum, mut grads) = match &mut self.model {
            // One rank has all rows: nothing is averaged.
            Kind::Whole { model, vars, .. } => whole(model, vars.all_vars(), &parts, loss_factor)?,
            // Copies average in buckets while backward of the last micro-batch runs.
            Kind::Copies(ddp) => {
                // The same for all micro-batches.
                let model = ddp.model()?;
                accumulated(
                    &parts,
                    loss_factor,
                    || Ok(model),
                    |loss| Ok(ddp.backward_no_sync(loss)?),
                    |loss| Ok(ddp.backward(loss)?),
                )?
            }
            // Units are gathered for forward and backward, and their gradients reduced to this rank's shards.
            Kind::Sharded(fsdp) => accumulated(
                &parts,
                loss_factor,
                || Ok(fsdp.model()?),
                |loss| Ok(fsdp.backward_no_sync(loss)?),
                |loss| Ok(fsdp.backward(loss)?),
            )?,
            // Micro-batches pass through the stages by a schedule, and copies of stages average.
            Kind::Stages(stages) => {
                let rows = parts.into_iter().map(|part| part.rows).collect();
                stages.step(&batch, rows, loss_factor, &self.shards)?
            }
        };
        self.check_documents(&batch, asked)?;
        // Parameters that all ranks of `tp` have whole; stages have summed them already, before taking their shards.
        if !matches!(self.model, Kind::Stages(_)) {
            self.shards.sum_gradients(&self.named_vars(), &mut grads)?;
        }
        self.audit(&grads)?;
        let loss = self.sum_of_all(sum)? / total as f64;
        // The load of each expert, of all ranks; its loss is in the gradients already.
        let balance_loss = self.take_routing(&balances)?;
        let preferences = self.report_of_pairs(&pairs, total)?;
        let skipped = !self.unscale(&mut grads)?;
        Ok(Step { loss, balance_loss, targets: total, preferences, grads, skipped })
    }
}

/// Computes forward and backward without communication.
fn whole<M: Model>(
    model: &M,
    vars: Vec<Var>,
    parts: &[MicroBatch],
    loss_factor: f64,
) -> Result<(f64, GradStore)> {
    let (mut sum, mut sums) = (0.0, GradSums::new(vars));
    for part in parts {
        let loss = part.training_loss(model)?;
        sum += part.add(&loss)?;
        let mut grads = backward(&part.weighted(&loss, loss_factor)?)?;
        if parts.len() == 1 {
            return Ok((sum, grads));
        }
        sums.take(&mut grads)?;
    }
    Ok((sum, sums.finish()?))
}

/// Computes forward and backward of micro-batches; the backward of the last one also returns the accumulated gradients
/// of the others.
fn accumulated<'a, M: Model + 'a>(
    parts: &[MicroBatch],
    loss_factor: f64,
    model: impl Fn() -> Result<&'a M>,
    add: impl Fn(&Tensor) -> Result<()>,
    last: impl Fn(&Tensor) -> Result<GradStore>,
) -> Result<(f64, GradStore)> {
    let mut sum = 0.0;
    for (place, part) in parts.iter().enumerate() {
        let loss = part.training_loss(model()?)?;
        sum += part.add(&loss)?;
        let weighted = part.weighted(&loss, loss_factor)?;
        if place + 1 == parts.len() {
            return Ok((sum, last(&weighted)?));
        }
        add(&weighted)?;
    }
    Err(Error::NoTargets)
}
