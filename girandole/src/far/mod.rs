//! Training that communicates rarely: groups of ranks take steps on their own, and average what these have changed.
//!
//! # Source
//! Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023).

pub(crate) mod checkpoints;
mod config;
mod exchange;
mod quantized;
mod round;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use comm::Communicator;
use strategy::{BucketAverage, DistributedModel};
use training::DeferredCopy;
use training::build::Model;

use self::exchange::{BucketSum, Exchange, InFlight, PartSum};
use crate::parallel::FarGroups;
use crate::{Error, Parallel, Result};
pub use config::FarConfig;
use quantized::BLOCK;
pub use quantized::FarPrecision;
pub(crate) use round::Notice;
use round::Round;

/// Number of elements that are sent at once, and of bytes of buffers.
const BUCKET: usize = 4 << 20;
const BUCKET_BYTES: usize = 16 << 20;

/// Ends of the keys under which the state of a parameter is saved.
const START: &str = ".far_start";
const MOMENTUM: &str = ".far_momentum";
const ERROR: &str = ".far_error";
const TARGETS: &str = ".far_targets";
const SENT: &str = ".far_sent";
const SENT_TARGETS: &str = ".far_sent_targets";

/// The outer step of a model in a layout with `far`: [`FarConfig`].
///
/// # Cost
/// Each average sums the parameters that a rank holds over the groups, with equally many from each copy of them within the group:
/// with two groups 4 bytes are sent of each parameter, 1.03 with [`FarPrecision::Int8`] and 0.53 with [`FarPrecision::Int4`]. A rank keeps
/// two numbers more of each parameter that it holds, and a third one where not all of a number is sent. With [`FarConfig::delay`] one or
/// two more of each parameter that is on its way.
#[derive(Debug)]
pub struct FarAverage {
    config: FarConfig,
    groups: FarGroups,
    /// Ranks of the group with the same parameters.
    copies: Arc<dyn Communicator>,
    slots: Vec<Slot>,
    buffers: Vec<Var>,
    /// Of each fragment: targets of this group since its changes were last sent.
    targets: Vec<u64>,
    /// Targets that what is on its way was learned from, or what is to be sent now.
    sent_targets: Vec<u64>,
    /// What is on its way, unless the groups have changed since: it is sent again then, when it is to be applied.
    in_flight: Option<InFlight>,
    /// In an elastic run: what a round has received, until it is certain that all have.
    received: Option<Round>,
}

/// The outer state of a parameter.
#[derive(Debug, Clone)]
struct Slot {
    name: String,
    fragment: usize,
    var: Var,
    /// Its value after the last average; `None` before the first step.
    start: Option<Tensor>,
    momentum: Option<Tensor>,
    /// What was not sent of its changes.
    error: Option<Tensor>,
    /// While its change is on its way: its value when that was sent.
    sent: Option<Tensor>,
}

impl Slot {
    /// The value after the last average; before the first step, the present one.
    fn start(&self) -> candle_core::Result<Tensor> {
        self.start.clone().map_or_else(|| self.var.as_detached_tensor().copy(), Ok)
    }

    /// This group's part of its change, as it is sent: in whole blocks, so that a scale is of one parameter, and ranks that hold one
    /// whole beside parts of others send the same of it.
    fn change(&self, share: f64) -> candle_core::Result<Tensor> {
        let now = self.sent.clone().unwrap_or_else(|| self.var.as_detached_tensor());
        let change = ((self.start()? - now)? * share)?;
        let change = match &self.error {
            Some(error) => (change + error)?,
            None => change,
        };
        let change = change.flatten_all()?;
        change.pad_with_zeros(0, 0, self.padded() - change.elem_count())
    }

    /// Elements that are sent: whole blocks.
    fn padded(&self) -> usize {
        self.var.elem_count().next_multiple_of(BLOCK)
    }
}

/// This group's part of the changes of a bucket.
fn changes(slots: &[Slot], share: f64) -> candle_core::Result<Tensor> {
    let changes = slots.iter().map(|slot| slot.change(share)).collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&changes, 0)
}

