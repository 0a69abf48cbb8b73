//! Simulator of schedules: runs those of all ranks in one thread on symbolic elements, each the ordered list of ranks
//! it is reduced from.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use proptest::prelude::*;

use crate::Topology;
use crate::algorithm::schedule::{Combine, Parts, Schedule, Transfer};

/// An element: a leaf is one rank's own value at one index, a pair a reduction of a left and a right operand.
#[derive(Debug, Clone)]
pub(crate) enum SymbolicElement {
    Own(usize, usize),
    Reduced(Rc<(SymbolicElement, SymbolicElement)>),
}

impl PartialEq for SymbolicElement {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (SymbolicElement::Own(a, i), SymbolicElement::Own(b, k)) => (a, i) == (b, k),
            // Copies of one result share their operands: this makes a comparison of a thousand ranks fast.
            (SymbolicElement::Reduced(a), SymbolicElement::Reduced(b)) => Rc::ptr_eq(a, b) || a == b,
            _ => false,
        }
    }
}

impl SymbolicElement {
    /// Returns the ranks it is reduced from, in the order of the operands.
    pub(crate) fn order(&self) -> Vec<usize> {
        let (mut ranks, mut stack) = (Vec::new(), vec![self.clone()]);
        while let Some(element) = stack.pop() {
            match element {
                SymbolicElement::Own(rank, _) => ranks.push(rank),
                SymbolicElement::Reduced(operands) => stack.extend([operands.1.clone(), operands.0.clone()]),
            }
        }
        ranks
    }

    /// Returns the rank and index at which it was in the beginning. `None` for a reduced element.
    pub(crate) fn origin(&self) -> Option<(usize, usize)> {
        if let SymbolicElement::Own(rank, index) = self { Some((*rank, *index)) } else { None }
    }

    pub(crate) fn sorted(&self) -> Vec<usize> {
        let mut ranks = self.order();
        ranks.sort_unstable();
        ranks
    }
}

pub(crate) fn schedules(world_size: usize, make: impl Fn(usize) -> Schedule) -> Vec<Schedule> {
    (0..world_size).map(make).collect()
}

/// Returns the schedules of all ranks, after asserting that each rank ends with every part, whole and from its owner.
pub(crate) fn all_gathers(parts: &Parts, make: impl Fn(usize) -> Schedule) -> Vec<Schedule> {
    let all = schedules(parts.count(), make);
    for buffer in run(&all, parts.len()) {
        for owner in 0..parts.count() {
            assert!(parts.of(owner).all(|index| buffer[index].origin() == Some((owner, index))));
        }
    }
    all
}

/// Returns the buffers of all ranks at the end. Panics if a receive has no sender, lengths differ, or a message is not
/// received.
pub(crate) fn run(all: &[Schedule], len: usize) -> Vec<Vec<SymbolicElement>> {
    run_uneven(all, |_| len)
}

/// The same with buffers whose length depends on the rank.
pub(crate) fn run_uneven(all: &[Schedule], len: impl Fn(usize) -> usize) -> Vec<Vec<SymbolicElement>> {
    let world_size = all.len();
    let buffer = |rank| (0..len(rank)).map(|index| SymbolicElement::Own(rank, index)).collect();
    let mut buffers: Vec<Vec<SymbolicElement>> = (0..world_size).map(buffer).collect();
    let mut wires: Vec<VecDeque<Vec<SymbolicElement>>> = vec![VecDeque::new(); world_size * world_size];
    // For each rank, the step it is in, and whether it has sent that step's messages.
    let mut at = vec![(0, false); world_size];
    loop {
        let mut moved = false;
        for rank in 0..world_size {
            let Some(step) = all[rank].steps.get(at[rank].0) else { continue };
            if !at[rank].1 {
                for transfer in &step.transfers {
                    if let Transfer::Copy { range, to } = transfer {
                        let copied = buffers[rank][range.clone()].to_vec();
                        buffers[rank][*to..to + range.len()].clone_from_slice(&copied);
                    }
                }
                for transfer in &step.transfers {
                    if let Transfer::Reduce { places, range } = transfer {
                        reduce(&mut buffers[rank], places, range.clone());
                    }
                }
                for transfer in &step.transfers {
                    if let Transfer::Send { to, range } = transfer {
                        assert_ne!(*to, rank, "a rank sends to itself");
                        wires[rank * world_size + to].push_back(buffers[rank][range.clone()].to_vec());
                    }
                }
                at[rank].1 = true;
                moved = true;
            }
            let ready = step.transfers.iter().all(|transfer| match transfer.peer() {
                Some((from, false)) => !wires[from * world_size + rank].is_empty(),
                _ => true,
            });
            if !ready {
                continue;
            }
            for transfer in &step.transfers {
                if let Some((from, false)) = transfer.peer() {
                    let message = wires[from * world_size + rank].pop_front().expect("it is ready");
                    receive(&mut buffers[rank], transfer, message);
                }
            }
            at[rank] = (at[rank].0 + 1, false);
            moved = true;
        }
        if !moved {
            break;
        }
    }
    assert!(at.iter().zip(all).all(|((step, _), schedule)| *step == schedule.steps.len()), "a rank is stuck");
    assert!(wires.iter().all(VecDeque::is_empty), "a message was never received");
    buffers
}

