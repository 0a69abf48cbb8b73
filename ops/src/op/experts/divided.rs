//! Experts that are divided over ranks.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, Var, bail};

use super::order::Groups;
use crate::tape::{explicit_op2, explicit_op3};
use crate::{Error, kept_result};

/// Experts of which each rank has some (expert parallelism), for [`Experts::divided`](super::Experts::divided): the rows of a
/// token go to the ranks of its experts, and what these compute comes back.
///
/// The ranks have different tokens. Each has a range of the experts, as equal as possible.
///
/// # Cost
/// Clones share the exchange.
#[derive(Clone)]
pub struct DividedExperts {
    count: usize,
    exchange: Arc<dyn ExpertExchange>,
}

/// What ranks with different experts exchange. All of them run the same operations in the same order, also in backward.
pub trait ExpertExchange: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Returns the numbers of all ranks, of which each gives equally many.
    ///
    /// # Errors
    /// Failures of communication.
    fn numbers(&self, own: &[u32]) -> Result<Vec<Vec<u32>>>;

    /// Sends the first `sent[0]` rows of a contiguous matrix to rank 0, the next `sent[1]` to rank 1 and so on. Returns
    /// `received[0]` rows of rank 0, then `received[1]` of rank 1 and so on, as a tensor that nobody else has.
    ///
    /// # Errors
    /// Failures of communication.
    fn rows(&self, rows: &Tensor, sent: &[usize], received: &[usize]) -> Result<Tensor>;

    /// As [`rows`](Self::rows), but returns at once what waits for the rows, so that something else is computed meanwhile. By default
    /// it waits itself.
    ///
    /// # Errors
    /// Failures of communication, here or where they are waited for.
    fn start_rows(&self, rows: &Tensor, sent: &[usize], received: &[usize]) -> Result<RowsOnTheWay> {
        let rows = self.rows(rows, sent, received)?;
        Ok(Box::new(|| Ok(rows)))
    }
}

/// Waits for the rows of [`ExpertExchange::start_rows`], and returns them.
pub type RowsOnTheWay = Box<dyn FnOnce() -> Result<Tensor> + Send>;

impl DividedExperts {
    /// Divides `count` experts over the ranks of an exchange.
    ///
    /// # Errors
    /// Fewer experts than ranks.
    pub fn new(count: usize, exchange: Arc<dyn ExpertExchange>) -> Result<Self> {
        if count < exchange.ranks() || exchange.ranks() == 0 {
            let (of, field, got) = ("DividedExperts", "the number of experts", count as f64);
            let help = "give each rank one at least";
            return Err(Error::InvalidConfig { of, field, got, help }.into());
        }
        Ok(Self { count, exchange })
    }

    /// Number of experts of all ranks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The experts of this rank.
    pub fn own(&self) -> Range<usize> {
        self.of_rank(self.exchange.rank())
    }

    fn of_rank(&self, rank: usize) -> Range<usize> {
        let ranks = self.exchange.ranks();
        rank * self.count / ranks..(rank + 1) * self.count / ranks
    }

    /// The part of an expert's gradient that a rank's tokens are, as all ranks' tokens come to it: with it, the mean over ranks
    /// with different tokens is that of the ranks that have the expert.
    pub(super) fn share(&self) -> f64 {
        1.0 / self.exchange.ranks() as f64
    }

    /// Tells all ranks how many rows each has for each expert.
    pub(super) fn passage(&self, groups: &Groups) -> Result<Passage> {
        let own: Vec<u32> = groups.of_experts().map(|rows| rows.len() as u32).collect();
        let all = self.exchange.numbers(&own)?;
        let sum = |numbers: &[u32], experts: Range<usize>| {
            numbers[experts].iter().map(|number| *number as usize).sum::<usize>()
        };
        let experts = self.own();
        let sent = (0..self.exchange.ranks()).map(|rank| sum(&own, self.of_rank(rank))).collect();
        let received: Vec<usize> = all.iter().map(|of_rank| sum(of_rank, experts.clone())).collect();
        let groups = Groups::of_counts(
            experts.clone().map(|expert| all.iter().map(|of_rank| of_rank[expert] as usize).sum::<usize>()),
        );
        // Rows come by rank, and those of a rank by expert.
        let mut next = groups.of_experts().map(|rows| rows.start as u32).collect::<Vec<_>>();
        let mut places = Vec::with_capacity(received.iter().sum());
        for of_rank in &all {
            for (next, number) in next.iter_mut().zip(&of_rank[experts.clone()]) {
                places.extend(*next..*next + number);
                *next += number;
            }
        }
        let mut arrivals = vec![0u32; places.len()];
        places.iter().zip(0..).for_each(|(place, arrival)| arrivals[*place as usize] = arrival);
        let is_sorted = places.is_sorted();
        let moves = Moves { exchange: self.exchange.clone(), sent, received, places, arrivals, is_sorted };
        Ok(Passage { groups, moves: Arc::new(moves) })
    }
}

impl fmt::Debug for DividedExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DividedExperts({:?} of {}, {:?})", self.own(), self.count, self.exchange)
    }
}

/// The way of rows to the ranks of their experts, and back.
pub(super) struct Passage {
    groups: Groups,
    moves: Arc<Moves>,
}

