//! Choice of the experts of each token.

use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor};

use super::super::cast::cast;
use super::super::softmax::softmax;
use super::super::working_dtype;
use super::kept_routes::kept_or;
use crate::rows::{Recorded, Routed};
use crate::tape::explicit_op1;
use crate::{Error, RowContext};

/// Chooses the experts of each token: those with the highest scores, the first of equal ones, weighted by the softmax of the scores
/// of all experts.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::Router;
///
/// let scores = Tensor::new(&[[1f64, 0., 2., 1.]], &Device::Cpu)?;
/// let routes = Router::new("gate", 2)?.normalized(true).route(&scores)?;
/// assert_eq!(routes.experts(), [2, 0]);
/// let share = 1.0 / (1.0 + (-1f64).exp());
/// assert!((routes.weights().to_vec2::<f64>()?[0][0] - share).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Router {
    name: Arc<str>,
    per_token: usize,
    normalized: bool,
    balanced: bool,
}

impl Router {
    /// A router of so many experts for each token. Its name is its own in the model.
    ///
    /// # Errors
    /// No experts for a token.
    pub fn new(name: &str, per_token: usize) -> Result<Self> {
        if per_token == 0 {
            let (of, field, help) = ("Router", "the number of experts of a token", "it must be above 0");
            return Err(Error::InvalidConfig { of, field, got: 0.0, help }.into());
        }
        Ok(Self { name: name.into(), per_token, normalized: false, balanced: true })
    }

    /// Sets whether the weights of a token's experts are divided by their sum. Default: false.
    #[must_use]
    pub fn normalized(self, normalized: bool) -> Self {
        Self { normalized, ..self }
    }

    /// Sets whether the gradient of a [`Balance`](crate::Balance) is added on this rank: where several ranks compute the same
    /// router and their gradients are summed, only one of them adds it. Default: true.
    #[must_use]
    pub fn balanced(self, balanced: bool) -> Self {
        Self { balanced, ..self }
    }

    /// The router's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Chooses the experts of tokens with these scores. f16 and bf16 are computed in f32.
    ///
    /// # Shapes
    /// `(.., experts)`; in a [`RowContext`] with [`Balance`](crate::Balance) `(rows, .., experts)`.
    ///
    /// # Errors
    /// Fewer experts than each token has; scores that are not numbers; dtypes other than f16, bf16, f32 and f64.
    pub fn route(&self, scores: &Tensor) -> Result<Routes> {
        let count = scores.dim(D::Minus1)?;
        if self.per_token > count {
            let help = "it must be at most the number of experts";
            let (of, field, got) = ("Router", "the number of experts of a token", self.per_token as f64);
            return Err(Error::InvalidConfig { of, field, got, help }.into());
        }
        let wide = cast(scores, working_dtype("router", scores.dtype())?)?;
        let shares = softmax(&wide.contiguous()?.reshape(((), count))?)?;
        let tokens = shares.dim(0)?;
        let experts = kept_or(tokens * self.per_token, || self.choose(&shares.detach()))?;
        let context = RowContext::current();
        let recorded = match &context.balance {
            None => None,
            Some(balance) => {
                let rows = if scores.rank() > 2 { scores.dim(0)? } else { 1 };
                let of = (&experts[..], self.per_token);
                let recorded = balance.record(&Routed::new(&context, &self.name, (&shares, rows), of)?)?;
                self.balanced.then_some(recorded)
            }
        };
        let weights = select(&shares, &experts, (self.per_token, self.normalized), recorded)?;
        Ok(Routes { weights, experts: experts.into(), per_token: self.per_token, count })
    }

    /// Returns the experts of each token, the best first.
    fn choose(&self, shares: &Tensor) -> Result<Vec<u32>> {
        let mut chosen = Vec::with_capacity(shares.dim(0)? * self.per_token);
        let mut order: Vec<u32> = Vec::new();
        for row in shares.to_dtype(DType::F64)?.to_vec2::<f64>()? {
            if row.iter().any(|share| share.is_nan()) {
                return Err(Error::ScoresNotFinite { router: self.name.to_string() }.into());
            }
            let better = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
            order.clear();
            order.extend(0..row.len() as u32);
            if self.per_token < row.len() {
                order.select_nth_unstable_by(self.per_token - 1, better);
            }
            order[..self.per_token].sort_unstable_by(better);
            chosen.extend_from_slice(&order[..self.per_token]);
        }
        Ok(chosen)
    }
}

/// The experts of each token, and their weights.
#[derive(Debug, Clone)]
pub struct Routes {
    weights: Tensor,
    experts: Arc<[u32]>,
    per_token: usize,
    count: usize,
}

impl Routes {
    /// The weights of each token's experts, `(tokens, experts of a token)`, in f32 or f64.
    pub fn weights(&self) -> &Tensor {
        &self.weights
    }

    /// The experts of each token, those with the largest weights first, token by token.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// Number of experts of each token.
    pub fn per_token(&self) -> usize {
        self.per_token
    }

    /// Number of all experts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.experts.len() / self.per_token
    }
}

/// Returns the shares of the chosen experts, divided by their sum if `normalized`.
fn select(
    shares: &Tensor,
    experts: &[u32],
    (per_token, normalized): (usize, bool),
    recorded: Option<Recorded>,
) -> Result<Tensor> {
    let shape = (shares.dim(0)?, per_token);
    let experts = Tensor::from_slice(experts, shape, shares.device())?;
    let chosen = shares.detach().gather(&experts, 1)?;
    let sums = chosen.sum_keepdim(1)?;
    let weights = if normalized { chosen.broadcast_div(&sums)? } else { chosen };
    let kept = weights.clone();
    // Its memory is moved to the result.
    let weights = weights.force_contiguous()?;
    explicit_op1("select_experts", [shares], weights, move |[shares], gradient| {
        let gradient = gradient.detach().contiguous()?;
        let gradient = match normalized {
            true => {
                let mean = (&gradient * &kept)?.sum_keepdim(1)?;
                gradient.broadcast_sub(&mean)?.broadcast_div(&sums)?
            }
            false => gradient,
        };
        let balance = match &recorded {
            Some(recorded) => recorded.gradient(shares.dtype(), shares.device())?,
            None => None,
        };
        let own = balance.map_or_else(|| shares.zeros_like(), Ok)?;
        Ok([Some(own.scatter_add(&experts, &gradient, 1)?)])
    })
}
