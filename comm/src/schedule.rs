//! Algorithms as data: who sends which elements to whom in which step.
//!
//! A schedule is what one rank does; those of all ranks fit together. They are made by the pure functions of
//! [`crate::algorithm`], and run by one executor over any transport.

use std::ops::Range;

/// What becomes of elements that arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// They take the place of those that are there.
    Replace,
    /// Reduced with those that are there, as the left operand.
    TheirsFirst,
    /// Reduced with those that are there, as the right operand.
    MineFirst,
}

/// One message of a step. Ranges count elements of the buffer that the schedule works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transfer {
    /// Sends the elements of `range` as they are when the step begins.
    Send {
        /// The receiver.
        to: usize,
        /// Which elements.
        range: Range<usize>,
    },
    /// Receives into `range`.
    Recv {
        /// The sender.
        from: usize,
        /// Which elements.
        range: Range<usize>,
        /// What to do with them.
        combine: Combine,
    },
}

/// Transfers that go on at the same time: at most one to, and one from, each peer; received ranges do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// In no order.
    pub transfers: Vec<Transfer>,
    /// Elements whose reduction is complete with this step (here an average is divided).
    pub finished: Range<usize>,
}

/// What one rank does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Schedule {
    /// One after the other.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// The ranks it talks to, each once, in the order of first contact.
    pub fn peers(&self) -> Vec<usize> {
        let mut peers = Vec::new();
        for transfer in self.transfers() {
            let peer = match transfer {
                Transfer::Send { to, .. } => *to,
                Transfer::Recv { from, .. } => *from,
            };
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        peers
    }

    /// Elements that this rank sends in all.
    ///
    /// ```
    /// // A ring all-reduce sends 2(P-1)/P of the buffer from each rank.
    /// let schedule = comm::algorithm::ring_all_reduce::schedule(0, 4, 1000);
    /// assert_eq!(schedule.elements_sent(), 2 * 3 * 1000 / 4);
    /// ```
    pub fn elements_sent(&self) -> usize {
        self.transfers()
            .map(|transfer| if let Transfer::Send { range, .. } = transfer { range.len() } else { 0 })
            .sum()
    }

    fn transfers(&self) -> impl Iterator<Item = &Transfer> {
        self.steps.iter().flat_map(|step| &step.transfers)
    }
}

impl Step {
    /// True where an element that is received is also sent in this step: then it must be sent as it was before.
    pub(crate) fn overlaps(&self, received: &Range<usize>) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::Send { range, .. } => range.start < received.end && received.start < range.end,
            Transfer::Recv { .. } => false,
        })
    }
}

/// The `part`-th of `parts` nearly equal parts of `len` elements; `part` counts modulo `parts`.
///
/// ```
/// use comm::schedule::part;
/// assert_eq!([part(10, 3, 0), part(10, 3, 1), part(10, 3, 5)], [0..3, 3..6, 6..10]);
/// ```
pub fn part(len: usize, parts: usize, part: usize) -> Range<usize> {
    let at = |index: usize| (len as u128 * index as u128 / parts as u128) as usize;
    let part = part % parts;
    at(part)..at(part + 1)
}
