//! Rows that are divided over ranks by position.

use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;

use crate::{Error, Result};

/// Rows of which each rank has some places (context parallelism): in a scope of a [`RowContext`](crate::RowContext) with them,
/// tensors of shape `(batch, places, ..)` hold this rank's places, in ascending order, and everything that depends on the whole
/// row is computed as if one rank had it. [`attention`](crate::attention) sees the keys and values of all ranks;
/// [`Rotary`](crate::Rotary) embedding and [`Dropout::by_row`](crate::Dropout::by_row) go by the place in the row. All other
/// operations of a model must compute each place by itself.
///
/// A model with position embeddings of its own takes its [`RowContext::positions`](crate::RowContext::positions).
///
/// # Cost
/// Clones share the numbers.
#[derive(Clone)]
pub struct DividedRows(Arc<Inner>);

struct Inner {
    /// For each rank, its places in ascending order.
    places: Vec<Vec<u32>>,
    len: usize,
    exchange: Arc<dyn RowExchange>,
}

/// What ranks with parts of the same rows exchange. All of them run the same operations in the same order, also in backward.
pub trait RowExchange: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Begins to send the tensors of `outgoing` to a rank, and to fill those of `incoming` with what a rank sends. Tensors are
    /// contiguous, and the sender's have the receiver's shapes and dtypes; there may be none.
    ///
    /// # Errors
    /// Failures of communication.
    fn begin(
        &self,
        outgoing: (usize, Vec<Tensor>),
        incoming: (usize, Vec<Tensor>),
    ) -> candle_core::Result<Box<dyn PendingExchange>>;
}

/// An exchange that was begun.
pub trait PendingExchange: Send {
    /// Waits until the tensors are filled, and those that are sent may be changed.
    ///
    /// # Errors
    /// Failures of communication.
    fn wait(self: Box<Self>) -> candle_core::Result<()>;
}

impl DividedRows {
    /// Rows of which each rank has these places: together all from 0 on, each once.
    ///
    /// # Errors
    /// [`Error::UnfitDivision`] for a place that is missing or given twice, a rank without places, or places of a rank that do
    /// not ascend.
    pub fn new(places: Vec<Vec<u32>>, exchange: Arc<dyn RowExchange>) -> Result<Self> {
        let unfit = |problem: String| Err(Error::UnfitDivision { operation: "a division of rows", problem });
        let len = places.iter().map(Vec::len).sum();
        if let Some(rank) = places.iter().position(Vec::is_empty) {
            return unfit(format!("rank {rank} has no place of {len}: give each rank one at least"));
        }
        let mut found = vec![false; len];
        for (rank, own) in places.iter().enumerate() {
            for (at, place) in own.iter().enumerate() {
                let is_new =
                    found.get_mut(*place as usize).is_some_and(|found| !std::mem::replace(found, true));
                if !is_new || (at > 0 && own[at - 1] >= *place) {
                    return unfit(format!(
                        "place {place} of rank {rank}: give each of {len} once, in ascending order"
                    ));
                }
            }
        }
        if exchange.rank() >= places.len() {
            return unfit(format!("rank {} of {}", exchange.rank(), places.len()));
        }
        Ok(Self(Arc::new(Inner { places, len, exchange })))
    }

    /// Number of places of a whole row.
    #[expect(clippy::len_without_is_empty, reason = "each rank has a place at least")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.places.len()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.exchange.rank()
    }

    /// The places of a rank, in ascending order.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn places_of(&self, rank: usize) -> &[u32] {
        &self.0.places[rank]
    }

    /// The places of this rank, in ascending order.
    pub fn places(&self) -> &[u32] {
        self.places_of(self.rank())
    }

    /// This rank's places of whole rows.
    ///
    /// # Shapes
    /// `(batch, length, ..)` to `(batch, places, ..)`.
    ///
    /// # Errors
    /// Rows of another length; those of candle.
    pub fn part_of(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if x.dims().get(1) != Some(&self.len()) {
            let problem = format!("a tensor of shape {:?}: give (rows, {}, ..)", x.dims(), self.len());
            return Err(Error::UnfitDivision { operation: "a part of rows", problem }.into());
        }
        let places = Tensor::new(self.places(), x.device())?;
        x.contiguous()?.index_select(&places, 1)
    }

    /// Whole rows of which each rank gives its places, on all ranks.
    ///
    /// # Shapes
    /// `(batch, places, ..)` to `(batch, length, ..)`; gradients do not go through.
    ///
    /// # Cost
    /// Sends this rank's places to each other rank.
    ///
    /// # Errors
    /// A tensor of other places; those of candle, and failures of communication.
    pub fn whole_of(&self, own: &Tensor) -> candle_core::Result<Tensor> {
        let own = self.own(own)?;
        let (rank, ranks) = (self.rank(), self.ranks());
        let mut parts: Vec<Tensor> = Vec::with_capacity(ranks);
        for of in 0..ranks {
            let mut dims = own.dims().to_vec();
            dims[1] = self.places_of(of).len();
            parts.push(if of == rank {
                own.clone()
            } else {
                Tensor::zeros(dims, own.dtype(), own.device())?
            });
        }
        for step in 1..ranks {
            let [to, from] = [(rank + step) % ranks, (rank + ranks - step) % ranks];
            self.exchange().begin((to, vec![own.clone()]), (from, vec![parts[from].clone()]))?.wait()?;
        }
        let mut at = vec![0u32; self.len()];
        self.0.places.iter().flatten().zip(0..).for_each(|(place, index)| at[*place as usize] = index);
        Tensor::cat(&parts, 1)?.index_select(&Tensor::new(at, own.device())?, 1)
    }

    /// The last place of the whole rows, on all ranks.
    ///
    /// # Shapes
    /// `(batch, places, ..)` to `(batch, 1, ..)`; gradients do not go through.
    ///
    /// # Errors
    /// Those of [`whole_of`](Self::whole_of).
    pub fn last_of(&self, own: &Tensor) -> candle_core::Result<Tensor> {
        let own = self.own(own)?;
        let last = own.narrow(1, own.dim(1)? - 1, 1)?.force_contiguous()?;
        let has_last = |rank: &usize| self.places_of(*rank).last() == Some(&(self.len() as u32 - 1));
        let others = (0..self.ranks()).filter(|rank| *rank != self.rank());
        if has_last(&self.rank()) {
            for to in others {
                self.exchange().begin((to, vec![last.clone()]), (to, Vec::new()))?.wait()?;
            }
        } else if let Some(from) = others.into_iter().find(has_last) {
            self.exchange().begin((from, Vec::new()), (from, vec![last.clone()]))?.wait()?;
        }
        Ok(last)
    }

    /// Checks that a tensor has this rank's places, without its graph.
    fn own(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if x.dims().get(1) != Some(&self.places().len()) {
            let problem =
                format!("a tensor of shape {:?}: give (rows, {}, ..)", x.dims(), self.places().len());
            return Err(Error::UnfitDivision { operation: "rows of all ranks", problem }.into());
        }
        x.detach().contiguous()
    }

    pub(crate) fn exchange(&self) -> &dyn RowExchange {
        &*self.0.exchange
    }
}

impl PartialEq for DividedRows {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.places == other.0.places && self.rank() == other.rank())
    }
}

impl Eq for DividedRows {}

impl fmt::Debug for DividedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DividedRows({} places, rank {} of {})", self.len(), self.rank(), self.ranks())
    }
}
