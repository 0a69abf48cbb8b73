//! Runs the schedules of all ranks in one thread on symbolic elements, each the ordered list of ranks it is reduced from.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::schedule::{Combine, Schedule, Transfer};

/// An element: a leaf is one rank's own value, a pair a reduction of a left with a right operand.
#[derive(Debug, Clone)]
pub(crate) enum Element {
    Own(usize),
    Reduced(Rc<(Element, Element)>),
}

impl PartialEq for Element {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Element::Own(a), Element::Own(b)) => a == b,
            // Copies of one result share their operands: a thousand ranks are compared at once.
            (Element::Reduced(a), Element::Reduced(b)) => Rc::ptr_eq(a, b) || a == b,
            _ => false,
        }
    }
}

impl Element {
    /// The ranks it is made of, in the order of the operands.
    pub(crate) fn order(&self) -> Vec<usize> {
        let (mut ranks, mut stack) = (Vec::new(), vec![self.clone()]);
        while let Some(element) = stack.pop() {
            match element {
                Element::Own(rank) => ranks.push(rank),
                Element::Reduced(operands) => stack.extend([operands.1.clone(), operands.0.clone()]),
            }
        }
        ranks
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

/// The buffers of all ranks at the end. Panics where a receive has no sender, lengths differ, or a message is left over.
pub(crate) fn run(all: &[Schedule], len: usize) -> Vec<Vec<Element>> {
    let world_size = all.len();
    let mut buffers: Vec<Vec<Element>> = (0..world_size).map(|rank| vec![Element::Own(rank); len]).collect();
    let mut wires: Vec<VecDeque<Vec<Element>>> = vec![VecDeque::new(); world_size * world_size];
    // Per rank: the step it is in, and whether it has sent that step's messages.
    let mut at = vec![(0, false); world_size];
    loop {
        let mut moved = false;
        for rank in 0..world_size {
            let Some(step) = all[rank].steps.get(at[rank].0) else { continue };
            if !at[rank].1 {
                for transfer in &step.transfers {
                    if let Transfer::Send { to, range } = transfer {
                        assert_ne!(*to, rank, "a rank sends to itself");
                        wires[rank * world_size + to].push_back(buffers[rank][range.clone()].to_vec());
                    }
                }
                at[rank].1 = true;
                moved = true;
            }
            let ready = step.transfers.iter().all(|transfer| match transfer {
                Transfer::Recv { from, .. } => !wires[from * world_size + rank].is_empty(),
                Transfer::Send { .. } => true,
            });
            if !ready {
                continue;
            }
            for transfer in &step.transfers {
                let Transfer::Recv { from, range, combine } = transfer else { continue };
                let message = wires[from * world_size + rank].pop_front().expect("it is ready");
                assert_eq!(
                    message.len(),
                    range.len(),
                    "rank {from} sent another length than rank {rank} expects"
                );
                for (mine, theirs) in buffers[rank][range.clone()].iter_mut().zip(message) {
                    *mine = match combine {
                        Combine::Replace => theirs,
                        Combine::TheirsFirst => Element::Reduced(Rc::new((theirs, mine.clone()))),
                        Combine::MineFirst => Element::Reduced(Rc::new((mine.clone(), theirs))),
                    };
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

/// Every rank ends with each rank's value in each element once, reduced in the very same order on every rank, and marks each
/// element as finished before it is passed on as a result.
pub(crate) fn check_all_reduce(all: &[Schedule], len: usize) {
    let buffers = run(all, len);
    for buffer in &buffers {
        assert_eq!(buffer, &buffers[0], "two ranks reduced in another order");
    }
    for element in &buffers[0] {
        assert_eq!(element.sorted(), (0..all.len()).collect::<Vec<_>>());
    }
}
