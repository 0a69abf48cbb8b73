//! Groups that train on their own, of which some are lost or join on the way: the others go on by the formula.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use girandole::comm::{Communicator, Local};
use girandole::trainer::{
    CheckpointPlan, Joining, Observer, ObserverState, OptimizerConfig, Regrouping, Replacement, StepReport,
    TrainConfig, Trainer,
};
use girandole::training::SgdConfig;
use girandole::{Error, FarConfig, FarPrecision, Layout, Parallel};

use crate::common::Setup;
use crate::far::{ALL, assert_close, config};
use crate::far_by_hand::ByHand;
use crate::replaced::Job;

/// Records losses, leaves after a step, and as the first rank waits after another one until a new one asks to join.
struct Recorder {
    world: Arc<dyn Communicator>,
    losses: Vec<(usize, f64)>,
    leaves: Option<usize>,
    delay: usize,
    /// After this step it says so, and waits.
    waits: Option<(usize, Arc<AtomicBool>)>,
}

impl<M> Observer<M> for Recorder {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.losses.push((report.step, report.loss));
        if self.leaves == Some(report.step) {
            return Err(candle_core::Error::msg("this rank leaves").into());
        }
        if let Some((step, is_there)) = &self.waits
            && *step == report.step
        {
            is_there.store(true, Ordering::SeqCst);
            let began = Instant::now();
            while self.world.elastic()?.waiting() == 0 {
                assert!(began.elapsed() < Duration::from_secs(100), "no new rank comes");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn regrouped(&mut self, _: usize, change: &Regrouping<'_>) -> girandole::Result<()> {
        self.world = change.world.clone();
        Ok(())
    }

    fn joined(&mut self, step: usize, _: ObserverState, change: &Regrouping<'_>) -> girandole::Result<()> {
        assert_eq!(step % 3, self.delay, "a group joins after an average");
        self.world = change.world.clone();
        Ok(())
    }
}

pub(crate) fn elastic(far: FarConfig, dir: Option<&Path>) -> TrainConfig {
    let plan = |dir: &Path| CheckpointPlan { dir: dir.into(), every: 2, keep: 2, in_background: true };
    TrainConfig { fewest_ranks: Some(1), checkpoints: dir.map(plan), steps: 12, ..config(far) }
}

/// Of a rank that stays to the end: its losses, and that of the model on all rows.
type Seen = Option<(Vec<f64>, f64)>;

/// After which step a rank leaves, and at which it waits for what.
type Script = (Option<usize>, Option<(usize, Arc<AtomicBool>)>);

/// Trains as one of the first ranks, or as one that joins.
fn train(
    setup: Setup,
    comm: Arc<dyn Communicator>,
    layout: &Layout,
    config: TrainConfig,
    script: Option<Script>,
) -> girandole::Result<Seen> {
    let is_new = script.is_none();
    let (leaves, waits) = script.unwrap_or_default();
    let mut recorder =
        Recorder { world: comm.clone(), losses: vec![], leaves, delay: config.far.delay, waits };
    let mut model: Parallel<_>;
    let mut trainer = match is_new {
        false => {
            model = setup.parallel(comm, layout, None)?;
            Trainer::new(&mut model, Arc::new(ALL), config)?
        }
        true => {
            let joining = Joining::gather(&*comm, None)?;
            model = setup.joining(comm, joining.layout())?;
            Trainer::joining(&mut model, Arc::new(ALL), config, joining)?
        }
    };
    if !is_new {
        trainer.resume_latest()?;
    }
    match trainer.run(&mut recorder) {
        Err(Error::Candle(_)) if leaves.is_some() => Ok(None),
        Err(Error::NotNeeded { .. }) => Ok(None),
        Err(error) => Err(error),
        Ok(_) => {
            let losses = recorder.losses.iter().map(|(_, loss)| *loss).collect();
            Ok(Some((losses, trainer.evaluate_on(&ALL)?)))
        }
    }
}

/// Trains while ranks leave after these steps, and returns what those of each group have seen that stay.
fn with_losses(
    setup: Setup,
    layout: &str,
    config: &TrainConfig,
    leaves: &[(usize, usize)],
) -> Vec<(usize, (Vec<f64>, f64))> {
    let layout: Layout = layout.parse().unwrap();
    let seen = Local::run_shared(layout.ranks(), |comm| {
        let leaves = leaves.iter().find(|(rank, _)| *rank == comm.rank()).map(|(_, step)| *step);
        Ok(train(setup, comm, &layout, config.clone(), Some((leaves, None)))?)
    });
    let of_group = layout.of_group().ranks();
    let seen = seen.unwrap().into_iter().enumerate();
    seen.filter_map(|(rank, seen)| Some((rank / of_group, seen?))).collect()
}

#[test]
fn the_others_go_on_without_a_group_that_is_lost() {
    // At once; and between what is sent and what comes of it, after both, and after a step at which another one is sent.
    for (delay, group, rank, step) in [(0, 1, 1, 4), (0, 0, 0, 6), (1, 1, 1, 3), (1, 0, 0, 4), (2, 1, 1, 6)] {
        let far = FarConfig { every: 3, delay, ..FarConfig::default() };
        let away = vec![(group, step..usize::MAX)];
        let (losses, expected) = ByHand { config: elastic(far, None), groups: 2, away }.train();
        for layout in [
            "far=2", "far=2,dp=2", "far=2,shard=2", "far=2,tp=2", "far=2,pp=2", "far=2,cp=2",
            "far=2,dp=2,tp=2",
        ] {
            let of_group = layout.parse::<Layout>().unwrap().ranks() / 2;
            // Any rank of the group.
            let leaves = [(rank * of_group + of_group - 1, step)];
            let seen = with_losses(Setup::default(), layout, &elastic(far, None), &leaves);
            assert_eq!(seen.len(), of_group, "{layout}");
            for (left, (own, loss)) in seen {
                let what = format!("{layout} without group {group} after step {step}, {delay} late");
                assert_eq!(left, 1 - group, "{what}");
                assert_close(&own, &losses[left], &what);
                assert_close(&[loss], &[expected], &what);
            }
        }
    }
}

#[test]
fn one_group_after_another_is_lost() {
    let far = FarConfig { every: 3, ..FarConfig::default() };
    let of = |dir: Option<&Path>| TrainConfig { batch_size: 12, ..elastic(far, dir) };
    let away = vec![(0, 3..usize::MAX), (2, 8..usize::MAX)];
    let (losses, expected) = ByHand { config: of(None), groups: 3, away }.train();
    for layout in ["far=3", "far=3,dp=2"] {
        let dir = tempfile::tempdir().unwrap();
        let of_group = layout.parse::<Layout>().unwrap().ranks() / 3;
        let seen = with_losses(Setup::default(), layout, &of(Some(dir.path())), &[(0, 3), (2 * of_group, 8)]);
        assert_eq!(seen.len(), of_group, "{layout}");
        for (_, (own, loss)) in seen {
            assert_close(&own, &losses[1], layout);
            assert_close(&[loss], &[expected], layout);
        }
        // The group that is left writes the run's checkpoints.
        let again = with_losses(Setup::default(), "far=2", &of(Some(dir.path())), &[]);
        assert!(again.len() == 2 && again.iter().all(|(_, (losses, _))| losses.is_empty()), "{again:?}");
        assert_close(&[again[0].1.1], &[expected], layout);
    }
}

#[test]
fn what_was_not_sent_stays_with_the_groups_that_go_on() {
    let far = FarConfig { every: 3, precision: FarPrecision::Int8, ..FarConfig::default() };
    let fragments = FarConfig { fragments: 3, ..far };
    let [one, other] = ["far=2", "far=2,tp=2"].map(|layout| {
        let of_group = layout.parse::<Layout>().unwrap().ranks() / 2;
        with_losses(
            Setup::default(),
            layout,
            &elastic(FarConfig { precision: FarPrecision::F32, ..fragments }, None),
            &[(of_group, 5)],
        )
    });
    assert_close(&one[0].1.0, &other[0].1.0, "fragments");
    let plain = with_losses(Setup::default(), "far=2", &elastic(far, None), &[(1, 5)]);
    let again = with_losses(Setup::default(), "far=2,dp=2", &elastic(far, None), &[(2, 5)]);
    assert_close(&plain[0].1.0, &again[0].1.0, "int8");
}

#[test]
fn a_new_group_takes_the_seat_of_a_lost_one() {
    for delay in [0, 1] {
        new_group_in_place_of_a_lost_one(delay);
    }
}

fn new_group_in_place_of_a_lost_one(delay: usize) {
    let far = FarConfig { every: 3, delay, ..FarConfig::default() };
    let sgd = OptimizerConfig::Sgd(SgdConfig::default());
    let layout: Layout = "far=2".parse().unwrap();
    let replacement = Some(Replacement { layout, within: Duration::from_secs(60) });
    let config = TrainConfig { optimizer: sgd, learning_rate: 0.3, replacement, ..elastic(far, None) };
    for lost in [0, 1] {
        let by_hand = TrainConfig { replacement: None, ..config.clone() };
        let (losses, expected) =
            ByHand { config: by_hand, groups: 2, away: vec![(lost, 4..9 + delay)] }.train();
        let job = &Job::new(2);
        let is_there = &Arc::new(AtomicBool::new(false));
        let rank = |rank: usize| {
            // After the average in which the other group hears of the loss.
            let waits = (7 + delay, is_there.clone());
            let script = if rank == lost { (Some(4), None) } else { (None, Some(waits)) };
            let comm = job.connect(rank, false).unwrap();
            let seen = train(Setup::default(), comm, &layout, config.clone(), Some(script)).unwrap();
            seen.unwrap_or_else(|| {
                while !is_there.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let comm = job.connect(2 + rank, true).unwrap();
                train(Setup::default(), comm, &layout, config.clone(), None).unwrap().unwrap()
            })
        };
        let seen: Vec<(Vec<f64>, f64)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|at| scope.spawn(move || rank(at))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let stayed = 1 - lost;
        assert_close(&seen[stayed].0, &losses[stayed], "the group that stayed");
        // Of the lost group, the losses until then and those of the new one.
        assert_close(&seen[lost].0, &losses[lost][losses[lost].len() - (3 - delay)..], "the new group");
        assert_close(&[seen[0].1, seen[1].1], &[expected; 2], "the model of all");
    }
}

#[test]
fn groups_that_were_lost_before_the_first_step_are_left_out() {
    let far = FarConfig { every: 3, ..FarConfig::default() };
    for (layout, groups) in
        [("far=2", 3), ("dp=1", 3), ("dp=1", 2), ("far=2,dp=2", 3), ("dp=2", 2), ("pp=2", 2)]
    {
        let left = layout.parse::<Layout>().unwrap();
        let config = TrainConfig { batch_size: 4 * groups, ..elastic(far, None) };
        let away = (left.far..groups).map(|group| (group, 0..usize::MAX)).collect();
        let (losses, expected) = ByHand { config: config.clone(), groups, away }.train();
        let setup = Setup { far_groups: groups, ..Setup::default() };
        let seen = with_losses(setup, layout, &config, &[]);
        assert_eq!(seen.len(), left.ranks(), "{layout}");
        for (group, (own, loss)) in seen {
            let what = format!("{layout} of {groups} groups");
            assert_close(&own, &losses[group], &what);
            assert_close(&[loss], &[expected], &what);
        }
    }
}

#[test]
fn a_new_group_takes_the_seat_of_one_that_was_lost_before_the_first_step() {
    let far = FarConfig { every: 3, ..FarConfig::default() };
    let sgd = OptimizerConfig::Sgd(SgdConfig::default());
    let [begins, whole] = ["dp=1", "far=2"].map(|layout| layout.parse::<Layout>().unwrap());
    let by_hand = TrainConfig { optimizer: sgd, learning_rate: 0.3, ..elastic(far, None) };
    let replacement = Some(Replacement { layout: whole, within: Duration::from_secs(60) });
    let config = TrainConfig { replacement, ..by_hand.clone() };
    let (losses, expected) = ByHand { config: by_hand, groups: 2, away: vec![(1, 0..9)] }.train();
    let (job, is_there) = (&Job::new(1), &Arc::new(AtomicBool::new(false)));
    let setup = Setup { far_groups: 2, ..Setup::default() };
    let rank = |rank: usize| {
        while rank == 1 && !is_there.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let script = (rank == 0).then(|| (None, Some((7, is_there.clone()))));
        let comm = job.connect(rank, rank == 1).unwrap();
        train(setup, comm, &begins, config.clone(), script).unwrap().unwrap()
    };
    let seen: Vec<(Vec<f64>, f64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|at| scope.spawn(move || rank(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_close(&seen[0].0, &losses[0], "the group that was there");
    assert_close(&seen[1].0, &losses[1], "the new group");
    assert_close(&[seen[0].1, seen[1].1], &[expected; 2], "the model of all");
}

#[test]
fn too_few_groups_are_the_end() {
    let far = FarConfig { every: 3, ..FarConfig::default() };
    let config = TrainConfig { fewest_ranks: Some(3), ..elastic(far, None) };
    let layout: Layout = "far=2,dp=2".parse().unwrap();
    let said = Local::run_shared(4, |comm| {
        let leaves = (comm.rank() == 3).then_some(4);
        let ended = train(Setup::default(), comm, &layout, config.clone(), Some((leaves, None)));
        Ok(ended.map_or_else(|error| error.to_string(), |_| String::new()))
    });
    let said = said.unwrap();
    assert!(said[..3].iter().all(|said| said.starts_with("2 of at least 3 ranks are left")), "{said:?}");
}
