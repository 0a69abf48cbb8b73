//! Message-by-message simulation of the schedules of all ranks.

use std::collections::VecDeque;

use comm::algorithm::schedule::{Schedule, ScheduleStep, Transfer};

use super::Network;

/// Progress of a rank in its schedule.
#[derive(Debug, Clone, Default)]
struct RankState {
    step: usize,
    /// When it began the current step; `None` if it has not.
    began: Option<f64>,
    /// When the part of the current step that does not depend on other ranks is done.
    own: f64,
    clock: f64,
    /// When its outgoing and its incoming link are free again.
    out: f64,
    into: f64,
}

/// Messages in flight, by receiver: for each sender, of which there are few, when the last byte of each message
/// arrives.
struct InFlight(Vec<Vec<(usize, VecDeque<f64>)>>);

impl InFlight {
    fn of(&mut self, to: usize, from: usize) -> &mut VecDeque<f64> {
        let wires = &mut self.0[to];
        let place = wires.iter().position(|(sender, _)| *sender == from).unwrap_or_else(|| {
            wires.push((from, VecDeque::new()));
            wires.len() - 1
        });
        &mut wires[place].1
    }
}

struct World<'a> {
    schedules: &'a [Schedule],
    element_bytes: f64,
    network: &'a Network,
    /// Global rank of each member of the group.
    members: &'a [usize],
    places: Vec<RankState>,
    wires: InFlight,
}

/// Returns the seconds until the last rank is done, if all begin together. Each rank has one outgoing and one incoming
/// link, on which messages are sequential.
pub(super) fn seconds(
    schedules: &[Schedule],
    element_bytes: usize,
    network: &Network,
    members: &[usize],
) -> f64 {
    let places = vec![RankState::default(); schedules.len()];
    let element_bytes = element_bytes as f64;
    let wires = InFlight(vec![Vec::new(); schedules.len()]);
    let mut world = World { schedules, element_bytes, network, members, places, wires };
    let mut ready: VecDeque<usize> = (0..schedules.len()).collect();
    while let Some(rank) = ready.pop_front() {
        world.run(rank, &mut ready);
    }
    world.places.iter().map(|place| place.clock).fold(0.0, f64::max)
}

impl World<'_> {
    /// Runs a rank until it needs a message that has not been sent; adds the receivers of its messages to `ready`.
    fn run(&mut self, rank: usize, ready: &mut VecDeque<usize>) {
        let schedules = self.schedules;
        while let Some(step) = schedules[rank].steps.get(self.places[rank].step) {
            if self.places[rank].began.is_none() {
                self.begin(rank, step, ready);
            }
            let wires = &mut self.wires;
            let arrived = |transfer: &Transfer| match sender(transfer) {
                Some((from, _)) => !wires.of(rank, from).is_empty(),
                None => true,
            };
            if !step.transfers.iter().all(arrived) {
                return;
            }
            self.end(rank, step);
        }
    }

    fn begin(&mut self, rank: usize, step: &ScheduleStep, ready: &mut VecDeque<usize>) {
        let mut now = self.places[rank].clock;
        self.places[rank].began = Some(now);
        for transfer in &step.transfers {
            now += self.network.combine_s_per_byte * self.element_bytes * moved_within(transfer);
        }
        let mut own = now;
        for transfer in &step.transfers {
            let Transfer::Send { to, range } = transfer else { continue };
            let link = self.network.link(self.members[rank], self.members[*to]);
            let sent =
                self.places[rank].out.max(now) + link.s_per_byte * self.element_bytes * range.len() as f64;
            self.places[rank].out = sent;
            own = own.max(sent);
            self.wires.of(*to, rank).push_back(sent + link.latency);
            ready.push_back(*to);
        }
        self.places[rank].own = own;
    }

    fn end(&mut self, rank: usize, step: &ScheduleStep) {
        let mut now = self.places[rank].own;
        for transfer in &step.transfers {
            let Some((from, len)) = sender(transfer) else { continue };
            let Some(there) = self.wires.of(rank, from).pop_front() else { continue };
            let bytes = len as f64 * self.element_bytes;
            let link = self.network.link(self.members[rank], self.members[from]);
            let there = there.max(self.places[rank].into + link.s_per_byte * bytes);
            self.places[rank].into = there;
            now = now.max(there);
            if reduces(transfer) {
                now += self.network.combine_s_per_byte * bytes;
            }
        }
        let place = &mut self.places[rank];
        (place.clock, place.began, place.step) = (now, None, place.step + 1);
    }
}

/// Returns sender and number of elements of a receive.
fn sender(transfer: &Transfer) -> Option<(usize, usize)> {
    match transfer {
        Transfer::Recv { from, range, .. } | Transfer::Fold { from, range, .. } => Some((*from, range.len())),
        _ => None,
    }
}

fn reduces(transfer: &Transfer) -> bool {
    match transfer {
        Transfer::Recv { combine, .. } => *combine != comm::algorithm::schedule::Combine::Replace,
        Transfer::Fold { .. } => true,
        _ => false,
    }
}

/// Returns the number of elements that are copied or reduced locally.
fn moved_within(transfer: &Transfer) -> f64 {
    match transfer {
        Transfer::Copy { range, .. } => range.len() as f64,
        Transfer::Reduce { places, range } => (places.len() * range.len()) as f64,
        _ => 0.0,
    }
}
