//! Groups that change while they run.

use std::sync::Arc;

use crate::{Communicator, Result};

/// A group that goes on without ranks that are lost, and lets new ones in: [`Communicator::elastic`] gives it.
pub trait ElasticGroup {
    /// The ranks of this group that are left, as a new group, in the same order: to be called on each of them once the group
    /// has lost a rank ([`crate::Error::is_loss`]). Works that are under way end with that error; the lost rank's messages
    /// cannot reach the new group. A rank is waited for that is there and has not called this yet: until a quarter of the
    /// time-out is left, or 10 s where that is less, in which the others go on without it if they are enough, as below. The
    /// lowest rank that is left brings the others together: for as long as it answers, nobody goes on without it.
    ///
    /// A rank that does not answer, stopped or cut off, is left behind if the others are more than half of those that are
    /// not gone for certain, or half with the lowest of all; it gets [`crate::Error::Excluded`] when it asks. So there is
    /// never a second group. Ranks keep the number by which errors name them ([`Communicator::world_ranks`]).
    ///
    /// The new group knows nothing of the program's state: some ranks may have finished a step that others have not.
    /// `ddp::Ddp::regroup` takes a model along.
    ///
    /// # Cost
    /// That of the first meeting; a rank that was killed is missed at once.
    ///
    /// # Errors
    /// [`crate::Error::Excluded`]; [`crate::Error::Regroup`] where too few came together in time;
    /// [`crate::Error::InvalidArgument`] where the backend, or this group, cannot do it: over TCP it must have been made with
    /// [`crate::TcpConfig::elastic`]; ranks that called different operations ([`crate::Error::Mismatch`]): a smaller group
    /// would do so again.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{Device, Tensor};
    /// use comm::{Communicator, Local, ReduceOp};
    ///
    /// let sums = Local::run_shared(3, |mut comm: Arc<dyn Communicator>| {
    ///     let mut sums = vec![];
    ///     for step in 0..4 {
    ///         if comm.world_ranks()[comm.rank()] == 1 && step == 2 {
    ///             return Ok(sums); // This one leaves.
    ///         }
    ///         loop {
    ///             let one = Tensor::new(&[1u32], &Device::Cpu)?;
    ///             match comm.all_reduce(&one, ReduceOp::Sum).and_then(|work| work.wait()) {
    ///                 Ok(()) => break sums.push(one.to_vec1::<u32>()?[0]),
    ///                 Err(error) if error.is_loss() => comm = comm.elastic()?.shrink()?,
    ///                 Err(error) => return Err(error),
    ///             }
    ///         }
    ///     }
    ///     Ok(sums)
    /// })?;
    /// assert_eq!(sums, [vec![3, 3, 2, 2], vec![3, 3], vec![3, 3, 2, 2]]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn shrink(&self) -> Result<Arc<dyn Communicator>>;

    /// Processes that wait to be let into this group, as far as this rank knows: rank 0 does.
    fn waiting(&self) -> usize;

    /// The ranks of this group, and after them those that wait to be let in, up to `world_size` in all, as a new group. To be
    /// called on every rank of this group, at the same place among their operations, while none is under way; the newcomers
    /// are in [`crate::Tcp::connect`] with [`crate::Elastic::newcomer`]. A rank that dies meanwhile is left out.
    ///
    /// # Errors
    /// Those of [`ElasticGroup::shrink`].
    fn grow(&self, world_size: usize) -> Result<Arc<dyn Communicator>>;
}
