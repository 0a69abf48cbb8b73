//! Choice of the experts of each token.

use std::sync::Arc;

use candle_core::{D, Result, Tensor};

use super::super::cast::cast;
use super::super::sigmoid::sigmoid;
use super::super::softmax::softmax;
use super::super::working_dtype;
use super::choice::Choice;
use super::kept_routes::kept_or;
use crate::rows::{Recorded, Routed};
use crate::tape::explicit_op1;
use crate::{Error, RowContext};

/// How the scores of a token's experts become their shares, which are compared and become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scoring {
    /// The softmax over all experts.
    #[default]
    Softmax,
    /// The sigmoid of each score (DeepSeek V3). A [`Balance`](crate::Balance) takes them divided by their sum.
    Sigmoid,
}

/// Last component of the name of a router's correction ([`Router::corrected`]), as in the files of DeepSeek V3.
pub const EXPERT_CORRECTION: &str = "e_score_correction_bias";

/// Returns how far the correction of each of a router's experts moves, given the tokens that each has had in a step: `rate` up if
/// they are fewer than the mean, and down if they are more.
///
/// # Source
/// Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), algorithm 1.
///
/// ```
/// assert_eq!(ops::correction_moves(&[5., 0., 3., 4.], 0.001), [-0.001, 0.001, 0.0, -0.001]);
/// ```
pub fn correction_moves(tokens: &[f64], rate: f64) -> Vec<f64> {
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let of = |own: &f64| if *own == mean { 0.0 } else { rate * (mean - own).signum() };
    tokens.iter().map(of).collect()
}

/// Chooses the experts of each token: those with the highest shares, the first of equal ones, weighted by their shares.
///
/// # Source
/// Shazeer et al. (2017), see [`Experts`](crate::Experts); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2, for
/// sigmoids, groups and the correction.
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
    scoring: Scoring,
    /// Number of groups, and of those that a token may use.
    groups: Option<(usize, usize)>,
    factor: f64,
    correction: Option<Tensor>,
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
        Ok(Self {
            name: name.into(),
            per_token,
            normalized: false,
            balanced: true,
            scoring: Scoring::default(),
            groups: None,
            factor: 1.0,
            correction: None,
        })
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

    /// Sets how scores become shares. Default: softmax.
    #[must_use]
    pub fn scoring(self, scoring: Scoring) -> Self {
        Self { scoring, ..self }
    }

    /// Divides the experts into so many groups of adjacent ones; a token uses experts of the `used` groups whose two best experts
    /// have the largest sums of shares. Default: no groups.
    #[must_use]
    pub fn groups(self, groups: usize, used: usize) -> Self {
        Self { groups: Some((groups, used)), ..self }
    }

    /// Sets a factor of all weights. Default: 1.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Adds a number to each expert's share where experts and groups are chosen; weights are without it. It has no gradient: who
    /// balances experts by it moves it between steps, as `girandole::ExpertBalance::bias` does if it is called [`EXPERT_CORRECTION`]
    /// below the router's name. Default: none.
    ///
    /// # Shapes
    /// `(experts)`.
    ///
    /// # Source
    /// Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::{Router, Scoring};
    ///
    /// let correction = Tensor::new(&[0f64, 0.3, 0.], &Device::Cpu)?;
    /// let router = Router::new("gate", 1)?.scoring(Scoring::Sigmoid).corrected(correction);
    /// let routes = router.route(&Tensor::new(&[[0.5f64, 0., -1.]], &Device::Cpu)?)?;
    /// assert_eq!((routes.experts(), routes.weights().to_vec2::<f64>()?), (&[1][..], vec![vec![0.5]]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn corrected(self, correction: Tensor) -> Self {
        Self { correction: Some(correction), ..self }
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
    /// Fewer experts than each token has, or in the groups that it uses; groups of different numbers of experts, or of one; a
    /// correction of another number of experts; scores that are not numbers; dtypes other than f16, bf16, f32 and f64.
    pub fn route(&self, scores: &Tensor) -> Result<Routes> {
        let count = scores.dim(D::Minus1)?;
        let correction = self.correction.as_ref().map(|correction| correction.detach());
        let choice = Choice::new(count, self.per_token, self.groups, correction.as_ref())?;
        let wide = cast(scores, working_dtype("router", scores.dtype())?)?;
        let wide = wide.contiguous()?.reshape(((), count))?;
        let shares = match self.scoring {
            Scoring::Softmax => softmax(&wide)?,
            Scoring::Sigmoid => sigmoid(&wide)?,
        };
        let tokens = shares.dim(0)?;
        let experts = kept_or(tokens * self.per_token, || choice.of_tokens(&shares.detach(), &self.name))?;
        let context = RowContext::current();
        let recorded = match &context.balance {
            None => None,
            Some(balance) => {
                let rows = if scores.rank() > 2 { scores.dim(0)? } else { 1 };
                let (of, probabilities) = ((&experts[..], self.per_token), self.probabilities(&shares)?);
                let routed = Routed::new(&context, &self.name, (&probabilities, rows), of)?;
                let recorded = balance.record(&routed)?;
                self.balanced.then_some(recorded)
            }
        };
        let weights = self.select(&shares, &experts, recorded)?;
        Ok(Routes { weights, experts: experts.into(), per_token: self.per_token, count })
    }

    /// Returns the shares of all experts with a sum of 1.
    fn probabilities(&self, shares: &Tensor) -> Result<Tensor> {
        let shares = shares.detach();
        match self.scoring {
            Scoring::Softmax => Ok(shares),
            Scoring::Sigmoid => shares.broadcast_div(&shares.sum_keepdim(1)?),
        }
    }

    /// Returns the gradient by the shares of one by their probabilities.
    fn of_shares(&self, shares: &Tensor, gradient: Tensor) -> Result<Tensor> {
        match self.scoring {
            Scoring::Softmax => Ok(gradient),
            Scoring::Sigmoid => {
                let mean = (&gradient * self.probabilities(shares)?)?.sum_keepdim(1)?;
                gradient.broadcast_sub(&mean)?.broadcast_div(&shares.detach().sum_keepdim(1)?)
            }
        }
    }

    /// Returns the weights of the chosen experts.
    fn select(&self, shares: &Tensor, experts: &[u32], recorded: Option<Recorded>) -> Result<Tensor> {
        /// Keeps sums above 0, as in transformers. It changes no sum of shares of a softmax.
        const LEAST: f64 = 1e-20;
        let shape = (shares.dim(0)?, self.per_token);
        let experts = Tensor::from_slice(experts, shape, shares.device())?;
        let chosen = shares.detach().gather(&experts, 1)?;
        let sums = (chosen.sum_keepdim(1)? + LEAST)?;
        let kept = if self.normalized { chosen.broadcast_div(&sums)? } else { chosen };
        let scale = |x: Tensor| if self.factor == 1.0 { Ok(x) } else { x * self.factor };
        // Its memory is moved to the result.
        let weights = scale(kept.clone())?.force_contiguous()?;
        let router = self.clone();
        explicit_op1("select_experts", [shares], weights, move |[shares], gradient| {
            let gradient = gradient.detach().contiguous()?;
            let gradient = if router.factor == 1.0 { gradient } else { (gradient * router.factor)? };
            let gradient = match router.normalized {
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
            let own = balance.map_or_else(|| shares.zeros_like(), |of| router.of_shares(shares, of))?;
            Ok([Some(own.scatter_add(&experts, &gradient, 1)?)])
        })
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

    /// The experts of each token, the best first, token by token.
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
