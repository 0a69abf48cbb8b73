//! Elastic runs that go back to a checkpoint: only to one that they have written, or have begun from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use girandole::comm::{Communicator, Local};
use girandole::models::CausalLm;
use girandole::trainer::{TrainConfig, Trainer};
use girandole::training::{CheckpointConfig, Checkpoints};
use girandole::{Error, Layout, Parallel};

use crate::common::Setup;
use crate::elastic::{Leaving, Moment, Rows, STEPS, config, expected_of};

fn checkpoints(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.into(), ..CheckpointConfig::default() }).unwrap()
}

fn divided(dir: &Path) -> TrainConfig {
    TrainConfig { batch_size: 8, ..config(Some(1), Some(dir), false) }
}

/// Trains in four shards, perhaps from a checkpoint, and returns the losses by step.
fn train(
    comm: Arc<dyn Communicator>,
    config: TrainConfig,
    from: Option<&PathBuf>,
    at: Option<Moment>,
) -> girandole::Result<Vec<(usize, f64)>> {
    let dir = config.checkpoints.clone().unwrap().dir;
    let mut model: Parallel<CausalLm> =
        Setup::default().parallel(comm, &"shard=4".parse::<Layout>()?, None)?;
    let mut observer = Leaving::new(at);
    let mut trainer = Trainer::new(&mut model, Arc::new(Rows), config)?;
    if let Some(folder) = from {
        trainer.resume(&checkpoints(&dir).contents(folder)?)?;
    }
    trainer.run(&mut observer)?;
    Ok(observer.losses)
}

/// Leaves the checkpoints of steps 6 and 9 in a folder, and returns theirs.
fn earlier_run(dir: &Path) -> Vec<PathBuf> {
    Local::run_shared(4, |comm| Ok(train(comm, divided(dir), None, None)?)).unwrap();
    checkpoints(dir).list().unwrap()
}

#[test]
fn a_run_goes_back_to_where_it_began_until_it_has_written_a_checkpoint() {
    let expected = expected_of(TrainConfig { batch_size: 8, ..config(None, None, false) });
    // Step 7 is repeated unless there is a checkpoint of it; whether all others have completed step 8 is not certain.
    for (every, again, times) in [(3, &[7, 8, 9][..], 2), (1, &[8, 9], 1)] {
        let dir = tempfile::tempdir().unwrap();
        let found = earlier_run(dir.path());
        let mut config = divided(dir.path());
        config.checkpoints.as_mut().unwrap().every = every;
        let seen = Local::run_shared(4, |comm| {
            let leaves = (comm.rank() == 2).then_some(Moment::Stepped(8));
            let left = leaves.is_some();
            let seen = train(comm, config.clone(), Some(&found[0]), leaves);
            Ok(if left { None } else { Some(seen?) })
        });
        for losses in seen.unwrap().into_iter().flatten() {
            let steps: Vec<usize> = losses.iter().map(|(step, _)| *step).collect();
            assert!(steps.ends_with(again), "a checkpoint every {every} steps: {steps:?}");
            assert_eq!(steps.iter().filter(|step| **step == 7).count(), times, "{every}: {steps:?}");
            for (step, loss) in losses {
                assert!((loss - expected[step - 1]).abs() < 1e-10, "step {step}: {loss}");
            }
        }
        assert_eq!(checkpoints(dir.path()).latest().unwrap().unwrap().step, STEPS as u64);
    }
}

#[test]
fn checkpoints_of_an_earlier_run_are_not_those_of_one_that_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    earlier_run(dir.path());
    let ended = Local::run_shared(4, |comm| {
        let leaves = (comm.rank() == 2).then_some(Moment::Stepped(2));
        let stays = leaves.is_none();
        let ended = train(comm, divided(dir.path()), None, leaves);
        Ok(!stays || matches!(ended, Err(Error::StateLost { .. })))
    });
    assert_eq!(ended.unwrap(), [true; 4]);
}
