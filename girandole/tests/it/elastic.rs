//! Elastic training: copies continue when ranks are lost, with the losses of a run that lost none.

use std::path::Path;
use std::sync::Arc;

use crate::common::{LEN, Setup};
use candle_core::{Device, Result, Tensor};
use girandole::comm::{Communicator, Local};
use girandole::models::CausalLm;
use girandole::trainer::{CheckpointPlan, Data, Observer, Regrouping, StepReport, TrainConfig, Trainer};
use girandole::{Batch, Error, Evaluation, Layout, Parallel};

pub(crate) const STEPS: usize = 9;

pub(crate) struct Rows;

impl Data for Rows {
    fn rows(&self) -> usize {
        36
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let token = |row: usize, place: usize| ((row * 5 + place * place * 3) % 48) as i64;
        let of = |first: usize| {
            rows.iter().flat_map(move |row| (0..LEN).map(move |place| token(*row, place + first)))
        };
        let tensor = |first| Tensor::from_iter(of(first), device)?.reshape((rows.len(), LEN));
        Ok((tensor(0)?, tensor(1)?).into())
    }
}

/// When a rank leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Moment {
    Stepped(usize),
    Evaluated(usize),
    Saving(usize),
}

/// Records losses by step, and ends the run of a rank that leaves.
pub(crate) struct Leaving {
    at: Option<Moment>,
    /// Whether the run goes on after a loss.
    goes_on: bool,
    pub(crate) losses: Vec<(usize, f64)>,
    ranks_left: Vec<usize>,
}

impl Leaving {
    pub(crate) fn new(at: Option<Moment>) -> Self {
        Self { at, goes_on: true, losses: Vec::new(), ranks_left: Vec::new() }
    }

    fn leave(&self, now: Moment) -> girandole::Result<()> {
        match self.at == Some(now) {
            true => Err(candle_core::Error::msg("this rank leaves").into()),
            false => Ok(()),
        }
    }
}

impl<M> Observer<M> for Leaving {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.losses.push((report.step, report.loss));
        self.leave(Moment::Stepped(report.step))
    }

    fn evaluated(&mut self, step: usize, _: &Evaluation, _: &mut Parallel<M>) -> girandole::Result<()> {
        self.leave(Moment::Evaluated(step))
    }

    fn saving(&mut self, step: usize) -> girandole::Result<()> {
        self.leave(Moment::Saving(step))
    }

    fn regrouping(&mut self, _: &Arc<dyn Communicator>) -> girandole::Result<bool> {
        Ok(self.goes_on)
    }

    fn regrouped(&mut self, _: usize, change: &Regrouping<'_>) -> girandole::Result<()> {
        assert!(change.world.world_size() < change.before.world_size() && change.lost.is_some());
        self.ranks_left.push(change.world.world_size());
        Ok(())
    }
}

pub(crate) fn config(fewest_ranks: Option<usize>, dir: Option<&Path>, in_background: bool) -> TrainConfig {
    let plan = |dir: &Path| CheckpointPlan { dir: dir.into(), every: 3, keep: 2, in_background };
    TrainConfig {
        steps: STEPS,
        batch_size: 16,
        learning_rate: 0.01,
        evaluate_every: Some(4),
        checkpoints: dir.map(plan),
        fewest_ranks,
        ..TrainConfig::default()
    }
}

/// What a rank has recorded: losses by step, and how many ranks were left after each loss of a rank.
pub(crate) type Record = (Vec<(usize, f64)>, Vec<usize>);

/// `None` for a rank that has left.
type Seen = Option<Record>;

fn train(
    comm: Arc<dyn Communicator>,
    layout: &str,
    config: TrainConfig,
    at: Option<Moment>,
) -> girandole::Result<Seen> {
    train_as(comm, Setup::default(), layout, config, at)
}

