//! Supervisor trait: the executor's interface to failure detection.

use std::fmt::Debug;
use std::time::Duration;

use crate::Error;
use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::base::members::Members;
use crate::failure::diagnosis::Question;
use crate::transport::links::Wait;

/// A rank's view of the whole group: it reports what this rank does, and finds the cause of a failure.
pub(crate) trait Supervisor: Send + Sync + Debug {
    /// The program has called an operation of this group. It is using groups that have not failed, so failures of other
    /// groups that were reported to it are forgotten.
    fn on_program_call(&self) {}

    /// Records that this rank enters a call.
    fn begin(&self, call: Fingerprint);

    /// Records the links that the current call has been waiting for.
    fn wait_for(&self, waits: &[Wait]);

    /// Records that the call has ended, successfully or not.
    fn end(&self);

    /// Returns the cause for which the group has failed, if it has. Cheap.
    fn failure(&self) -> Option<Cause>;

    /// Looks for a cause, in bounded time. If the question is fatal and a cause is found, the whole group fails with
    /// it, on every rank.
    fn ask(&self, question: Question) -> Option<Cause>;

    /// Records that this rank cannot go on for a reason of its own, which its goodbyes then tell.
    fn announce(&self, reason: &str);

    /// Closes the streams after a call has failed, if nobody else reports the cause to the other ranks, and sends it to
    /// them first. `part` returns the ranks that can recognise that message as a failure report.
    fn close_streams(&self, _part: &mut dyn FnMut() -> Vec<usize>) {}

    /// Returns this rank's number in the group.
    fn rank(&self) -> usize;

    /// Returns the members of the group.
    fn members(&self) -> &Members;

    /// Returns the host name of a rank.
    fn host(&self, rank: usize) -> String;

    /// The time-out of a call, as counted in [`crate::failure::timeouts`].
    fn timeout(&self) -> Duration;

    /// After this long, counted in the same way, a warning names the rank waited for.
    fn slow_warning(&self) -> Duration;

    /// Returns the error of a call that was interrupted by `cause`.
    fn error(&self, cause: &Cause, operation: String) -> Error {
        let operation = operation + &self.members().suffix();
        cause.to_error(self.rank(), operation, self.timeout(), self.members(), |rank| self.host(rank))
    }
}
