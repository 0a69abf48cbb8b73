//! Each expert's three layers on its own rows, as one operation.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::order::Groups;
use crate::blocks::has_one_thread;
use crate::defer::defer;
use crate::lock::lock;
use crate::recompute::{keep_results, known_results};
use crate::tape::{explicit_op1, explicit_op2};
use crate::{Gate, Precision, SavedBytes};

/// The layers of experts: the weights of gate and up, `(intermediate, hidden)`, and of down, `(hidden, intermediate)`.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    pub(super) gate: Vec<Tensor>,
    pub(super) up: Vec<Tensor>,
    pub(super) down: Vec<Tensor>,
    pub(super) activation: Gate,
}

/// Some experts and their rows, which are adjacent. On a CPU each expert is computed by itself, so that what one layer hands to the
/// next is still in the cache; on other devices all are, so that the activation is launched once.
#[derive(Debug, Clone)]
struct Batch {
    experts: Range<usize>,
    rows: Range<usize>,
    /// The rows of each of these experts, from the first row of the batch on.
    groups: Groups,
}

/// What a batch keeps for backward.
#[derive(Debug, Clone)]
struct Inner {
    gate: Tensor,
    up: Tensor,
}

/// The gradients of what a batch has kept, and of its rows.
struct InnerGradients {
    of_gate: Tensor,
    of_up: Tensor,
    active: Tensor,
    of_rows: Option<Tensor>,
}

/// Experts, and how they are computed.
#[derive(Debug)]
struct Call {
    layers: Layers,
    batches: Vec<Batch>,
    precision: Precision,
    share: f64,
}

impl Layers {
    /// Computes each expert on its rows of `x`, sorted by expert. The gradients of weights are multiplied by `share`.
    ///
    /// # Shapes
    /// `x` and the result `(pairs, hidden)`.
    pub(super) fn compute(&self, x: &Tensor, groups: &Groups, share: f64) -> Result<Tensor> {
        let x = x.contiguous()?;
        let contiguous =
            |weights: &[Tensor]| weights.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>();
        let layers = Self {
            gate: contiguous(&self.gate)?,
            up: contiguous(&self.up)?,
            down: contiguous(&self.down)?,
            activation: self.activation,
        };
        let (token, gradients) = bundle(&layers.weights().collect::<Vec<_>>())?;
        let batches = batches(groups, x.device().is_cpu());
        let call = Arc::new(Call { layers, batches, precision: Precision::current(), share });
        let known = known_results().map(|known| call.known(known, &x)).transpose()?.flatten();
        let (inner, out) = match known {
            Some(known) => known,
            None => call.forward(&x.detach())?,
        };
        let mut results: Vec<Tensor> =
            inner.iter().flat_map(|inner| [inner.gate.clone(), inner.up.clone()]).collect();
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let kept_bytes = results.iter().map(bytes).sum();
        let kept = SavedBytes::default();
        let own = kept.clone();
        let out = explicit_op2("experts", [&x, &token], out, move |[x, token], gradient| {
            let _kept = &own;
            let gradient = gradient.detach().contiguous()?;
            let found = call.backward(&inner, &gradient, x.track_op())?;
            let of_x = x
                .track_op()
                .then(|| stacked(found.iter().filter_map(|found| found.of_rows.clone()).collect(), x));
            let of_x = of_x.transpose()?;
            if !token.track_op() {
                return Ok([of_x, None]);
            }
            let (late, own) = (x.detach(), call.clone());
            let of_weights = move || own.of_weights(&late, &gradient, &found);
            let tracked: Vec<&Tensor> = call.layers.weights().filter(|weight| weight.track_op()).collect();
            let of_weights = Arc::new(of_weights);
            let later = of_weights.clone();
            if !defer(&tracked, move || later()) {
                *lock(&gradients) = of_weights()?.into_iter().map(Some).collect();
            }
            Ok([of_x, Some(token.zeros_like()?)])
        })?;
        if out.track_op() {
            kept.by(&out, kept_bytes);
        }
        // Not before its memory is that of this operation's result.
        keep_results(|| {
            results.push(out.detach());
            Ok(results)
        })?;
        Ok(out)
    }

