//! Elastic groups: groups that lose ranks and admit new ones while the job runs.

use std::sync::Arc;

use crate::{Communicator, Error, Result};

/// A group that continues without lost ranks, and admits new ones. Returned by [`Communicator::elastic`].
pub trait ElasticGroup {
    /// Returns a new group of the remaining ranks of this one, in the same order. Each of them must call this once the
    /// group has lost a rank ([`crate::Error::is_loss`]). Works in progress end with that error; messages of the lost
    /// rank cannot reach the new group. Groups that were made from this one end: on ranks that are still at work in one
    /// of them, operations fail with the error of a loss. A rank that is alive and has not called this yet is waited for until a quarter
    /// of the time-out is left, or 10 s if that is less. In that remaining time the others form the group without it,
    /// if there are enough of them (see below). The remaining rank with the lowest number leads: as long as it answers,
    /// no group is formed without it.
    ///
    /// A rank that does not answer, because it is stopped or cut off, is excluded if the others are more than half of the
    /// group (ranks that are gone count as missing), or exactly half including the one with the lowest number, or if all
    /// ranks but these are known to have ended. It gets [`crate::Error::Excluded`] when it asks. So there is never a second group. Errors name a rank by the same
    /// number as before ([`Communicator::world_ranks`]).
    ///
    /// The program's state is not synchronised: some ranks may have finished a step that others have not.
    /// `ddp::Ddp::regroup` synchronises a model.
    ///
    /// # Cost
    /// That of the first rendezvous; a rank that was killed is detected at once.
    ///
    /// # Errors
    /// [`crate::Error::Excluded`]; [`crate::Error::Regroup`] if too few ranks came together in time;
    /// [`crate::Error::InvalidArgument`] if the backend, or this group, does not support it: over TCP the group must
    /// have been created with [`crate::TcpConfig::elastic`]; [`crate::Error::Mismatch`] after ranks have called
    /// different operations, since a smaller group would do so again.
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

    /// Returns the loss of a rank of this group that this rank has heard of, if any: ranks that work in a group made from this one hear of
    /// it between two operations. Nothing is sent; the other ranks may not have heard of it yet.
    ///
    /// ```
    /// use comm::{Communicator, Local};
    ///
    /// Local::run_shared(2, |comm| {
    ///     if comm.rank() == 1 {
    ///         return Ok(()); // This one leaves.
    ///     }
    ///     while comm.elastic()?.lost().is_none() {
    ///         std::thread::yield_now();
    ///     }
    ///     assert!(comm.elastic()?.lost().is_some_and(|lost| lost.is_loss()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn lost(&self) -> Option<Error>;

    /// Returns the number of processes that wait to be admitted to this group, as far as this rank knows. Only rank 0
    /// knows.
    fn waiting(&self) -> usize;

    /// Returns a new group of the ranks of this group and of those that wait to be admitted, in the order of their
    /// numbers, up to `world_size` ranks in all. Every rank of this group must call it, at the same position among its operations, while none is in
    /// progress. The new ranks call [`crate::Tcp::connect`] with [`crate::Elastic::newcomer`]. A rank that dies
    /// meanwhile is left out.
    ///
    /// # Errors
    /// Those of [`ElasticGroup::shrink`].
    fn grow(&self, world_size: usize) -> Result<Arc<dyn Communicator>>;
}