fn receive(buffer: &mut [SymbolicElement], transfer: &Transfer, message: Vec<SymbolicElement>) {
    let (range, mine, combine) = match transfer {
        Transfer::Recv { range, combine, .. } => (range, range.start, combine),
        Transfer::Fold { range, mine, combine, .. } => (range, *mine, combine),
        Transfer::Send { .. } | Transfer::Copy { .. } | Transfer::Reduce { .. } => return,
    };
    assert_eq!(message.len(), range.len(), "{transfer:?}: another length was sent than is expected");
    for (offset, theirs) in message.into_iter().enumerate() {
        let own = buffer[mine + offset].clone();
        buffer[range.start + offset] = match combine {
            Combine::Replace => theirs,
            Combine::TheirsFirst => SymbolicElement::Reduced(Rc::new((theirs, own))),
            Combine::MineFirst => SymbolicElement::Reduced(Rc::new((own, theirs))),
        };
    }
}

fn reduce(buffer: &mut [SymbolicElement], places: &[usize], range: Range<usize>) {
    for offset in 0..range.len() {
        let operands = places.iter().map(|place| buffer[place + offset].clone());
        let sum = operands.reduce(|left, right| SymbolicElement::Reduced(Rc::new((left, right))));
        buffer[range.start + offset] = sum.expect("there is a place");
    }
}

/// Checks that each element of every rank is reduced from each rank's value once, in the same order on every rank.
pub(crate) fn check_all_reduce(all: &[Schedule], len: usize) {
    let buffers = run(all, len);
    for buffer in &buffers {
        assert_eq!(buffer, &buffers[0], "two ranks reduced in another order");
    }
    for element in &buffers[0] {
        assert_eq!(element.sorted(), (0..all.len()).collect::<Vec<_>>());
    }
}

/// Returns the number of elements that the ranks of each host send to other hosts.
pub(crate) fn sent_between(topology: &Topology, all: &[Schedule]) -> Vec<usize> {
    let mut sent = vec![0; topology.hosts().len()];
    for (rank, schedule) in all.iter().enumerate() {
        let host = topology.place(rank).0;
        for transfer in schedule.steps.iter().flat_map(|step| &step.transfers) {
            match transfer {
                Transfer::Send { to, range } if topology.place(*to).0 != host => sent[host] += range.len(),
                _ => {}
            }
        }
    }
    sent
}

/// Strategy: a number of hosts and a number of ranks on each, both from `counts`, a topology with ranks in any order,
/// and a length for each rank's part.
pub(crate) fn regular(counts: Range<usize>) -> impl Strategy<Value = (usize, usize, Topology, Vec<usize>)> {
    (counts.clone(), counts).prop_flat_map(|(hosts, ranks)| {
        let places: Vec<usize> = (0..hosts * ranks).map(|rank| rank % hosts).collect();
        let lengths = prop::collection::vec(0usize..5, hosts * ranks);
        let places = Just(places).prop_shuffle();
        (places, lengths).prop_map(move |(places, lengths)| (hosts, ranks, Topology::of(&places), lengths))
    })
}