impl FarAverage {
    /// Creates the outer step of a model; `None` if its layout has no `far`. Not collective.
    ///
    /// # Errors
    /// A configuration that is not valid; parameters in 16 bits.
    pub fn new<M: Model>(model: &Parallel<M>, config: &FarConfig) -> Result<Option<Self>> {
        config.check()?;
        let Some(groups) = model.far().cloned() else { return Ok(None) };
        let vars = model.named_vars().into_iter().filter(|(_, var)| var.dtype().is_float());
        // Tied parameters are copies of one.
        let roots: HashMap<String, String> =
            model.pieces()?.into_iter().map(|piece| (piece.var_name, piece.name)).collect();
        let slot = |(name, var): (String, Var)| match var.dtype() {
            DType::F32 | DType::F64 => {
                let fragment = config.fragment_of(roots.get(&name).unwrap_or(&name));
                Ok(Slot { name, fragment, var, start: None, momentum: None, error: None, sent: None })
            }
            dtype => {
                let help = "give f32: the small changes of an average would be lost in 16 bits";
                Err(Error::invalid("the parameters of a layout with far", format!("{dtype:?}"), help))
            }
        };
        let buffers = model.buffers().into_iter().map(|(_, var)| var).filter(|var| var.dtype().is_float());
        let mut slots = vars.map(slot).collect::<Result<Vec<_>>>()?;
        slots.sort_by_key(|slot| slot.fragment);
        Ok(Some(Self {
            config: *config,
            groups,
            copies: model.copies().clone(),
            slots,
            buffers: buffers.collect(),
            targets: vec![0; config.fragments],
            sent_targets: vec![0; config.fragments],
            in_flight: None,
            received: None,
        }))
    }

