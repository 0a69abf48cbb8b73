//! The groups of a layout with `far`.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use comm::{Communicator, Operation, all_gather_object, broadcast_object};
use strategy::while_others_work;

use super::micro_batches::sum;
use crate::{Error, Layout, Result};

/// The groups of ranks that train on their own. Those of an elastic run may be fewer than at its beginning.
#[derive(Debug, Clone)]
pub struct FarGroups {
    /// All ranks of the job.
    pub(crate) world: Arc<dyn Communicator>,
    /// The ranks of this one's group.
    pub(crate) group: Arc<dyn Communicator>,
    /// The ranks with the same place in each group, in the order of the groups.
    pub(crate) across: Arc<dyn Communicator>,
    /// Tells this run from others, the same on all ranks.
    pub(crate) run: u64,
    /// This group's seat among those of the run, which it keeps when others are lost: its rows of a batch.
    seat: usize,
    /// Number of seats.
    seats: usize,
    /// The seats of the groups that are there, in their order.
    taken: Vec<usize>,
}

impl FarGroups {
    /// Divides the ranks of a layout into groups, of so many at the beginning of the run; `None` if that is one. Call on every rank. New
    /// groups take the seats of lost ones.
    pub(super) fn new(world: Arc<dyn Communicator>, layout: &Layout, seats: usize) -> Result<Option<Self>> {
        match seats.max(layout.far) {
            1 => Ok(None),
            seats => Self::among(world, layout, seats, None).map(Some),
        }
    }

    /// Divides the ranks of another group of all ranks, in which some groups were lost or are new.
    pub(crate) fn regrouped(&self, world: Arc<dyn Communicator>, layout: &Layout) -> Result<Self> {
        Self::among(world, layout, self.seats, Some((self.seat, self.seats, self.run)))
    }

    /// `own` are the seat of this rank's group, the number of seats, and the run, unless it is new. `seats` is their number if all are.
    fn among(
        world: Arc<dyn Communicator>,
        layout: &Layout,
        seats: usize,
        own: Option<(usize, usize, u64)>,
    ) -> Result<Self> {
        layout.check(world.world_size())?;
        let known: Vec<Option<(usize, usize, u64)>> = all_gather_object(&*world, &own)?;
        let (seats, run) = match known.iter().flatten().next() {
            Some((_, seats, run)) => (*seats, *run),
            None => {
                // Of the time to the nanosecond: runs that go on from one another begin at different times.
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
                (seats, broadcast_object(&*world, &now, 0)?)
            }
        };
        let taken = known.iter().map(|known| known.map(|(seat, ..)| seat)).collect::<Vec<_>>();
        let of_ranks = seated(&taken, seats, layout.of_group().ranks());
        let Some(seat) = of_ranks[world.rank()] else {
            return Err(Error::invalid(
                "the groups of far",
                layout,
                "there are no more seats than at the beginning",
            ));
        };
        // In the order of their first ranks.
        let mut order: Vec<Option<usize>> = Vec::new();
        of_ranks.iter().for_each(|seat| {
            if !order.contains(seat) {
                order.push(*seat)
            }
        });
        let number = order.iter().position(|of| *of == Some(seat)).unwrap_or(0);
        let place = of_ranks[..world.rank()].iter().filter(|of| **of == Some(seat)).count();
        let split = |color: usize, key: usize| group_of(world.split(Some(color), key)?);
        let (group, across) = (split(seat, world.rank())?, split(place, number)?);
        let taken = order.into_iter().flatten().collect();
        Ok(Self { world, group, across, run, seat, seats, taken })
    }

    /// Number of this rank's group, from 0: the first one has the first rank.
    pub fn number(&self) -> usize {
        self.across.rank()
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.across.world_size()
    }

    /// This group's part of each batch, and how many parts there are: as many as groups at the beginning of the run. Rows of a group
    /// that is lost are left out.
    pub fn share_of_batch(&self) -> (usize, usize) {
        (self.seat, self.seats)
    }

    /// The seats of the groups that are there, in their order.
    pub(crate) fn seats(&self) -> &[usize] {
        &self.taken
    }

    /// Whether something is so in all groups. Call on every rank.
    pub(crate) fn all(&self, own: bool) -> Result<bool> {
        Ok(sum(&*self.world, f64::from(u8::from(!own)))? == 0.0)
    }

    /// Does some work for which groups need different times, in a group of `far` if there are any: no rank runs into its timeout while it
    /// waits for another group. A rank whose work fails returns at once. Call on every rank.
    ///
    /// # Cost
    /// With `far`, a group of all ranks, since the work may have collectives of all ranks itself.
    pub(crate) fn while_others_work<T>(far: Option<&Self>, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(Self { world, .. }) = far else { return work() };
        while_others_work(&*group_of(world.split(Some(0), world.rank())?)?, work)
    }

    /// Waits until all groups have come so far: before a checkpoint, until all have written the one before. Of the last two that a group keeps,
    /// every other then has one, too.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        Ok(self.world.run(Operation::Barrier)?)
    }
}

fn group_of(group: Option<Arc<dyn Communicator>>) -> Result<Arc<dyn Communicator>> {
    group.ok_or_else(|| Error::invalid("a group of far", "none", "this is a mistake in girandole"))
}

/// Gives the ranks without a seat the free ones, as many ranks of each as a group has.
fn seated(taken: &[Option<usize>], seats: usize, ranks: usize) -> Vec<Option<usize>> {
    let free = (0..seats).filter(|seat| !taken.contains(&Some(*seat)));
    let mut free = free.flat_map(|seat| std::iter::repeat_n(seat, ranks));
    taken.iter().map(|seat| seat.or_else(|| free.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::seated;

    #[test]
    fn new_groups_take_the_seats_of_lost_ones() {
        let first = seated(&[None; 6], 3, 2).into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(first, [0, 0, 1, 1, 2, 2]);
        let later = seated(&[Some(2), Some(1), None, None], 4, 1).into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(later, [2, 1, 0, 3]);
        assert_eq!(seated(&[Some(0), None], 1, 1), [Some(0), None]);
    }
}
