//! What the executor needs to know of the other ranks beside their bytes.

use std::fmt::Debug;
use std::time::Duration;

use crate::Error;
use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::base::members::Members;
use crate::blame::verdict::Question;
use crate::transport::links::Wait;

/// A rank's view of the whole group: it tells what this rank does, and finds out who is to blame.
pub(crate) trait Supervisor: Send + Sync + Debug {
    /// The program has called an operation of this group: it goes on, whatever it was told of other groups.
    fn goes_on(&self) {}

    /// This rank enters a call.
    fn begin(&self, call: Fingerprint);

    /// The call has waited for a moment, for these.
    fn wait_for(&self, waits: &[Wait]);

    /// The call ended, well or not.
    fn end(&self);

    /// The cause for which the group has failed, if it has. Cheap.
    fn failure(&self) -> Option<Cause>;

    /// Looks for a cause, in bounded time. Where there is one, the whole group has failed with it, and every rank knows.
    fn ask(&self, question: Question) -> Option<Cause>;

    /// A call has failed. Where nobody else tells the others why, this does, and ends the streams; `part` gives the ranks
    /// that will take it for what it is.
    fn hang_up(&self, _part: &mut dyn FnMut() -> Vec<usize>) {}

    /// This rank.
    fn rank(&self) -> usize;

    /// Who is in the group.
    fn members(&self) -> &Members;

    /// The host name of a rank.
    fn host(&self, rank: usize) -> String;

    /// The longest that a call may go on, as [`crate::blame::patience`] counts.
    fn timeout(&self) -> Duration;

    /// After this long, counted in the same way, a warning names the rank that is waited for.
    fn slow_warning(&self) -> Duration;

    /// The error of a call that was interrupted by `cause`.
    fn error(&self, cause: &Cause, operation: String) -> Error {
        let operation = operation + &self.members().place();
        cause.to_error(self.rank(), operation, self.timeout(), self.members(), |rank| self.host(rank))
    }
}
