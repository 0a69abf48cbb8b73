//! Mixture of experts: feed-forward layers of which each token uses a few.

mod choice;
mod combine;
mod divided;
mod expert;
mod grouped;
mod kept_routes;
mod order;
mod router;
#[cfg(test)]
mod tests;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use self::combine::combine;
pub use self::divided::{DividedExperts, ExpertExchange, RowsOnTheWay};
pub use self::expert::{Expert, ExpertAdapter, ExpertWeight};
use self::grouped::Layers;
pub use self::kept_routes::RouteRecord;
use self::order::{Groups, Order};
pub use self::router::{EXPERT_CORRECTION, Router, Routes, Scoring, correction_moves};
use super::embedding::embedding;
use super::gated::Gate;
use super::working_dtype;
use crate::{Error, Result};

const NAME: &str = "experts";

/// Gated feed-forward layers ([`GatedMlp`](crate::GatedMlp)) of which a [`Router`] chooses some for each token: the output is the
/// sum of theirs, weighted by the router. No token is dropped and nothing is padded: the tokens are sorted by expert, and each
/// expert computes its own.
///
/// An expert that no token has chosen has a gradient of zeros, so that every parameter has one in every step and on every rank.
///
/// # Cost
/// On a CPU, for each expert with tokens the three products of a dense layer on its adjacent rows, which are gathered once, with
/// the weights as they lie; twice that in backward. With several threads, experts are computed at the same time. Kept for backward, of
/// each pair of a token and an expert: the row gathered, both before the activation, and the expert's output. The order of all sums is fixed: runs repeat to the bit. On other
/// devices it is composed of candle's operations, with one product per expert as well; choosing the experts waits for the device.
///
/// # Source
/// Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017); Gale et al.,
/// "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022) for products without padding.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use ops::{Gate, Router, backward, experts, linear_no_bias};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let scores = linear_no_bias(4, 8, builder.pp("gate"))?;
/// let router = Router::new("gate", 2)?;
/// let experts = experts(8, 4, 6, Gate::Silu, builder.pp("experts"))?;
///
/// let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?;
/// let routes = router.route(&scores.forward(&x)?)?;
/// let y = experts.forward(&x, &routes)?;
/// assert_eq!(y.dims(), [2, 3, 4]);
/// let grads = backward(&y.sum_all()?)?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Experts {
    layers: Layers,
    /// If other ranks have some of the experts.
    divided: Option<DividedExperts>,
}

/// Makes [`Experts`] of the builder's `0.gate_proj.weight`, `0.up_proj.weight` and `0.down_proj.weight`, `1.gate_proj.weight` and
/// so on: `count` experts of `hidden` features and `intermediate` inner ones, named as in the files of Qwen's models.
///
/// # Errors
/// Variables of these names that exist with another shape; no experts.
pub fn experts(
    count: usize,
    hidden: usize,
    intermediate: usize,
    activation: Gate,
    builder: VarBuilder<'_>,
) -> candle_core::Result<Experts> {
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    let weight = |expert: usize, name: &str, shape: (usize, usize)| {
        builder.pp(expert).pp(name).get_with_hints(shape, "weight", init)
    };
    let expert = |expert: usize| {
        Ok([
            weight(expert, "gate_proj", (intermediate, hidden))?,
            weight(expert, "up_proj", (intermediate, hidden))?,
            weight(expert, "down_proj", (hidden, intermediate))?,
        ])
    };
    Experts::new((0..count).map(expert).collect::<candle_core::Result<_>>()?, activation)
}

impl Experts {
    /// Experts of these weights, for each of them those of gate and up, `(intermediate, hidden)`, and down,
    /// `(hidden, intermediate)`.
    ///
    /// # Errors
    /// Those of [`of`](Self::of).
    pub fn new(weights: Vec<[Tensor; 3]>, activation: Gate) -> candle_core::Result<Self> {
        let expert = |weights: [Tensor; 3]| Expert::new(weights.map(ExpertWeight::Wide));
        Self::of(weights.into_iter().map(expert).collect(), activation)
    }

    /// These experts, whose weights may be in few bits, and which may have adapters.
    ///
    /// # Errors
    /// No experts; shapes that differ, or dtypes of weights.
    pub fn of(experts: Vec<Expert>, activation: Gate) -> candle_core::Result<Self> {
        let Some(first) = experts.first() else {
            let (of, field, help) = ("Experts", "the number of experts", "it must be above 0");
            return Err(Error::InvalidConfig { of, field, got: 0.0, help }.into());
        };
        let [intermediate, hidden] = first.gate.dims()?;
        let dtype = first.gate.wide().map(Tensor::dtype);
        for Expert { gate, up, down, gate_up_adapter, down_adapter } in &experts {
            let (inner, outer) = ([intermediate, hidden], [hidden, intermediate]);
            for (name, weight, dims) in [("gate", gate, inner), ("up", up, inner), ("down", down, outer)] {
                check_dims(name, &weight.dims()?, &dims)?;
                if let (Some(weight), Some(expected)) = (weight.wide(), dtype) {
                    check_dtype(name, weight.dtype(), expected)?;
                }
            }
            let of_gate_up = gate_up_adapter.as_ref().map(|adapter| (adapter, [2 * intermediate, hidden]));
            let of_down = down_adapter.as_ref().map(|adapter| (adapter, outer));
            for (ExpertAdapter { a, b, .. }, [outputs, inputs]) in of_gate_up.into_iter().chain(of_down) {
                let rank = a.dims().first().copied().unwrap_or_default();
                check_dims("the first matrix of an adapter", a.dims(), &[rank, inputs])?;
                check_dims("the second matrix of an adapter", b.dims(), &[outputs, rank])?;
            }
        }
        Ok(Self { layers: Layers { experts, activation, hidden, intermediate }, divided: None })
    }