struct Moves {
    exchange: Arc<dyn ExpertExchange>,
    /// By rank: the rows that this rank has for its experts.
    sent: Vec<usize>,
    /// By rank: the rows that it has for this rank's experts.
    received: Vec<usize>,
    /// For each row that arrives, its place in the order of experts.
    places: Vec<u32>,
    /// For each place, the row.
    arrivals: Vec<u32>,
    /// Whether rows arrive in the order of experts.
    is_sorted: bool,
}

impl Passage {
    /// The rows of this rank's experts, of all ranks.
    pub(super) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Sends rows, sorted by expert, to the ranks that have the experts. Returns those for this rank's, sorted by expert, and then
    /// by the rank that they are from.
    pub(super) fn there(&self, rows: &Tensor) -> Result<Tensor> {
        self.pass("rows_to_experts", rows, Moves::there, Moves::back)
    }

    /// Sends the results of [`there`](Self::there)'s rows back.
    pub(super) fn back(&self, rows: &Tensor) -> Result<Tensor> {
        self.pass("rows_from_experts", rows, Moves::back, Moves::there)
    }

    /// As [`there`](Self::there), and computes `beside` while the rows are on the way; in backward, `beside`'s gradients while theirs
    /// come back. Returns both results. `last` is a tensor to whose gradient `beside`'s are to be added first.
    pub(super) fn there_beside(
        &self,
        rows: &Tensor,
        last: &Tensor,
        beside: impl FnOnce() -> Result<Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let (on_the_way, of_gradient) = (OnTheWay::default(), OnTheWay::default());
        // Two operations, with those of `beside` in between. A recomputed part knows what arrived, and sends nothing.
        let started = kept_result(|known| {
            if known.is_none() {
                on_the_way.set(self.moves.start_there(&rows.detach().contiguous()?)?);
            }
            // So that backward comes to each exchange on all ranks, whatever they train.
            let (device, always) = (rows.device(), Var::zeros((), DType::F32, rows.device())?);
            let back = of_gradient.clone();
            explicit_op3(
                "send_rows_to_experts",
                [rows, last, &always],
                nothing(device)?,
                move |[rows, ..], _| {
                    let gradient = back.wait()?;
                    Ok([rows.track_op().then_some(gradient), None, None])
                },
            )
        })?;
        let other = beside()?;
        // Its argument `other` has backward come here before it comes to `beside`, and `started` to the exchange's end after it.
        let arrived = kept_result(|known| {
            let arrived = match known {
                Some(known) => known.detach().force_contiguous()?,
                None => self.moves.arrived(on_the_way.wait()?)?,
            };
            let moves = self.moves.clone();
            explicit_op2("rows_to_experts", [&started, &other], arrived, move |[started, _], gradient| {
                of_gradient.set(moves.start_back(&gradient.detach().contiguous()?)?);
                Ok([Some(nothing(started.device())?), None])
            })
        })?;
        Ok((arrived, other))
    }

    fn pass(
        &self,
        name: &'static str,
        rows: &Tensor,
        forward: fn(&Moves, &Tensor) -> Result<Tensor>,
        backward: fn(&Moves, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        kept_result(|known| {
            let moved = match known {
                Some(known) => known.detach().force_contiguous()?,
                None => forward(&self.moves, &rows.detach().contiguous()?)?,
            };
            let moves = self.moves.clone();
            // So that backward comes to each exchange on all ranks, whatever they train.
            let always = Var::zeros((), DType::F32, rows.device())?;
            explicit_op2(name, [rows, &always], moved, move |[rows, _], gradient| {
                // Also where nobody needs the result here: the other ranks may.
                let gradient = backward(&moves, &gradient.detach().contiguous()?)?;
                Ok([rows.track_op().then_some(gradient), None])
            })
        })
    }
}

impl Moves {
    fn there(&self, rows: &Tensor) -> Result<Tensor> {
        self.arrived(self.exchange.rows(rows, &self.sent, &self.received)?)
    }

    fn start_there(&self, rows: &Tensor) -> Result<RowsOnTheWay> {
        self.exchange.start_rows(rows, &self.sent, &self.received)
    }

    fn arrived(&self, rows: Tensor) -> Result<Tensor> {
        self.permuted(rows, &self.arrivals)
    }

    fn back(&self, rows: &Tensor) -> Result<Tensor> {
        let leaving = self.permuted(rows.clone(), &self.places)?;
        self.exchange.rows(&leaving, &self.received, &self.sent)
    }

    fn start_back(&self, rows: &Tensor) -> Result<RowsOnTheWay> {
        let leaving = self.permuted(rows.clone(), &self.places)?;
        self.exchange.start_rows(&leaving, &self.received, &self.sent)
    }

    fn permuted(&self, rows: Tensor, from: &[u32]) -> Result<Tensor> {
        match self.is_sorted {
            true => Ok(rows),
            false => rows.index_select(&Tensor::new(from, rows.device())?, 0),
        }
    }
}

/// Rows that one operation sends and another one waits for.
#[derive(Clone, Default)]
struct OnTheWay(Arc<Mutex<Option<RowsOnTheWay>>>);

impl OnTheWay {
    fn set(&self, rows: RowsOnTheWay) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(rows);
    }

    fn wait(&self) -> Result<Tensor> {
        let rows = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match rows {
            Some(rows) => rows(),
            None => bail!("rows of experts: none were sent"),
        }
    }
}

/// What an operation gives that only has a place in the graph.
fn nothing(device: &Device) -> Result<Tensor> {
    Tensor::zeros((), DType::F32, device)
}

#[cfg(test)]
mod tests;