fn train_as(
    comm: Arc<dyn Communicator>,
    setup: Setup,
    layout: &str,
    config: TrainConfig,
    at: Option<Moment>,
) -> girandole::Result<Seen> {
    let layout: Layout = layout.parse()?;
    let mut model: Parallel<CausalLm> = setup.parallel(comm, &layout, None)?;
    let mut observer = Leaving::new(at);
    let mut trainer = Trainer::new(&mut model, Arc::new(Rows), config)?.evaluating(&Rows);
    trainer.resume_latest()?;
    match trainer.run(&mut observer) {
        Err(Error::Candle(_)) if at.is_some() => Ok(None),
        Err(Error::NotNeeded { .. }) => Ok(None),
        ended => ended.map(|_| Some((observer.losses, observer.ranks_left))),
    }
}

fn expected() -> Vec<f64> {
    expected_of(config(None, None, false))
}

pub(crate) fn expected_of(config: TrainConfig) -> Vec<f64> {
    expected_as(Setup::default(), config)
}

fn expected_as(setup: Setup, config: TrainConfig) -> Vec<f64> {
    let seen = Local::run_shared(1, |comm| Ok(train_as(comm, setup, "", config.clone(), None)?));
    let seen = seen.unwrap().remove(0);
    seen.unwrap().0.into_iter().map(|(_, loss)| loss).collect()
}

/// Asserts that every step was done once, with the expected loss.
pub(crate) fn assert_undisturbed(losses: &[(usize, f64)], expected: &[f64], what: &str) {
    let steps: Vec<usize> = losses.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{what}");
    for ((step, loss), expected) in losses.iter().zip(expected) {
        assert!((loss - expected).abs() < 1e-10, "{what}, step {step}: {loss}, expected {expected}");
    }
}

#[test]
fn the_others_go_on_as_if_nothing_had_happened() {
    let expected = expected();
    // 16 rows in two micro-batches: three ranks have 6, 5 and 5 of them.
    for (leaves, at) in [
        (vec![(0, Moment::Stepped(2))], vec![3]),
        (vec![(2, Moment::Evaluated(4)), (1, Moment::Stepped(6))], vec![3, 2]),
        (vec![(0, Moment::Saving(3)), (1, Moment::Evaluated(4)), (3, Moment::Stepped(8))], vec![3, 2, 1]),
        (vec![(3, Moment::Stepped(1)), (0, Moment::Saving(6))], vec![3, 2]),
    ] {
        for in_background in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let seen = Local::run_shared(4, |comm| {
                let own = leaves.iter().find(|(rank, _)| *rank == comm.rank()).map(|(_, moment)| *moment);
                Ok(train(comm, "dp=4", config(Some(1), Some(dir.path()), in_background), own)?)
            });
            for (rank, seen) in seen.unwrap().into_iter().enumerate() {
                let Some((losses, left)) = seen else { continue };
                let what = format!("{leaves:?}, background {in_background}, rank {rank}");
                assert_undisturbed(&losses, &expected, &what);
                assert_eq!(left, at, "{what}");
            }
            // The last checkpoint is complete: one process resumes from it, with nothing left to do.
            let again = Local::run_shared(1, |comm| {
                Ok(train(comm, "", config(None, Some(dir.path()), false), None)?)
            });
            assert!(again.unwrap().remove(0).unwrap().0.is_empty());
        }
    }
}

#[test]
fn no_rank_returns_before_all_have_done_the_work_after_the_last_step() {
    // The second time, an observer knows that all have done it.
    for (goes_on, tries, left) in [(true, 2, vec![2]), (false, 1, vec![])] {
        let done = Local::run_shared(3, |comm| {
            let mut model: Parallel<CausalLm> =
                Setup::default().parallel(comm.clone(), &"dp=3".parse::<Layout>()?, None)?;
            let mut observer = Leaving { goes_on, ..Leaving::new(None) };
            let mut done = 0;
            let mut work = |_: &mut Parallel<CausalLm>| {
                done += 1;
                if comm.rank() == 2 {
                    Err(candle_core::Error::msg("this rank leaves").into())
                } else {
                    Ok(())
                }
            };
            let config = TrainConfig { steps: 2, batch_size: 18, ..config(Some(1), None, false) };
            let mut trainer = Trainer::new(&mut model, Arc::new(Rows), config)?;
            let ended = trainer.run_and(&mut observer, &mut [&mut work]);
            assert_eq!(ended.is_ok(), comm.rank() != 2, "{ended:?}");
            Ok(ended.is_ok().then_some((done, observer.ranks_left)))
        });
        let others = Some((tries, left));
        assert_eq!(done.unwrap(), [others.clone(), others, None]);
    }
}

