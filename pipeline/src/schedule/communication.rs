//! Inserts messages between ranks into a table.

use super::{Action, ActionKind, Table};

impl Table {
    /// Returns the table with messages: each result that another rank needs is sent directly after it is computed, and
    /// received directly before it is needed. Existing messages are removed first.
    ///
    /// ```
    /// use pipeline::{Action, ActionKind, Schedule, Table};
    ///
    /// // Two ranks, a stage each, one micro-batch.
    /// let both = |stage| {
    ///     [ActionKind::Forward, ActionKind::Backward].map(|kind| Action { kind, stage, micro_batch: 0 }).to_vec()
    /// };
    /// let table = Table { owners: vec![0, 1], micro_batches: 1, actions: vec![both(0), both(1)] };
    /// assert!(Schedule::new(table.clone()).is_err()); // nothing brings rank 1 its input
    /// assert!(Schedule::new(table.with_messages()).is_ok());
    /// ```
    #[must_use]
    pub fn with_messages(mut self) -> Self {
        let plain = std::mem::take(&mut self.actions);
        self.actions = plain.iter().map(|actions| self.add_messages(actions)).collect();
        self
    }

    fn add_messages(&self, actions: &[Action]) -> Vec<Action> {
        let mut all = Vec::with_capacity(3 * actions.len());
        // A stage that does not exist is reported by the checker.
        let known = |stage: usize| stage < self.stages();
        for &action in actions.iter().filter(|action| action.kind.is_compute()) {
            let (before, after) = match known(action.stage) {
                true => (self.sender_before(action.stage), self.sender_after(action.stage)),
                false => (None, None),
            };
            let message = |is: Option<usize>, kind| is.map(|_| action.as_kind(kind));
            let (recv, send) = match action.kind {
                ActionKind::Forward => {
                    (message(before, ActionKind::RecvActivation), message(after, ActionKind::SendActivation))
                }
                ActionKind::Backward | ActionKind::BackwardInput => {
                    (message(after, ActionKind::RecvGradient), message(before, ActionKind::SendGradient))
                }
                _ => (None, None),
            };
            all.extend(recv);
            all.push(action);
            all.extend(send);
        }
        all
    }
}
