//! Each expert's three layers on its own rows, as one operation.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use super::expert::{Expert, Matrix, Part, product};
use super::order::Groups;
use crate::blocks::has_one_thread;
use crate::defer::defer;
use crate::lock::lock;
use crate::quantized::Side;
use crate::recompute::{keep_results, known_results};
use crate::tape::{explicit_op1, explicit_op2};
use crate::{Gate, Precision, SavedBytes};

/// The layers of experts.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    pub(super) experts: Vec<Expert>,
    pub(super) activation: Gate,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
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

/// One of the three layers of each expert.
#[derive(Debug, Clone, Copy)]
enum Layer {
    Gate,
    Up,
    Down,
}

/// Experts, and how they are computed.
#[derive(Debug)]
struct Call {
    layers: Layers,
    /// The weights of each expert's layers.
    matrices: Vec<[Matrix; 3]>,
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
        let experts = self.experts.iter().map(Expert::contiguous).collect::<Result<Vec<_>>>()?;
        let layers = Self { experts, ..self.clone() };
        let (token, gradients) = bundle(&layers.tensors().map(|(_, tensor)| tensor).collect::<Vec<_>>(), &x)?;
        let matrix = |Expert { gate, up, down, .. }: &Expert| Ok([gate.ready()?, up.ready()?, down.ready()?]);
        let matrices = layers.experts.iter().map(matrix).collect::<Result<_>>()?;
        let batches = batches(groups, x.device().is_cpu());
        let call = Arc::new(Call { layers, matrices, batches, precision: Precision::current(), share });
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
            let all = call.layers.tensors().map(|(_, tensor)| tensor);
            let tracked: Vec<&Tensor> = all.filter(|tensor| tensor.track_op()).collect();
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

    /// The tensors that may have a gradient, each with its expert.
    fn tensors(&self) -> impl Iterator<Item = ((usize, Part), &Tensor)> {
        let of = |(number, expert): (usize, _)| {
            Expert::tensors(expert).map(move |(part, tensor)| ((number, part), tensor))
        };
        self.experts.iter().enumerate().flat_map(of)
    }
}

impl Call {
    /// Computes what is kept, and the result.
    fn forward(&self, x: &Tensor) -> Result<(Vec<Inner>, Tensor)> {
        let found = each(&self.batches, x, |batch| {
            let rows = x.narrow(0, batch.rows.start, batch.rows.len())?;
            let gate = self.products(&rows, Layer::Gate, batch, Side::Inputs)?;
            let up = self.products(&rows, Layer::Up, batch, Side::Inputs)?;
            let active = self.layers.activation.apply(&gate, &up)?;
            let out = self.products(&active, Layer::Down, batch, Side::Inputs)?;
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
            let of_active = self.products(&own, Layer::Down, batch, Side::Outputs)?;
            let [of_gate, of_up] = self.layers.activation.gradients(gate, up, &of_active)?;
            let active = self.layers.activation.apply(gate, up)?;
            let of_rows = || {
                let through_gate = self.products(&of_gate, Layer::Gate, batch, Side::Outputs)?;
                through_gate + self.products(&of_up, Layer::Up, batch, Side::Outputs)?
            };
            let of_rows = has_rows.then(of_rows).transpose()?;
            Ok(InnerGradients { of_gate, of_up, active, of_rows })
        })
    }

