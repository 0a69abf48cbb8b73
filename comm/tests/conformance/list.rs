//! List of all cases that need only a group, for programs that run them one by one.

use crate::{Backend, batch, cases, groups, halves, moves, overlaps, uneven};

/// Name and function of a case.
pub(crate) type Case = (&'static str, fn(&dyn Backend));

pub(crate) const CASES: [Case; 27] = [
    ("all_reduce", cases::all_reduce),
    ("reduce", cases::reduce),
    ("broadcast", cases::broadcast),
    ("all_gather", cases::all_gather),
    ("reduce_scatter", cases::reduce_scatter),
    ("gather", moves::gather),
    ("scatter", moves::scatter),
    ("all_to_all", moves::all_to_all),
    ("uneven parts", uneven::collectives),
    ("uneven all_to_all", uneven::all_to_all),
    ("counts that differ", uneven::mismatches),
    ("views", moves::views),
    ("parts in their place", overlaps::in_place),
    ("overlaps that are refused", overlaps::refused),
    ("tensors that are given twice", overlaps::twice),
    ("large tensors", moves::chain),
    ("messages", cases::messages),
    ("batches", batch::rings),
    ("batches and single messages", batch::with_single_messages),
    ("coalesced", batch::coalesced),
    ("halves are rounded once", halves::are_rounded_once),
    ("groups", groups::at_the_same_time),
    ("groups of any color and key", groups::large_numbers),
    ("groups that close", groups::closing),
    ("groups that are refused", groups::mistakes),
    ("queued operations keep their order", cases::queued),
    ("mistakes leave the group usable", cases::mistakes),
];
