//! Losses that keep the experts of a model equally loaded, and how many tokens each has had.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Result, Tensor, bail};

use super::routed::{Record, Routed, add};
use crate::lock::lock;

/// The loss that a [`Balance`] adds. In both, for each expert the share of the tokens that have chosen it is multiplied by its mean
/// probability; the loss is the sum over experts, times their number. Both are least where all experts are used equally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalanceLoss {
    /// Over each row and each router by itself, divided by the number of experts of a token, summed over routers; the mean over
    /// rows. It does not depend on how rows are distributed over micro-batches and ranks.
    ///
    /// # Source
    /// DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), equations 17 to 20.
    Row,
    /// Over all tokens of a micro-batch, of all routers and ranks together, as `load_balancing_loss_func` of `transformers`; the
    /// mean over micro-batches. With other micro-batches it is another loss.
    ///
    /// # Source
    /// Fedus et al., "Switch Transformers" (2021), equations 4 to 6.
    Batch,
}

/// What [`Router`](crate::Router)s add to the gradients of a micro-batch to balance their experts, and what they record of it: a
/// part of the [`RowContext`](crate::RowContext) in training.
///
/// The gradient is added in backward of the router, so that it is also that of pipeline stages without the loss. It needs the
/// counts of all tokens: after forward of the micro-batch on a rank call [`end_forward`](Self::end_forward), which begins to sum
/// them over ranks; backward waits for the sums. Recomputation records nothing twice.
///
/// # Cost
/// On each rank the sums are twice as many numbers as there are experts; with [`BalanceLoss::Row`] of rows that are divided over
/// ranks, for each row and router. Clones share the record.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::{Balance, BalanceConfig, BalanceLoss, Router, RowContext};
///
/// let config = BalanceConfig { loss: Some(BalanceLoss::Batch), ..BalanceConfig::new(2) };
/// let balance = Balance::new(config);
/// let context = RowContext { balance: Some(balance.clone()), ..RowContext::default() };
/// // Two tokens, both of which choose the first of two experts with probability 1.
/// let scores = Tensor::new(&[[50f64, 0.], [50., 0.]], &Device::Cpu)?;
/// context.scope(|| Router::new("gate", 1)?.route(&scores))?;
/// balance.end_forward()?;
/// assert_eq!(balance.loads()[0].1, [2.0, 0.0]);
/// assert_eq!(balance.loss()?, 2.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Balance(Arc<Inner>);

/// Configuration of a [`Balance`].
#[derive(Debug, Clone)]
pub struct BalanceConfig {
    /// The loss. Default: none, only the loads are recorded.
    pub loss: Option<BalanceLoss>,
    /// Factor of the loss: its coefficient, divided by the number of micro-batches ([`BalanceLoss::Batch`]) or rows
    /// ([`BalanceLoss::Row`]) of the step, of all ranks. Default: 1.
    pub weight: f64,
    /// Factor of the gradient besides, such as the number of ranks whose gradients are averaged. Default: 1.
    pub gradient: f64,
    /// Number of experts of each router.
    pub experts: usize,
    /// The ranks over which counts are summed: with [`BalanceLoss::Batch`] those that have other rows, other places, or other
    /// routers; with [`BalanceLoss::Row`] those that have other places. Default: none.
    pub ranks: Option<Arc<dyn RankSum>>,
}

impl BalanceConfig {
    /// Loads of so many experts are recorded, without a loss.
    pub fn new(experts: usize) -> Self {
        Self { loss: None, weight: 1.0, gradient: 1.0, experts, ranks: None }
    }
}

/// Sums numbers over ranks. All ranks call it in the same order.
pub trait RankSum: fmt::Debug + Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Begins to sum; does not wait for other ranks.
    ///
    /// # Errors
    /// Failures of communication.
    fn begin(&self, numbers: Vec<f64>) -> Result<Box<dyn PendingSum>>;
}

/// Sums that were begun.
pub trait PendingSum: Send {
    /// Waits for the sums.
    ///
    /// # Errors
    /// Failures of communication.
    fn wait(self: Box<Self>) -> Result<Vec<f64>>;
}

struct Inner {
    config: BalanceConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order of forward.
    records: Vec<Record>,
    sums: Sums,
}

