//! Handle of an operation in progress.

use std::sync::Arc;

use crate::Result;
use crate::engine::queue::PendingResult;

/// An operation that was submitted. It keeps the elements of its tensors alive, but not their autograd graph, and runs
/// whether or not anybody waits for it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use comm::{Communicator, Local, ReduceOp};
///
/// let results = Local::run(2, |comm| {
///     let tensor = Tensor::ones(3, DType::F32, &Device::Cpu)?;
///     let work = comm.all_reduce(&tensor, ReduceOp::Sum)?;
///     // ... compute something else meanwhile ...
///     work.wait()?;
///     Ok(tensor.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(results, vec![vec![2.0; 3]; 2]);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the result of an operation is known only after `wait`"]
pub struct Work {
    ticket: Arc<PendingResult>,
}

impl Work {
    pub(crate) fn new(ticket: Arc<PendingResult>) -> Self {
        Self { ticket }
    }

    /// Waits until the operation is done. If it has not begun yet, it runs on the calling thread.
    ///
    /// # Errors
    /// The error that ended the operation: see [`crate::Error`]. After a failure of the transport the whole group has
    /// failed.
    pub fn wait(self) -> Result<()> {
        self.ticket.wait()
    }

    /// Returns whether [`Work::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }
}