    /// Computes the gradients of those tensors that have one.
    fn of_weights(&self, x: &Tensor, gradient: &Tensor, found: &[InnerGradients]) -> Result<Vec<Tensor>> {
        let mut experts: Vec<Option<(usize, Range<usize>)>> = vec![None; self.layers.experts.len()];
        for (number, batch) in self.batches.iter().enumerate() {
            for (expert, rows) in batch.experts.clone().zip(batch.groups.of_experts()) {
                experts[expert] = Some((number, rows)).filter(|(_, rows)| !rows.is_empty());
            }
        }
        let all: Vec<_> = self.layers.tensors().filter(|(_, tensor)| tensor.track_op()).collect();
        each(&all, x, |((expert, part), tensor)| {
            let Some((number, rows)) = &experts[*expert] else {
                // No token has chosen this expert.
                return Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device());
            };
            let (batch, found) = (&self.batches[*number], &found[*number]);
            let inside = |of: &Tensor| of.narrow(0, rows.start, rows.len());
            let outside = |of: &Tensor| of.narrow(0, batch.rows.start + rows.start, rows.len());
            let own = Own {
                x: outside(x)?,
                gradient: outside(gradient)?,
                of_gate: inside(&found.of_gate)?,
                of_up: inside(&found.of_up)?,
                active: inside(&found.active)?,
            };
            let whole = self.of_part(&self.layers.experts[*expert], *part, &own)?;
            if self.share == 1.0 { Ok(whole) } else { whole.affine(self.share, 0.0) }
        })
    }

    /// Computes the gradient of one tensor of an expert.
    fn of_part(&self, expert: &Expert, part: Part, own: &Own) -> Result<Tensor> {
        let Own { x, gradient, of_gate, of_up, active } = own;
        let precision = self.precision;
        // The gradient of a weight whose layer has this input and this gradient of its output.
        let of = |input: &Tensor, of_output: &Tensor| product(&of_output.t()?, input, precision);
        let [gate, up, down] = expert.changes(self.layers.intermediate);
        match (part, gate, up, down) {
            (Part::Gate, ..) => of(x, of_gate),
            (Part::Up, ..) => of(x, of_up),
            (Part::Down, ..) => of(active, gradient),
            (Part::GateUpA, Some(gate), Some(up), _) => {
                let inner =
                    (gate.inner_gradient(of_gate, precision)? + up.inner_gradient(of_up, precision)?)?;
                of(&x.to_dtype(inner.dtype())?, &inner)
            }
            (Part::GateUpB, Some(gate), ..) => {
                let inner = gate.inner(x, precision)?;
                let of_half = |half: &Tensor| of(&inner, &half.to_dtype(inner.dtype())?);
                Tensor::cat(&[of_half(of_gate)?, of_half(of_up)?], 0)
            }
            (Part::DownA, .., Some(down)) => {
                let inner = down.inner_gradient(gradient, precision)?;
                of(&active.to_dtype(inner.dtype())?, &inner)
            }
            (Part::DownB, .., Some(down)) => {
                let inner = down.inner(active, precision)?;
                of(&inner, &gradient.to_dtype(inner.dtype())?)
            }
            _ => bail!("an expert without an adapter has no gradient of one"),
        }
    }

    /// Returns what a layer of each expert makes of its rows, or in backward of the gradients of its outputs, one below the other.
    fn products(&self, rows: &Tensor, layer: Layer, batch: &Batch, side: Side) -> Result<Tensor> {
        let experts = batch.groups.of_experts().zip(batch.experts.clone());
        let parts = experts.filter(|(places, _)| !places.is_empty()).map(|(places, expert)| {
            let own = rows.narrow(0, places.start, places.len())?;
            let y = self.matrices[expert][layer as usize].times(&own, side, self.precision)?;
            let [gate, up, down] = self.layers.experts[expert].changes(self.layers.intermediate);
            let change = match layer {
                Layer::Gate => gate,
                Layer::Up => up,
                Layer::Down => down,
            };
            match change {
                None => Ok(y),
                Some(change) => change.add_to(y, &own, side, self.precision),
            }
        });
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        match &parts[..] {
            [one] => Ok(one.clone()),
            several => Tensor::cat(several, 0),
        }
    }
}

/// What the gradients of one expert are computed of.
struct Own {
    x: Tensor,
    gradient: Tensor,
    of_gate: Tensor,
    of_up: Tensor,
    active: Tensor,
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
fn bundle(weights: &[&Tensor], x: &Tensor) -> Result<(Tensor, Gradients)> {
    let gradients = Gradients::default();
    let zero = || Tensor::zeros((), DType::F32, x.device());
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