    /// Before the optimizer's step: notes where parameters are, if nothing has been learned since the last average.
    ///
    /// # Errors
    /// candle's, if memory is exhausted.
    pub fn begin_step(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            slot.start = Some(slot.start()?);
        }
        Ok(())
    }

    /// After step number `step`, from 1, in which so many targets of the group counted: averages if that is due, or the last one, and
    /// sends what is applied later. Call on every rank.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn end_step(&mut self, step: usize, targets: usize, is_last: bool) -> Result<()> {
        self.count(targets);
        self.average(step, is_last)?;
        if is_last { Ok(()) } else { self.send(step) }
    }

    /// Counts the targets of a step.
    pub(crate) fn count(&mut self, targets: usize) {
        self.targets.iter_mut().for_each(|of_fragment| *of_fragment += targets as u64);
    }

    /// Averages the fragments that are due after a step, or all.
    pub(crate) fn average(&mut self, step: usize, is_last: bool) -> Result<()> {
        let due = self.due(step, is_last)?;
        self.sums(&due, |far, bucket, sum| far.step_by(bucket, &sum))?;
        if !due.is_empty() {
            let buffers: Vec<Tensor> = self.buffers.iter().map(Var::as_detached_tensor).collect();
            self.average_buffers(&buffers)?;
        }
        due.into_iter().for_each(|fragment| self.sent_targets[fragment] = 0);
        Ok(())
    }

    /// Sends what is due after a step, if it is applied later only. Not collective: what the groups send is summed while they go on.
    pub(crate) fn send(&mut self, step: usize) -> Result<()> {
        let fragments = self.config.sent_after(step);
        if self.config.delay == 0 || fragments.is_empty() {
            return Ok(());
        }
        self.take(&fragments, |var| var.as_detached_tensor().copy().map(Some))?;
        let (exchange, slots) = (self.exchange(), self.slots.clone());
        let buckets = |fragment: &usize| (self.sent_targets[*fragment], self.buckets(*fragment));
        let buckets: Vec<(u64, Vec<Range<usize>>)> = fragments.iter().map(buckets).collect();
        self.in_flight = Some(InFlight::begin(move || {
            let mut sums = Vec::new();
            for (targets, buckets) in buckets {
                let Some(share) = exchange.share(targets)? else { continue };
                for bucket in buckets {
                    // On a stream of a device, a sum that waits for others would delay the training.
                    let changes = changes(&slots[bucket.clone()], share)?.to_device(&Device::Cpu)?;
                    sums.push((bucket, exchange.sum(&changes)?));
                }
            }
            Ok(sums)
        })?);
        Ok(())
    }

    /// The fragments that are to be averaged after a step.
    fn due(&mut self, step: usize, is_last: bool) -> Result<Vec<usize>> {
        if !is_last && self.config.delay > 0 {
            return Ok(self.config.applied_after(step));
        }
        // All that was learned until now: what is on its way is sent again with it.
        self.in_flight.take().map_or(Ok(Vec::new()), InFlight::wait)?;
        let all = || (0..self.config.fragments).collect();
        let fragments = if is_last { all() } else { self.config.sent_after(step) };
        self.take(&fragments, |_| Ok(None))?;
        Ok(fragments)
    }

    /// What these fragments have changed until now is to be sent: a copy of what they are, or what they are when it is sent.
    fn take(
        &mut self,
        fragments: &[usize],
        copy: impl Fn(&Var) -> candle_core::Result<Option<Tensor>>,
    ) -> Result<()> {
        for slot in self.slots.iter_mut().filter(|slot| fragments.contains(&slot.fragment)) {
            slot.sent = copy(&slot.var)?;
        }
        for fragment in fragments {
            self.sent_targets[*fragment] += std::mem::take(&mut self.targets[*fragment]);
        }
        Ok(())
    }

    /// Goes through the sums of what the groups send, or have sent, of these fragments.
    fn sums(
        &mut self,
        fragments: &[usize],
        mut each: impl FnMut(&mut Self, Range<usize>, BucketSum) -> Result<()>,
    ) -> Result<()> {
        let mut gather = |far: &mut Self, bucket: Range<usize>, sum: PartSum| {
            let sum = sum.gather(&*far.copies, far.slots[bucket.start].var.device())?;
            each(far, bucket, sum)
        };
        if let Some(in_flight) = self.in_flight.take() {
            return in_flight.wait()?.into_iter().try_for_each(|(bucket, sum)| gather(self, bucket, sum));
        }
        let exchange = self.exchange();
        for fragment in fragments {
            let Some(share) = exchange.share(self.sent_targets[*fragment])? else { continue };
            for bucket in self.buckets(*fragment) {
                let sum = exchange.sum(&changes(&self.slots[bucket.clone()], share)?)?;
                gather(self, bucket, sum)?;
            }
        }
        Ok(())
    }

    fn exchange(&self) -> Exchange {
        let copy = (self.copies.rank(), self.copies.world_size());
        Exchange { across: self.groups.across.clone(), precision: self.config.precision, copy }
    }

    fn average_buffers(&self, buffers: &[Tensor]) -> Result<()> {
        let mut average = BucketAverage::new(self.groups.across.clone(), BUCKET_BYTES);
        buffers.iter().try_for_each(|buffer| average.add(buffer))?;
        Ok(average.wait()?)
    }

    /// Ranges of slots of a fragment, of one dtype and device, none of more than [`BUCKET`] elements if it has several.
    fn buckets(&self, fragment: usize) -> Vec<Range<usize>> {
        let (mut buckets, mut elements): (Vec<Range<usize>>, usize) = (Vec::new(), 0);
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.fragment == fragment);
        for (place, Slot { var, .. }) in slots {
            let fits = |first: usize| {
                self.slots[first].var.dtype() == var.dtype() && elements + var.elem_count() <= BUCKET
            };
            match buckets.last_mut() {
                Some(bucket) if fits(bucket.start) => {
                    bucket.end = place + 1;
                    elements += var.elem_count();
                }
                _ => {
                    buckets.push(place..place + 1);
                    elements = var.elem_count();
                }
            }
        }
        buckets
    }

    /// The outer step of these parameters.
    fn step_by(&mut self, bucket: Range<usize>, (mean, errors): &BucketSum) -> Result<()> {
        let (FarConfig { learning_rate, momentum, .. }, mut begin) = (self.config, 0);
        for slot in &mut self.slots[bucket] {
            let (shape, len) = (slot.var.shape().clone(), slot.var.elem_count());
            let part = |all: &Tensor| all.narrow(0, begin, len)?.reshape(&shape);
            let mean = part(mean)?;
            slot.error = errors.as_ref().map(part).transpose()?;
            let moved = match (momentum, &slot.momentum) {
                (0.0, _) => mean,
                (_, None) => {
                    slot.momentum = Some(mean.copy()?);
                    (mean * (1.0 + momentum))?
                }
                (_, Some(before)) => {
                    let after = ((before * momentum)? + &mean)?;
                    let moved = (mean + (&after * momentum)?)?;
                    slot.momentum = Some(after);
                    moved
                }
            };
            let start = (slot.start()? - (moved * learning_rate)?)?;
            let now = match slot.sent.take() {
                Some(sent) => ((slot.var.as_detached_tensor() - sent)? + &start)?,
                None => start.clone(),
            };
            slot.var.set(&now)?;
            slot.start = Some(start);
            begin += slot.padded();
        }
        Ok(())
    }

    /// After a checkpoint of another group: what that one has not sent, and has learned since the last average, counts once.
    pub(crate) fn forget_unsent(&mut self) {
        self.targets.fill(0);
        self.sent_targets.fill(0);
        self.slots.iter_mut().for_each(|slot| slot.error = None);
    }

    /// Its state, by keys that begin with the parameters' names.
    pub(crate) fn state(&self) -> candle_core::Result<Vec<(String, DeferredCopy)>> {
        let mut state = Vec::new();
        for slot in &self.slots {
            let tensors =
                [(START, &slot.start), (MOMENTUM, &slot.momentum), (ERROR, &slot.error), (SENT, &slot.sent)];
            let tensors = tensors.into_iter().filter_map(|(end, tensor)| Some((end, tensor.as_ref()?)));
            // Tensors are replaced, and never changed.
            state.extend(
                tensors
                    .map(|(end, tensor)| (format!("{}{end}", slot.name), DeferredCopy::new(tensor.clone()))),
            );
            for (end, targets) in [(TARGETS, &self.targets), (SENT_TARGETS, &self.sent_targets)] {
                let targets = Tensor::new(targets[slot.fragment] as i64, &Device::Cpu)?;
                state.push((format!("{}{end}", slot.name), DeferredCopy::done(targets)));
            }
        }
        Ok(state)
    }

    /// Divides a saved state into that of an outer step and that of the optimizer.
    pub(crate) fn state_of(
        state: &HashMap<String, Tensor>,
    ) -> (HashMap<String, Tensor>, HashMap<String, Tensor>) {
        let is_own = |key: &str| {
            [START, MOMENTUM, ERROR, TARGETS, SENT, SENT_TARGETS].iter().any(|end| key.ends_with(end))
        };
        state.clone().into_iter().partition(|(key, _)| is_own(key))
    }

    /// Replaces its state by this. Parameters that are not in it start where they are before the next step.
    pub(crate) fn load_state(&mut self, state: &HashMap<String, Tensor>) -> candle_core::Result<()> {
        // What is on its way is of another state. The groups have sent it, or those that have not are lost.
        drop(self.in_flight.take().map(InFlight::wait));
        self.targets.fill(0);
        self.sent_targets.fill(0);
        for slot in &mut self.slots {
            let of = |end: &str| state.get(&format!("{}{end}", slot.name));
            let tensor = |end: &str| {
                let like = slot.var.as_tensor();
                let set = |value: &Tensor| {
                    value.to_dtype(like.dtype())?.reshape(like.shape())?.to_device(like.device())
                };
                of(end).map(set).transpose()
            };
            for (end, targets) in [(TARGETS, &mut self.targets), (SENT_TARGETS, &mut self.sent_targets)] {
                let of_slot = of(end).map(Tensor::to_scalar::<i64>).transpose()?.unwrap_or_default();
                targets[slot.fragment] = targets[slot.fragment].max(of_slot.unsigned_abs());
            }
            (slot.start, slot.momentum, slot.error) = (tensor(START)?, tensor(MOMENTUM)?, tensor(ERROR)?);
            slot.sent = tensor(SENT)?;
        }
        Ok(())
    }
}
