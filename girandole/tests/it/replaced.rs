//! Replacement of lost ranks: new ones join a run, receive its state, and go on with it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use girandole::comm::{Communicator, Elastic, InitMethod, Local, Secret, Tcp, TcpConfig};
use girandole::models::CausalLm;
use girandole::trainer::{
    CheckpointPlan, Joining, Observer, ObserverState, Regrouping, Replacement, StepReport, TrainConfig,
    Trainer,
};
use girandole::{Error, Layout, Parallel};

use crate::common::Setup;
use crate::elastic::{Rows, STEPS, assert_undisturbed, expected_of};

/// When a rank leaves, and the first one waits for its replacement.
#[derive(Debug, Clone, Copy, Default)]
struct Script {
    /// After this step this rank leaves.
    leaves: Option<usize>,
    /// After this step the first rank waits until a new one asks to join, unless one has joined already.
    waits: Option<usize>,
    /// After this step it waits so in any case.
    asked: Option<usize>,
    /// In this change of the group, counted from 1, this rank leaves.
    leaves_change: Option<usize>,
}

/// Records losses by step, those that it was given, and the number of ranks after each change.
struct Recorder {
    script: Script,
    ranks: usize,
    world: Arc<dyn Communicator>,
    losses: Vec<(usize, f64)>,
    given: Option<ObserverState>,
    sizes: Vec<usize>,
    changes: usize,
}

impl<M> Observer<M> for Recorder {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.losses.push((report.step, report.loss));
        if self.script.leaves == Some(report.step) {
            return Err(candle_core::Error::msg("this rank leaves").into());
        }
        let is_waiting = self.script.waits == Some(report.step) && self.world.world_size() < self.ranks;
        if (is_waiting || self.script.asked == Some(report.step)) && self.world.rank() == 0 {
            let began = Instant::now();
            while self.world.elastic()?.waiting() == 0 {
                assert!(began.elapsed() < Duration::from_secs(60), "no new rank comes");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn state(&self) -> girandole::Result<ObserverState> {
        Ok(ObserverState { values: self.losses.len().into(), ..ObserverState::default() })
    }

    fn regrouping(&mut self, _: &Arc<dyn Communicator>) -> girandole::Result<bool> {
        self.changes += 1;
        match self.script.leaves_change == Some(self.changes) {
            true => Err(candle_core::Error::msg("this rank leaves").into()),
            false => Ok(true),
        }
    }

    fn regrouped(&mut self, _: usize, change: &Regrouping<'_>) -> girandole::Result<()> {
        self.world = change.world.clone();
        self.sizes.push(change.world.world_size());
        Ok(())
    }

    fn joined(&mut self, _: usize, state: ObserverState, change: &Regrouping<'_>) -> girandole::Result<()> {
        self.world = change.world.clone();
        self.given = Some(state);
        self.sizes.push(change.world.world_size());
        Ok(())
    }
}

fn config(layout: Layout, fewest: usize, dir: Option<&Path>) -> TrainConfig {
    TrainConfig {
        steps: STEPS,
        batch_size: 12,
        learning_rate: 0.01,
        checkpoints: dir.map(|dir| CheckpointPlan {
            dir: dir.into(),
            every: 3,
            keep: 2,
            in_background: true,
        }),
        fewest_ranks: Some(fewest),
        replacement: Some(Replacement { layout, within: Duration::from_secs(60) }),
        ..TrainConfig::default()
    }
}

/// Trains as one of the first ranks, or as a new one. Returns `None` if the rank has left.
fn train(
    comm: Arc<dyn Communicator>,
    config: TrainConfig,
    script: Option<Script>,
) -> girandole::Result<Option<Recorder>> {
    let layout = config.replacement.unwrap().layout;
    let mut observer = Recorder {
        script: script.unwrap_or_default(),
        ranks: layout.ranks(),
        world: comm.clone(),
        losses: vec![],
        given: None,
        sizes: vec![],
        changes: 0,
    };
    let setup = Setup::default();
    let mut model: Parallel<CausalLm>;
    let mut trainer = match script {
        Some(_) => {
            model = setup.parallel(comm, &layout, None)?;
            Trainer::new(&mut model, Arc::new(Rows), config)?
        }
        None => {
            let (mut comm, mut lost) = (comm, None);
            let joining = loop {
                match Joining::gather(&*comm, lost.as_ref()) {
                    Ok(joining) => break joining,
                    Err(error) => lost = Some(error.loss().cloned().ok_or(error)?),
                }
                comm = comm.elastic()?.shrink()?;
            };
            model = setup.joining(comm, joining.layout())?;
            Trainer::joining(&mut model, Arc::new(Rows), config, joining)?
        }
    };
    match trainer.run(&mut observer) {
        Err(Error::Candle(_)) if observer.script.leaves.or(observer.script.leaves_change).is_some() => {
            Ok(None)
        }
        ended => ended.map(|_| Some(observer)),
    }
}

/// A job whose ranks meet over TCP.
pub(crate) struct Job {
    folder: tempfile::TempDir,
    secret: Secret,
    ranks: usize,
}

impl Job {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), secret: Secret::random().unwrap(), ranks }
    }

    pub(crate) fn connect(
        &self,
        rank: usize,
        newcomer: bool,
    ) -> girandole::comm::Result<Arc<dyn Communicator>> {
        let file = Some(self.folder.path().join("group"));
        let config = TcpConfig {
            rank,
            world_size: self.ranks,
            secret: Some(self.secret.clone()),
            init_method: InitMethod::File(self.folder.path().join("meeting")),
            // One for which there is no place gives up soon.
            timeout: Duration::from_secs(if rank < 2 * self.ranks { 60 } else { 3 }),
            elastic: Some(Elastic { file, newcomer, ..Elastic::default() }),
            ..TcpConfig::default()
        };
        Ok(Arc::new(Tcp::connect(&config)?))
    }
}

