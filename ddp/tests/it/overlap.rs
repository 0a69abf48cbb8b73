//! Buckets are sent during backward, in the same order on every rank.

use std::sync::{Arc, Mutex};

use crate::common::layers::{LAYERS, Layers, apart};
use crate::common::{Comm, on_all_ranks};
use comm::{Communicator, Operation, Stats, Work};

/// Communicator that records which all-reduces are submitted, and which are run synchronously.
#[derive(Debug)]
struct Recording {
    inner: Comm,
    log: Arc<Mutex<Vec<(&'static str, usize)>>>,
}

impl Recording {
    fn note(&self, how: &'static str, operation: &Operation) {
        if let Operation::AllReduce { tensor, .. } = operation {
            self.log.lock().expect("no panic").push((how, tensor.elem_count()));
        }
    }
}

impl Communicator for Recording {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn backend(&self) -> &'static str {
        "recording"
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.inner.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> comm::Result<Arc<dyn Communicator>> {
        self.inner.subgroup(ranks)
    }

    fn submit(&self, operation: Operation) -> comm::Result<Work> {
        self.note("submit", &operation);
        self.inner.submit(operation)
    }

    fn run(&self, operation: Operation) -> comm::Result<()> {
        self.note("run", &operation);
        self.inner.run(operation)
    }
}

/// Runs steps on recording ranks. Returns for each step the number of buckets submitted before backward reached the first
/// layer, and the sizes of all buckets in the order in which they were sent.
fn record(
    world_size: usize,
    steps: usize,
    with_head: fn(usize, usize) -> bool,
) -> Vec<Vec<(usize, Vec<usize>)>> {
    on_all_ranks(world_size, |comm| {
        let rank = comm.rank();
        let log = Arc::new(Mutex::new(vec![]));
        let ddp = Layers::ddp(Arc::new(Recording { inner: comm, log: log.clone() }), &apart())?;
        let mut result = vec![];
        for step in 0..steps {
            let seen = Arc::new(Mutex::new(0));
            let (seen_by_probe, log_of_probe) = (seen.clone(), log.clone());
            let probe = move || {
                *seen_by_probe.lock().expect("no panic") = log_of_probe.lock().expect("no panic").len();
                Ok(())
            };
            let seed = (step * 10 + rank) as u64;
            ddp.backward(&ddp.model()?.loss(seed, with_head(step, rank), probe)?)?;
            let log = std::mem::take(&mut *log.lock().expect("no panic"));
            assert!(log.iter().rev().skip(1).all(|(how, _)| *how == "submit"), "{log:?}");
            assert_eq!(log.last().map(|(how, _)| *how), Some("run"));
            let seen = *seen.lock().expect("no panic");
            result.push((seen, log.into_iter().map(|(_, elements)| elements).collect()));
        }
        Ok(result)
    })
}

#[test]
fn buckets_go_out_as_soon_as_their_layers_are_done() {
    for rank in record(2, 3, |_, _| true) {
        for (seen, sizes) in rank {
            assert_eq!((seen, sizes.len()), (2 * LAYERS, 2 * LAYERS + 2));
        }
    }
}

#[test]
fn buckets_go_out_in_the_same_order_on_every_rank_whatever_they_use() {
    let ranks = record(3, 6, |step, rank| (step + rank) % 3 == 0);
    for rank in &ranks[1..] {
        for (step, (mine, first)) in rank.iter().zip(&ranks[0]).enumerate() {
            assert_eq!(mine.1, first.1, "step {step}");
        }
    }
}

#[test]
fn unused_parameters_hold_nothing_up_once_they_are_known() {
    for rank in record(2, 3, |_, _| false) {
        // The head's buckets are the first, and in the first step they wait for gradients that never arrive.
        let seen: Vec<usize> = rank.iter().map(|(seen, _)| *seen).collect();
        let of_later_layers = 2 * (LAYERS - 1);
        assert_eq!(seen[0], 0);
        assert!(seen[1] >= of_later_layers && seen[2] >= of_later_layers, "{seen:?}");
    }
}