    /// The same experts as those of this rank, where each rank has some of all. The gradients of their weights are then of the
    /// tokens of all these ranks, divided by the number of ranks: average them over the ranks that have the same experts, and all
    /// other gradients over all ranks with different tokens.
    ///
    /// # Cost
    /// For each token and expert, a row is sent to the expert's rank and one back, in forward and in backward, and before that
    /// the number of rows of each expert.
    ///
    /// # Errors
    /// Another number of experts than [`DividedExperts::own`] has.
    pub fn divided(self, divided: DividedExperts) -> candle_core::Result<Self> {
        if self.layers.experts.len() != divided.own().len() {
            let (of, field, got) =
                ("Experts", "the number of this rank's experts", self.layers.experts.len() as f64);
            let help = "give those of DividedExperts::own";
            return Err(Error::InvalidConfig { of, field, got, help }.into());
        }
        Ok(Self { divided: Some(divided), ..self })
    }

    /// Number of experts, of all ranks.
    pub fn count(&self) -> usize {
        self.divided.as_ref().map_or(self.layers.experts.len(), DividedExperts::count)
    }

    /// Computes the weighted sum of the experts that each token has chosen.
    ///
    /// # Shapes
    /// `x` and the result `(.., hidden)`; `routes` of as many tokens.
    ///
    /// # Errors
    /// Routes of another number of tokens or experts; dtypes that differ.
    pub fn forward(&self, x: &Tensor, routes: &Routes) -> candle_core::Result<Tensor> {
        let dispatch = self.dispatch(x, routes)?;
        let out = match &self.divided {
            None => self.compute(&dispatch.rows, dispatch.order.groups())?,
            Some(divided) => {
                let passage = divided.passage(dispatch.order.groups())?;
                passage.back(&self.compute(&passage.there(&dispatch.rows)?, passage.groups())?)?
            }
        };
        dispatch.combine(&out, x, routes)
    }

    /// As [`forward`](Self::forward), and computes `beside` of the same tokens, for example a shared expert: where experts are divided
    /// over ranks, while the rows are on their way to them. In backward the gradients of `beside` are computed while those of the rows
    /// come back. Returns both results.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward) and of `beside`.
    pub fn forward_beside(
        &self,
        x: &Tensor,
        routes: &Routes,
        beside: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let Some(divided) = &self.divided else { return Ok((self.forward(x, routes)?, beside()?)) };
        let dispatch = self.dispatch(x, routes)?;
        let passage = divided.passage(dispatch.order.groups())?;
        let (rows, other) = passage.there_beside(&dispatch.rows, routes.weights(), beside)?;
        let out = passage.back(&self.compute(&rows, passage.groups())?)?;
        Ok((dispatch.combine(&out, x, routes)?, other))
    }

    /// Sorts the tokens by expert.
    fn dispatch(&self, x: &Tensor, routes: &Routes) -> candle_core::Result<Dispatch> {
        working_dtype(NAME, x.dtype())?;
        let flat = x.contiguous()?.reshape(((), self.layers.hidden))?;
        check_dims("the input", flat.dims(), &[routes.tokens(), self.layers.hidden])?;
        if let Some(weight) = self.layers.experts[0].gate.wide() {
            check_dtype("the input", flat.dtype(), weight.dtype())?;
        }
        if routes.count() != self.count() {
            let (of, field, help) =
                ("Experts", "the number of experts of the routes", "give a score for each expert");
            return Err(Error::InvalidConfig { of, field, got: routes.count() as f64, help }.into());
        }
        let order = Order::of(routes);
        Ok(Dispatch { rows: embedding(&flat, &order.tokens(x.device())?)?, order })
    }

    /// Computes each of this rank's experts on its rows.
    fn compute(&self, rows: &Tensor, groups: &Groups) -> candle_core::Result<Tensor> {
        let share = self.divided.as_ref().map_or(1.0, DividedExperts::share);
        self.layers.compute(rows, groups, share)
    }
}

/// The rows of each expert, one after the other.
struct Dispatch {
    order: Order,
    rows: Tensor,
}

impl Dispatch {
    /// The weighted sums of the rows' results, in the shape of `x`.
    fn combine(&self, out: &Tensor, x: &Tensor, routes: &Routes) -> candle_core::Result<Tensor> {
        combine(out, routes.weights(), &self.order)?.reshape(x.shape())
    }
}

fn check_dims(tensor: &'static str, got: &[usize], expected: &[usize]) -> Result<()> {
    if got != expected {
        let (expected, got) = (expected.to_vec(), got.to_vec());
        return Err(Error::ShapeMismatch { operation: NAME, tensor, expected, got });
    }
    Ok(())
}

fn check_dtype(tensor: &'static str, got: DType, expected: DType) -> Result<()> {
    if got != expected {
        return Err(Error::DTypeMismatch { operation: NAME, tensor, expected, got });
    }
    Ok(())
}