#[test]
fn too_few_are_the_end_and_so_is_a_loss_that_is_not_expected() {
    let ended = |fewest: Option<usize>| {
        let ended = Local::run_shared(3, |comm| {
            let leaves = (comm.rank() == 1).then_some(Moment::Stepped(2));
            let stays = leaves.is_none();
            let ended =
                train(comm, "dp=3", TrainConfig { batch_size: 18, ..config(fewest, None, false) }, leaves);
            Ok(stays.then(|| ended.unwrap_err().to_string()))
        });
        ended.unwrap().into_iter().flatten().collect::<Vec<_>>()
    };
    let said = ended(Some(3));
    assert!(
        said.len() == 2 && said.iter().all(|said| said.starts_with("2 of at least 3 ranks are left: rank 1")),
        "{said:?}"
    );
    let said = ended(None);
    assert!(said.iter().all(|said| said.starts_with("rank 1")), "{said:?}");
}

/// A model with experts for layouts that divide them.
fn setup_of(layout: &str) -> Setup {
    Setup { experts: layout.contains("ep="), ..Setup::default() }
}

/// Trains in a layout in which some ranks leave, and returns what those have recorded that stay to the end.
pub(crate) fn with_losses(layout: &str, leaves: &[(usize, Moment)], config: &TrainConfig) -> Vec<Record> {
    let ranks = layout.parse::<Layout>().unwrap().ranks();
    let seen = Local::run_shared(ranks, |comm| {
        let own = leaves.iter().find(|(rank, _)| *rank == comm.rank()).map(|(_, moment)| *moment);
        Ok(train_as(comm, setup_of(layout), layout, config.clone(), own)?)
    });
    seen.unwrap().into_iter().flatten().collect()
}

#[test]
fn what_other_ranks_hold_goes_on_in_another_layout() {
    let config = TrainConfig { batch_size: 8, ..config(Some(1), None, false) };
    let [plain, experts] = ["", "ep=2"]
        .map(|layout| expected_as(setup_of(layout), TrainConfig { fewest_ranks: None, ..config.clone() }));
    for (layout, leaves, left) in [
        // 8 rows on 3 ranks.
        ("dp=2,shard=2", vec![(3, Moment::Stepped(2))], vec![3]),
        ("dp=2,shard=2", vec![(0, Moment::Stepped(2))], vec![3]),
        ("dp=2,tp=2", vec![(1, Moment::Stepped(3))], vec![2]),
        ("dp=2,tp=2", vec![(2, Moment::Evaluated(4))], vec![2]),
        ("pp=2,dp=2", vec![(0, Moment::Stepped(1))], vec![2]),
        ("dp=3,shard=2", vec![(2, Moment::Stepped(2)), (0, Moment::Stepped(5))], vec![4, 3]),
        ("dp=2,shard=2,tp=2", vec![(5, Moment::Stepped(4))], vec![6]),
        ("pp=2,dp=2,shard=2", vec![(7, Moment::Stepped(4))], vec![4]),
        ("dp=2,cp=2", vec![(3, Moment::Stepped(2))], vec![2]),
        ("dp=2,shard=2,cp=2", vec![(2, Moment::Stepped(3))], vec![6]),
        ("dp=2,ep=2", vec![(3, Moment::Stepped(2))], vec![2]),
        ("dp=2,ep=2", vec![(0, Moment::Stepped(2))], vec![2]),
        ("dp=2,ep=2", vec![(1, Moment::Evaluated(4))], vec![2]),
        ("dp=4,ep=2", vec![(4, Moment::Stepped(2)), (1, Moment::Stepped(5))], vec![6, 4]),
        ("dp=2,shard=2,ep=2", vec![(6, Moment::Stepped(3))], vec![6]),
        ("dp=2,ep=2,tp=2", vec![(5, Moment::Stepped(4))], vec![4]),
        ("pp=2,dp=2,ep=2", vec![(2, Moment::Stepped(4))], vec![4]),
    ] {
        let seen = with_losses(layout, &leaves, &config);
        assert_eq!(seen.len(), *left.last().unwrap(), "{layout}");
        for (mut losses, sizes) in seen {
            // A step that some ranks completed and others did not is repeated, unless the first hold the whole model.
            losses.dedup_by_key(|(step, _)| *step);
            let expected = if layout.contains("ep=") { &experts } else { &plain };
            assert_undisturbed(&losses, expected, &format!("{layout}, {leaves:?}"));
            assert_eq!(sizes, left, "{layout}, {leaves:?}");
        }
    }
}