/// Trains on TCP; a rank that has left joins again as a new one, and so do those for which the layout has no place. Returns
/// what the ranks have recorded at the end, the new ones last.
fn with_replacements(layout: &str, fewest: usize, dir: Option<&Path>, scripts: &[Script]) -> Vec<Recorder> {
    let layout = layout.parse::<Layout>().unwrap();
    let ranks = layout.ranks();
    let job = Job::new(ranks);
    let rank = |rank: usize| {
        let config = config(layout, fewest, dir);
        if rank < ranks {
            let comm = job.connect(rank, false).unwrap();
            if let Some(recorded) = train(comm, config.clone(), Some(scripts[rank])).unwrap() {
                return Some((false, recorded));
            }
        }
        // The job may end without it.
        let comm = job.connect(ranks + rank, true).ok()?;
        Some((true, train(comm, config, None).unwrap().unwrap()))
    };
    let rank = &rank;
    let mut recorded: Vec<(bool, Recorder)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..scripts.len()).map(|place| scope.spawn(move || rank(place))).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    recorded.sort_by_key(|(is_new, _)| *is_new);
    recorded.into_iter().map(|(_, recorded)| recorded).collect()
}

fn leaves(step: usize) -> Script {
    Script { leaves: Some(step), ..Script::default() }
}

fn waits(step: usize) -> Script {
    Script { waits: Some(step), ..Script::default() }
}

#[test]
fn a_new_rank_goes_on_with_the_state_of_the_others() {
    let one = TrainConfig { fewest_ranks: None, replacement: None, ..config(Layout::default(), 1, None) };
    let expected = expected_of(one);
    let stays = Script::default();
    for (layout, fewest, scripts, sizes) in [
        // Between two steps, while the others go on with fewer ranks.
        ("dp=3", 1, vec![waits(4), leaves(2), waits(4)], vec![2, 3]),
        ("dp=3", 1, vec![leaves(2), waits(4), waits(4)], vec![2, 3]),
        ("dp=2,shard=2", 1, vec![waits(5), waits(5), waits(5), leaves(3)], vec![3, 4]),
        // The others wait, because they are too few.
        ("dp=2", 2, vec![stays, leaves(3)], vec![2]),
        ("dp=4", 4, vec![leaves(2), stays, stays, leaves(5)], vec![4, 4]),
        ("dp=2,shard=2", 4, vec![stays, leaves(2), stays, stays], vec![4]),
        ("dp=3,shard=2", 6, vec![stays, stays, leaves(2), stays, stays, stays], vec![6]),
    ] {
        let recorded = with_replacements(layout, fewest, None, &scripts);
        assert_eq!(recorded.len(), scripts.len());
        for recorder in recorded {
            let what = format!("{layout}, {scripts:?}, new: {}", recorder.given.is_some());
            let mut losses = recorder.losses;
            losses.dedup_by_key(|(step, _)| *step);
            match recorder.given {
                None => {
                    assert_undisturbed(&losses, &expected, &what);
                    assert_eq!(recorder.sizes, sizes, "{what}");
                }
                Some(given) => {
                    let first = losses[0].0;
                    assert!(first > 1 && given.values.as_u64().unwrap() + 1 >= first as u64, "{what}");
                    let all = (1..first).map(|step| (step, expected[step - 1])).chain(losses);
                    assert_undisturbed(&all.collect::<Vec<_>>(), &expected, &what);
                    assert_eq!(sizes.last(), recorder.sizes.last(), "{what}");
                }
            }
        }
    }
}

