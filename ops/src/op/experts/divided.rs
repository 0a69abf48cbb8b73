//! Experts that are divided over ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, Var};

use super::order::Groups;
use crate::tape::explicit_op2;
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
}

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
        let arrived = self.exchange.rows(rows, &self.sent, &self.received)?;
        self.permuted(arrived, &self.arrivals)
    }

    fn back(&self, rows: &Tensor) -> Result<Tensor> {
        let leaving = self.permuted(rows.clone(), &self.places)?;
        self.exchange.rows(&leaving, &self.received, &self.sent)
    }

    fn permuted(&self, rows: Tensor, from: &[u32]) -> Result<Tensor> {
        match self.is_sorted {
            true => Ok(rows),
            false => rows.index_select(&Tensor::new(from, rows.device())?, 0),
        }
    }
}