    fn weights(&self) -> impl Iterator<Item = &Tensor> {
        self.gate.iter().chain(&self.up).chain(&self.down)
    }
}

impl Call {
    /// Computes what is kept, and the result.
    fn forward(&self, x: &Tensor) -> Result<(Vec<Inner>, Tensor)> {
        let found = each(&self.batches, x, |batch| {
            let rows = x.narrow(0, batch.rows.start, batch.rows.len())?;
            let gate = self.products(&rows, &self.layers.gate, batch, true)?;
            let up = self.products(&rows, &self.layers.up, batch, true)?;
            let active = self.layers.activation.apply(&gate, &up)?;
            let out = self.products(&active, &self.layers.down, batch, true)?;
            Ok((Inner { gate, up }, out))
        })?;
        let (inner, out) = found.into_iter().unzip();
        Ok((inner, stacked(out, x)?))
    }

    /// The same of results that were kept, with a copy of the last one, whose memory is handed on. `None` if they are not those of this call.
    fn known(&self, mut known: Vec<Tensor>, x: &Tensor) -> Result<Option<(Vec<Inner>, Tensor)>> {
        let Some(out) = known.pop().filter(|out| out.dims() == x.dims()) else { return Ok(None) };
        let inner: Vec<Inner> =
            known.chunks_exact(2).map(|of| Inner { gate: of[0].clone(), up: of[1].clone() }).collect();
        let has_rows =
            |(inner, batch): (&Inner, &Batch)| inner.gate.dim(0).is_ok_and(|rows| rows == batch.rows.len());
        let is_own = inner.len() == self.batches.len() && inner.iter().zip(&self.batches).all(has_rows);
        is_own.then(|| Ok((inner, out.force_contiguous()?))).transpose()
    }

    /// Computes the gradients of what was kept, and if `has_rows` of the rows.
    fn backward(&self, inner: &[Inner], gradient: &Tensor, has_rows: bool) -> Result<Vec<InnerGradients>> {
        let batches: Vec<(&Batch, &Inner)> = self.batches.iter().zip(inner).collect();
        each(&batches, gradient, |(batch, Inner { gate, up })| {
            let own = gradient.narrow(0, batch.rows.start, batch.rows.len())?;
            let of_active = self.products(&own, &self.layers.down, batch, false)?;
            let [of_gate, of_up] = self.layers.activation.gradients(gate, up, &of_active)?;
            let active = self.layers.activation.apply(gate, up)?;
            let of_rows = || {
                let through_gate = self.products(&of_gate, &self.layers.gate, batch, false)?;
                through_gate + self.products(&of_up, &self.layers.up, batch, false)?
            };
            let of_rows = has_rows.then(of_rows).transpose()?;
            Ok(InnerGradients { of_gate, of_up, active, of_rows })
        })
    }

    /// Computes the gradients of those weights that have one.
    fn of_weights(&self, x: &Tensor, gradient: &Tensor, found: &[InnerGradients]) -> Result<Vec<Tensor>> {
        let Layers { gate, up, down, .. } = &self.layers;
        let mut experts: Vec<Option<(usize, Range<usize>)>> = vec![None; gate.len()];
        for (number, batch) in self.batches.iter().enumerate() {
            for (expert, rows) in batch.experts.clone().zip(batch.groups.of_experts()) {
                experts[expert] = Some((number, rows)).filter(|(_, rows)| !rows.is_empty());
            }
        }
        let tracked = |kind: usize, weights: &[Tensor]| {
            let all = weights.iter().cloned().enumerate();
            all.filter(|(_, weight)| weight.track_op())
                .map(move |(expert, weight)| (kind, expert, weight))
                .collect::<Vec<_>>()
        };
        let all = [tracked(0, gate), tracked(1, up), tracked(2, down)].concat();
        each(&all, x, |(kind, expert, weight)| {
            let Some((number, rows)) = &experts[*expert] else {
                // No token has chosen this expert.
                return Tensor::zeros(weight.shape(), weight.dtype(), weight.device());
            };
            let (batch, found) = (&self.batches[*number], &found[*number]);
            let inside = |of: &Tensor| of.narrow(0, rows.start, rows.len());
            let outside = |of: &Tensor| of.narrow(0, batch.rows.start + rows.start, rows.len());
            let whole = match kind {
                0 => self.product(&inside(&found.of_gate)?.t()?, &outside(x)?)?,
                1 => self.product(&inside(&found.of_up)?.t()?, &outside(x)?)?,
                _ => self.product(&outside(gradient)?.t()?, &inside(&found.active)?)?,
            };
            if self.share == 1.0 { Ok(whole) } else { whole.affine(self.share, 0.0) }
        })
    }

