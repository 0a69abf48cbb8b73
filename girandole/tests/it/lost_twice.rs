//! A second rank is lost while the others get the step that only it had completed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use girandole::comm::{self, Communicator, ElasticGroup, Local, Operation, Stats, Work};
use girandole::trainer::{Observer, Regrouping, StepReport, TrainConfig, Trainer};
use girandole::{Layout, Parallel};

use crate::common::Setup;
use crate::elastic::{Rows, assert_undisturbed, config, expected_of};

/// The step that rank 1 alone completes, since rank 3 is lost in its last operation.
const STEP: usize = 4;

/// Steps that a rank has completed, and operations: since then, and in the step before.
#[derive(Debug, Default)]
struct Progress {
    steps: AtomicUsize,
    operations: AtomicUsize,
    of_step: AtomicUsize,
}

/// A group in which rank 3 is lost, the next one, in which rank 1 is, or the one after that.
#[derive(Debug)]
struct Fragile {
    group: Arc<dyn Communicator>,
    losses: usize,
    progress: Arc<Progress>,
}

impl Fragile {
    /// What comes of an operation, once it is over.
    fn after(&self) -> comm::Result<()> {
        let number = self.progress.operations.fetch_add(1, Relaxed) + 1;
        let is_last = number == self.progress.of_step.load(Relaxed);
        if self.losses > 0 || self.progress.steps.load(Relaxed) + 1 != STEP || !is_last {
            return Ok(());
        }
        match self.rank() {
            1 => Ok(()),
            3 => Err(gone()),
            _ => {
                let tensor = candle_core::Tensor::new(&[0u8], &candle_core::Device::Cpu)?;
                self.group.run(Operation::Recv { tensor, from: 3 })
            }
        }
    }
}

fn gone() -> comm::Error {
    candle_core::Error::msg("this rank is lost").into()
}

impl Communicator for Fragile {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn stats(&self) -> Stats {
        self.group.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.group.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> comm::Result<Arc<dyn Communicator>> {
        self.group.subgroup(ranks)
    }

    fn elastic(&self) -> comm::Result<&dyn ElasticGroup> {
        Ok(self)
    }

    fn submit(&self, operation: Operation) -> comm::Result<Work> {
        let work = self.group.submit(operation)?;
        self.after().map(|()| work)
    }

    fn run(&self, operation: Operation) -> comm::Result<()> {
        match operation {
            Operation::Send { to: 2, .. } if self.losses == 1 && self.rank() == 1 => Err(gone()),
            operation => self.group.run(operation).and_then(|()| self.after()),
        }
    }
}

impl ElasticGroup for Fragile {
    fn shrink(&self) -> comm::Result<Arc<dyn Communicator>> {
        let (group, progress) = (self.group.elastic()?.shrink()?, self.progress.clone());
        Ok(Arc::new(Self { group, losses: self.losses + 1, progress }))
    }

    fn lost(&self) -> Option<comm::Error> {
        self.group.elastic().ok()?.lost()
    }

    fn waiting(&self) -> usize {
        0
    }

    fn grow(&self, _: usize) -> comm::Result<Arc<dyn Communicator>> {
        unreachable!("no rank comes")
    }
}

#[derive(Default)]
struct Losses {
    progress: Arc<Progress>,
    by_step: Vec<(usize, f64)>,
    ranks_left: Vec<usize>,
}

impl<M> Observer<M> for Losses {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.progress.steps.store(report.step, Relaxed);
        self.progress.of_step.store(self.progress.operations.swap(0, Relaxed), Relaxed);
        self.by_step.push((report.step, report.loss));
        Ok(())
    }

    fn regrouping(&mut self, _: &Arc<dyn Communicator>) -> girandole::Result<bool> {
        Ok(true)
    }

    fn regrouped(&mut self, _: usize, change: &Regrouping<'_>) -> girandole::Result<()> {
        self.ranks_left.push(change.world.world_size());
        Ok(())
    }
}

#[test]
fn a_rank_that_has_got_the_last_step_is_taken_to_have_it() {
    // Without evaluations, which are operations between steps, too.
    let config = |fewest| TrainConfig { evaluate_every: None, ..config(fewest, None, false) };
    let expected = expected_of(config(None));
    let seen = Local::run_shared(4, |group| {
        let mut losses = Losses::default();
        let comm = Arc::new(Fragile { group, losses: 0, progress: losses.progress.clone() });
        let layout: Layout = "dp=4".parse()?;
        let mut model: Parallel<_> = Setup::default().parallel(comm, &layout, None)?;
        let run = Trainer::new(&mut model, Arc::new(Rows), config(Some(1)))?.run(&mut losses);
        Ok(run.ok().map(|_| losses))
    });
    let seen = seen.unwrap();
    assert!(seen[1].is_none() && seen[3].is_none());
    for rank in [0, 2] {
        let Some(Losses { by_step, ranks_left, .. }) = &seen[rank] else { panic!("rank {rank} has failed") };
        assert_undisturbed(by_step, &expected, &format!("rank {rank}"));
        assert_eq!(*ranks_left, [2], "the group of three is not set up");
    }
}