#[derive(Default)]
enum Sums {
    /// Forward has not ended.
    #[default]
    Open,
    Begun(Box<dyn PendingSum>),
    Known(Known),
    Failed,
}

/// The loss, and its derivatives by the probabilities of a token.
struct Known {
    loss: f64,
    of: Derivatives,
}

enum Derivatives {
    None,
    /// Of each expert, in all rows and routers.
    Common(Vec<f64>),
    /// Of each row and expert, by router.
    Rows(Vec<Vec<f64>>),
}

impl Balance {
    /// A balance of one micro-batch.
    pub fn new(config: BalanceConfig) -> Self {
        Self(Arc::new(Inner { config, state: Mutex::default() }))
    }

    /// Another of the same configuration, for a forward pass that is repeated.
    #[must_use]
    pub fn renewed(&self) -> Self {
        Self::new(self.0.config.clone())
    }

    /// Ends forward of the micro-batch on this rank: begins to sum over ranks. Every rank must call it, once for each
    /// micro-batch, in the same order.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn end_forward(&self) -> Result<()> {
        let mut state = self.state();
        let own = state.numbers(self.0.config.loss, self.0.config.experts);
        state.sums = match &self.0.config.ranks {
            Some(ranks) if self.0.config.loss.is_some() => Sums::Begun(ranks.begin(own)?),
            _ => Sums::Known(self.known(&state.records, own)?),
        };
        Ok(())
    }

    /// The number of tokens of each expert on this rank, of each router, in the order of forward.
    pub fn loads(&self) -> Vec<(Arc<str>, Vec<f64>)> {
        let of = |record: &Record| {
            let mut load = vec![0.0; record.experts];
            record.counts.chunks(record.experts).for_each(|row| add(&mut load, row));
            (record.router.clone(), load)
        };
        self.state().records.iter().map(of).collect()
    }

    /// This rank's share of the loss, with its weight: the sum over all ranks, with those that have other rows, places or
    /// routers, is the micro-batch's share of the step's loss.
    ///
    /// # Errors
    /// Forward that has not ended; failures of communication.
    pub fn loss(&self) -> Result<f64> {
        let mut state = self.state();
        let ranks = self.0.config.ranks.as_ref().map_or(1, |ranks| ranks.ranks());
        Ok(self.wait(&mut state)?.loss / ranks as f64)
    }

    /// Records the choices of a router. The same once more (recomputation) changes nothing.
    pub(crate) fn record(&self, tokens: &Routed<'_>) -> Result<Recorded> {
        let (record, experts) = (tokens.record()?, self.0.config.experts);
        if record.experts != experts {
            bail!(
                "the router {} has {} experts, its balance {experts}: give as many",
                record.router,
                record.experts
            )
        }
        let mut state = self.state();
        let known = state.records.iter().position(|known| known.router == record.router);
        let number = match known {
            Some(number) => number,
            None if matches!(state.sums, Sums::Open) => {
                state.records.push(record);
                state.records.len() - 1
            }
            None => bail!("the router {} was not used before the end of forward", record.router),
        };
        Ok(Recorded { balance: self.clone(), number, dims: tokens.dims(), used: tokens.used.clone() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    fn wait<'a>(&self, state: &'a mut State) -> Result<&'a Known> {
        if let Sums::Begun(_) = &state.sums
            && let Sums::Begun(begun) = std::mem::replace(&mut state.sums, Sums::Failed)
        {
            state.sums = Sums::Known(self.known(&state.records, begun.wait()?)?);
        }
        match &state.sums {
            Sums::Known(known) => Ok(known),
            Sums::Failed => bail!("the counts of experts could not be summed over ranks"),
            _ => bail!("Balance::end_forward must be called between forward and backward"),
        }
    }

    /// Computes the loss and its derivatives of the sums over ranks.
    fn known(&self, records: &[Record], sums: Vec<f64>) -> Result<Known> {
        let BalanceConfig { loss, weight, .. } = self.0.config;
        match loss {
            None => Ok(Known { loss: 0.0, of: Derivatives::None }),
            Some(BalanceLoss::Batch) => {
                let Some((tokens, numbers)) = sums.split_last() else { bail!("no counts of experts") };
                let (counts, probabilities) = numbers.split_at(numbers.len() / 2);
                let factor = match *tokens {
                    0.0 => 0.0,
                    tokens => weight * counts.len() as f64 / (tokens * tokens),
                };
                let (loss, of) = product(factor, counts, probabilities);
                Ok(Known { loss, of: Derivatives::Common(of) })
            }
            Some(BalanceLoss::Row) => {
                let (mut rest, mut total, mut all) = (&sums[..], 0.0, Vec::new());
                for Record { experts, per_token, tokens, counts, .. } in records {
                    let [of_tokens, of_counts] = [tokens.len(), counts.len()];
                    let mut take = |len: usize| {
                        let (own, others) = rest.split_at(len.min(rest.len()));
                        rest = others;
                        own
                    };
                    let (tokens, counts, probabilities) = (take(of_tokens), take(of_counts), take(of_counts));
                    let mut of = Vec::with_capacity(of_counts);
                    for ((tokens, counts), probabilities) in
                        tokens.iter().zip(counts.chunks(*experts)).zip(probabilities.chunks(*experts))
                    {
                        let factor = match *tokens {
                            0.0 => 0.0,
                            tokens => weight * *experts as f64 / (*per_token as f64 * tokens * tokens),
                        };
                        let (loss, of_row) = product(factor, counts, probabilities);
                        total += loss;
                        of.extend(of_row);
                    }
                    all.push(of);
                }
                Ok(Known { loss: total, of: Derivatives::Rows(all) })
            }
        }
    }
}