#[test]
fn no_more_ranks_join_than_the_layout_has() {
    // The third asks before the second step, which the first rank does not take earlier.
    let scripts = [Script { asked: Some(1), ..Script::default() }, Script::default(), Script::default()];
    let recorded = with_replacements("dp=2", 1, None, &scripts);
    assert_eq!(recorded.len(), 2);
    for recorder in recorded {
        assert_eq!((recorder.losses.len(), recorder.sizes), (STEPS, vec![]));
    }
}

#[test]
fn what_cannot_be_replaced_is_refused() {
    let within = Duration::from_secs(1);
    for (fewest, layout, help) in [
        (None, "dp=2", "give fewest_ranks, too"),
        (Some(1), "dp=1", "no fewer ranks"),
        (Some(1), "dp=2,tp=2", "the run begins in dp=2: give one with the same pp, cp, ep and tp"),
    ] {
        let said = Local::run_shared(2, |comm| {
            let replacement = Some(Replacement { layout: layout.parse()?, within });
            let config =
                TrainConfig { fewest_ranks: fewest, replacement, ..config(Layout::copies(2), 1, None) };
            let mut model = Setup::default().parallel(comm, &Layout::copies(2), None)?;
            Ok(Trainer::new(&mut model, Arc::new(Rows), config).unwrap_err().to_string())
        });
        for said in said.unwrap() {
            let begins = format!("the layout with all ranks: got {layout}; ");
            assert!(said.starts_with(&begins) && said.contains(help), "{said}");
        }
    }
}

#[test]
fn what_was_lost_with_a_rank_comes_from_a_checkpoint_and_the_new_rank_gets_its_part() {
    let one = TrainConfig { fewest_ranks: None, replacement: None, ..config(Layout::default(), 1, None) };
    let expected = expected_of(one);
    let dir = tempfile::tempdir().unwrap();
    let scripts = [Script::default(), leaves(8), Script::default()];
    let recorded = with_replacements("shard=3", 3, Some(dir.path()), &scripts);
    let [first, second, new] = <[Recorder; 3]>::try_from(recorded).ok().unwrap();
    for recorder in [&first, &second, &new] {
        for (step, loss) in &recorder.losses {
            let expected = expected[step - 1];
            assert!((loss - expected).abs() < 1e-10, "step {step}: {loss}, expected {expected}");
        }
        assert_eq!(recorder.losses.last().unwrap().0, STEPS);
        assert_eq!(recorder.sizes, [3]);
    }
    // The checkpoint of step 3 is complete when that of step 6 begins.
    assert!([4, 7].contains(&new.losses[0].0));
}

#[test]
fn what_is_lost_while_a_new_rank_joins_is_missing_on_all_ranks() {
    // Three ranks go on without copies, and one of them leaves when the new one comes, before it has its part.
    let layout = "dp=2,shard=2".parse::<Layout>().unwrap();
    let goes = Script { leaves_change: Some(2), ..Script::default() };
    let (job, scripts) = (&Job::new(4), [leaves(2), waits(3), waits(3), goes]);
    let rank = |rank: usize| {
        let comm = job.connect(rank, rank == scripts.len()).unwrap();
        train(comm, config(layout, 1, None), scripts.get(rank).copied())
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..=scripts.len()).map(|at| scope.spawn(move || rank(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(None) => assert!([0, 3].contains(&rank)),
            Ok(Some(_)) => panic!("rank {rank} goes on"),
            Err(Error::StateLost { lost }) => assert!(lost.to_string().starts_with("rank 3 "), "{lost}"),
            Err(error) => panic!("rank {rank}: {error}"),
        }
    }
}
