//! Groups that train on their own, and what other groups do meanwhile: they wait, or go on without one that is lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{Device, Result};
use girandole::comm::{Communicator, Local, LocalConfig, Operation};
use girandole::models::CausalLm;
use girandole::trainer::{CheckpointPlan, Data, Observer, TrainConfig, Trainer, latest_of_groups};
use girandole::training::{CheckpointConfig, Checkpoints};
use girandole::{Batch, Error, FarConfig, Layout, Parallel};

use crate::common::Setup;
use crate::elastic::{Leaving, Moment};
use crate::far::{ALL, config};
use crate::far_elastic::elastic;

const FAR: FarConfig = FarConfig {
    every: 3,
    learning_rate: 0.7,
    momentum: 0.9,
    precision: girandole::FarPrecision::F32,
    fragments: 1,
    delay: 0,
};

fn far(groups: usize) -> Layout {
    Layout { far: groups, ..Layout::default() }
}

/// Takes longer than the timeout over a checkpoint that is written.
struct Slow(Duration);

impl<M> Observer<M> for Slow {
    fn saved(&mut self, _: usize, _: &Path) -> girandole::Result<()> {
        std::thread::sleep(self.0);
        Ok(())
    }
}

#[test]
fn groups_wait_for_one_that_takes_longer_at_the_end_than_their_timeout() {
    let (timeout, work) = (Duration::from_secs(4), Duration::from_secs(6));
    let once = |dir: &Path| CheckpointPlan { dir: dir.into(), every: 2, keep: 2, in_background: true };
    // The first group saves the model, or its last checkpoint takes longer.
    for (fewest_ranks, saves) in [(None, true), (Some(1), true), (Some(1), false)] {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = (!saves).then(|| once(dir.path()));
        let config = TrainConfig { steps: 2, fewest_ranks, checkpoints, ..config(FAR) };
        let of = |group: usize, own: bool| if group == 0 && own { work } else { Duration::ZERO };
        let rank = |comm: Local| -> girandole::Result<()> {
            let comm: Arc<dyn Communicator> = Arc::new(comm);
            let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &far(2), None)?;
            let mut observer = Slow(of(model.world().rank(), !saves));
            let mut save = |model: &mut Parallel<CausalLm>| {
                std::thread::sleep(of(model.world().rank(), saves));
                Ok(())
            };
            let mut together = |model: &mut Parallel<CausalLm>| Ok(model.world().run(Operation::Barrier)?);
            let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?;
            trainer.run_and(&mut observer, &mut [&mut save, &mut together]).map(drop)
        };
        let group = Local::group(2, &LocalConfig { timeout, ..LocalConfig::default() }).unwrap();
        let ended: Vec<girandole::Result<()>> = std::thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for ended in ended {
            assert!(ended.is_ok(), "{fewest_ranks:?}, {saves}: {ended:?}");
        }
    }
}

/// Rows to evaluate on, of which the first batch is not there before this rank has heard of a loss; on the rank that is lost, none before
/// the other one has begun.
struct Late {
    world: Arc<dyn Communicator>,
    leaves: bool,
    /// Those of the rank that stays.
    batches: Arc<AtomicUsize>,
}

impl Data for Late {
    fn rows(&self) -> usize {
        ALL.rows()
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let is_there = || match self.leaves {
            true => self.batches.load(Ordering::SeqCst) > 0,
            false => self.world.elastic().unwrap().lost().is_some(),
        };
        if self.leaves || self.batches.fetch_add(1, Ordering::SeqCst) == 0 {
            while !is_there() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        ALL.batch(rows, device)
    }
}

#[test]
fn a_group_hears_of_a_loss_between_the_batches_of_an_evaluation() {
    let config = TrainConfig { evaluate_every: Some(3), ..elastic(FAR, None) };
    let batches = Arc::new(AtomicUsize::new(0));
    let ended = Local::run_shared(2, |comm| {
        let leaves = comm.rank() == 0;
        let late = Late { world: comm.clone(), leaves, batches: batches.clone() };
        let mut observer = Leaving::new(leaves.then_some(Moment::Evaluated(3)));
        let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &far(2), None)?;
        let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?.evaluating(&late);
        let ended = trainer.run(&mut observer);
        assert_eq!(ended.is_ok(), !leaves, "{ended:?}");
        Ok(())
    });
    ended.unwrap();
    // 36 rows, 8 at once, four times in 12 steps; and the batch before it heard of the loss.
    assert_eq!(batches.load(Ordering::SeqCst), 1 + 4 * 5);
}

#[test]
fn a_checkpoint_of_all_groups_stays_until_those_that_are_left_have_another() {
    let dir = tempfile::tempdir().unwrap();
    let plan = CheckpointPlan { dir: dir.path().into(), every: 3, keep: 2, in_background: false };
    let config = TrainConfig { batch_size: 12, checkpoints: Some(plan), ..elastic(FAR, None) };
    let leaves = [Moment::Stepped(10), Moment::Saving(9), Moment::Saving(6)];
    let run = |leaves: Option<[Moment; 3]>, groups: usize| {
        Local::run_shared(groups, |comm| {
            let rank = comm.rank();
            let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &far(groups), None)?;
            let mut observer = Leaving::new(leaves.map(|leaves| leaves[rank]));
            let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?;
            trainer.resume_latest()?;
            let began = trainer.step();
            let ended = trainer.run(&mut observer);
            assert!(ended.is_ok() || matches!(ended, Err(Error::Candle(_))) && leaves.is_some(), "{ended:?}");
            Ok(began)
        })
        .unwrap()
    };
    run(Some(leaves), 3);
    // That of step 6 is not of the third group, and that of step 9 of the first only.
    let open = |dir: &Path| {
        Checkpoints::open(CheckpointConfig { dir: dir.into(), ..CheckpointConfig::default() }).unwrap()
    };
    let found = latest_of_groups(&open(dir.path()), 3).unwrap().unwrap();
    assert_eq!(found.step, 3);
    assert_eq!(run(None, 3), [3; 3]);
    // Later ones are of all groups again.
    let steps = |dir: &Path| -> Vec<u64> {
        let all = open(dir).list().unwrap().into_iter();
        all.map(|folder| open(dir).contents(&folder).unwrap().step).collect()
    };
    for group in ["", "far-1", "far-2"] {
        assert_eq!(steps(&dir.path().join(group)), [9, 12], "{group}");
    }
}