#[test]
fn what_no_other_rank_holds_comes_from_the_last_checkpoint() {
    for (layout, in_background, left) in [
        ("shard=4", false, 3),
        ("shard=4", true, 3),
        ("shard=2,tp=2", true, 2),
        ("pp=2,shard=2", false, 2),
        ("shard=2,ep=2", true, 2),
        ("pp=2,shard=2,ep=2", false, 4),
    ] {
        let whole = TrainConfig { batch_size: 8, ..config(None, None, false) };
        let expected = expected_as(setup_of(layout), whole);
        let dir = tempfile::tempdir().unwrap();
        let config = TrainConfig { batch_size: 8, ..config(Some(1), Some(dir.path()), in_background) };
        // The checkpoint of step 3 is complete when that of step 6 begins.
        let seen = with_losses(layout, &[(1, Moment::Stepped(8))], &config);
        assert_eq!(seen.len(), left, "{layout}");
        for (losses, sizes) in seen {
            assert_eq!(sizes, [left], "{layout}");
            // Steps 1 to 7 or 8, and then those after the checkpoint of step 3 or 6 again.
            let again = (1..losses.len()).find(|place| losses[*place].0 <= losses[place - 1].0).unwrap();
            let steps = |losses: &[(usize, f64)]| losses.iter().map(|(step, _)| *step).collect::<Vec<_>>();
            let (first, last) = (losses[again].0, losses[again - 1].0);
            assert!([4, 7].contains(&first) && last >= 7, "{layout}: {first}, {last}");
            assert_eq!(steps(&losses[..again]), (1..=last).collect::<Vec<_>>(), "{layout}");
            assert_eq!(steps(&losses[again..]), (first..=STEPS).collect::<Vec<_>>(), "{layout}");
            for (step, loss) in losses {
                let expected = expected[step - 1];
                assert!(
                    (loss - expected).abs() < 1e-10,
                    "{layout}, step {step}: {loss}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn layouts_that_cannot_go_on_are_refused() {
    for (layout, said) in [
        ("shard=2", "give copies (dp), or checkpoints to go on from"),
        ("tp=2", "only a layout with dp or shard can go on with fewer ranks"),
    ] {
        let errors = Local::run_shared(2, |comm| {
            let mut model: Parallel<CausalLm> =
                Setup::default().parallel(comm, &layout.parse::<Layout>()?, None)?;
            Ok(Trainer::new(&mut model, Arc::new(Rows), config(Some(1), None, false))
                .unwrap_err()
                .to_string())
        });
        assert!(errors.unwrap()[0].contains(said), "{layout}");
    }
}

#[test]
fn ranks_that_are_told_something_else_are_refused_by_all() {
    let said = Local::run_shared(3, |comm| {
        let rank = comm.rank();
        let mut model: Parallel<CausalLm> =
            Setup::default().parallel(comm, &"dp=3".parse::<Layout>()?, None)?;
        let config = TrainConfig {
            batch_size: 18,
            steps: STEPS + usize::from(rank == 2),
            ..config(None, None, false)
        };
        Ok(Trainer::new(&mut model, Arc::new(Rows), config).unwrap_err().to_string())
    });
    for said in said.unwrap() {
        let host = comm::internal::host_name();
        let expected = format!(
            "rank 2 (host {host}) was given steps 10, and rank 0 (host {host}) steps 9: give all ranks the same"
        );
        assert_eq!(said, expected);
    }
}