    /// Returns the products of each expert's rows and its weight, or the transpose of that, one below the other.
    fn products(&self, rows: &Tensor, weights: &[Tensor], batch: &Batch, transposed: bool) -> Result<Tensor> {
        let experts = batch.groups.of_experts().zip(&weights[batch.experts.clone()]);
        let parts = experts.filter(|(places, _)| !places.is_empty()).map(|(places, weight)| {
            let weight = weight.detach();
            let weight = if transposed { weight.t()? } else { weight };
            self.product(&rows.narrow(0, places.start, places.len())?, &weight)
        });
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        match &parts[..] {
            [one] => Ok(one.clone()),
            several => Tensor::cat(several, 0),
        }
    }

    fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match a.device().is_cpu() {
            true => self.precision.matmul(a, b),
            false => self.precision.product(a, b),
        }
    }
}

/// Divides experts into batches, without those that have no rows.
fn batches(groups: &Groups, is_cpu: bool) -> Vec<Batch> {
    let all: Vec<Range<usize>> = groups.of_experts().collect();
    let batch = |experts: Range<usize>| {
        let own = &all[experts.clone()];
        let rows = own.first().map_or(0, |rows| rows.start)..own.last().map_or(0, |rows| rows.end);
        Batch { rows, groups: Groups::of_counts(own.iter().map(Range::len)), experts }
    };
    let batches: Vec<Batch> = match is_cpu {
        true => (0..all.len()).map(|expert| batch(expert..expert + 1)).collect(),
        false => vec![batch(0..all.len())],
    };
    batches.into_iter().filter(|batch| !batch.rows.is_empty()).collect()
}

/// Calls `f` for each item, on a CPU on all threads; results are in the order of the items.
fn each<I: Sync, R: Send>(
    items: &[I],
    of: &Tensor,
    f: impl Fn(&I) -> Result<R> + Sync + Send,
) -> Result<Vec<R>> {
    match of.device().is_cpu() && !has_one_thread() {
        true => items.par_iter().map(f).collect(),
        false => items.iter().map(f).collect(),
    }
}

/// Returns the rows of all batches, which are as wide as `x`, one below the other.
fn stacked(parts: Vec<Tensor>, x: &Tensor) -> Result<Tensor> {
    match &parts[..] {
        [] => Tensor::zeros((0, x.dim(1)?), x.dtype(), x.device()),
        [one] => Ok(one.clone()),
        several => Tensor::cat(several, 0),
    }
}

/// Gradients of weights, in their order.
type Gradients = Arc<Mutex<Vec<Option<Tensor>>>>;

/// Returns a scalar that stands for all weights that are part of a graph, since an operation has three arguments at most. Who
/// uses it puts their gradients where the second result says before it returns a gradient of the scalar.
fn bundle(weights: &[&Tensor]) -> Result<(Tensor, Gradients)> {
    let gradients = Gradients::default();
    let zero = || Tensor::zeros((), DType::F32, weights[0].device());
    let mut token: Option<Tensor> = None;
    for (index, weight) in weights.iter().filter(|weight| weight.track_op()).enumerate() {
        let own = gradients.clone();
        let own = move || lock(&own).get_mut(index).and_then(Option::take);
        token = Some(match token {
            None => explicit_op1("expert", [*weight], zero()?, move |_, _| Ok([own()]))?,
            Some(token) => explicit_op2("expert", [&token, *weight], zero()?, move |[token, _], _| {
                Ok([Some(token.zeros_like()?), own()])
            })?,
        });
    }
    Ok((token.map_or_else(zero, Ok)?, gradients))
}