impl State {
    /// What is to be summed over ranks.
    fn numbers(&self, loss: Option<BalanceLoss>, experts: usize) -> Vec<f64> {
        let mut numbers = Vec::new();
        match loss {
            None => {}
            Some(BalanceLoss::Row) => {
                for record in &self.records {
                    numbers.extend_from_slice(&record.tokens);
                    numbers.extend_from_slice(&record.counts);
                    numbers.extend_from_slice(&record.probabilities);
                }
            }
            Some(BalanceLoss::Batch) => {
                numbers.resize(2 * experts + 1, 0.0);
                for record in &self.records {
                    let (counts, others) = numbers.split_at_mut(experts);
                    record.counts.chunks(experts).for_each(|row| add(counts, row));
                    record.probabilities.chunks(experts).for_each(|row| add(&mut others[..experts], row));
                    others[experts] += record.tokens.iter().sum::<f64>();
                }
            }
        }
        numbers
    }
}

/// Returns the sum of `factor` times the products, and its derivatives by the probabilities.
fn product(factor: f64, counts: &[f64], probabilities: &[f64]) -> (f64, Vec<f64>) {
    let of: Vec<f64> = counts.iter().map(|count| factor * count).collect();
    (of.iter().zip(probabilities).map(|(of, probability)| of * probability).sum(), of)
}

/// What was recorded of a router's tokens, for backward.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    balance: Balance,
    /// Of the router.
    number: usize,
    /// Rows and tokens.
    dims: [usize; 2],
    used: Option<Arc<[bool]>>,
}

impl Recorded {
    /// Returns the gradient of the loss by the probabilities of all tokens and experts; `None` without a loss.
    pub(crate) fn gradient(&self, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
        let mut state = self.balance.state();
        let [rows, tokens] = self.dims;
        let (scale, len) = (self.balance.0.config.gradient, tokens / rows.max(1));
        let of_rows = match &self.balance.wait(&mut state)?.of {
            Derivatives::None => return Ok(None),
            Derivatives::Common(of) => of.repeat(rows),
            Derivatives::Rows(all) => all[self.number].clone(),
        };
        let experts = of_rows.len() / rows.max(1);
        let mut gradient = Vec::with_capacity(tokens * experts);
        for token in 0..tokens {
            let factor = match &self.used {
                Some(used) if !used[token] => 0.0,
                _ => scale,
            };
            let own = &of_rows[token / len * experts..][..experts];
            gradient.extend(own.iter().map(|of| factor * of));
        }
        Ok(Some(
            Tensor::from_vec(gradient, (tokens, experts), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)?,
        ))
    }
}

impl PartialEq for Balance {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Balance {}

impl fmt::Debug for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Balance({:?})", self.0.config)
    }
}
