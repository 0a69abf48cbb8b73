//! Groups that train on their own and average rarely.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use girandole::comm::{Local, carry};
use girandole::trainer::{
    CheckpointPlan, Data, NoObserver, Observer, OptimizerConfig, StepReport, TrainConfig, Trainer,
};
use girandole::training::{AdamConfig, CheckpointConfig, Checkpoints, SgdConfig};
use girandole::{Batch, FarConfig, FarPrecision, Layout};

use crate::common::{LEN, Setup};
use crate::far_by_hand::ByHand;

const STEPS: usize = 8;
const BATCH: usize = 8;

/// Every `stride`-th row from `first` on, of rows with different numbers of targets.
pub(crate) struct Uneven {
    pub(crate) first: usize,
    pub(crate) stride: usize,
}

pub(crate) const ALL: Uneven = Uneven { first: 0, stride: 1 };

impl Data for Uneven {
    fn rows(&self) -> usize {
        36 / self.stride
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let rows = rows.iter().map(|row| row * self.stride + self.first);
        let token = |row: usize, place: usize| ((row * 5 + place * place * 3) % 48) as i64;
        let input = rows.clone().flat_map(|row| (0..LEN).map(move |place| token(row, place)));
        let counts = |row: usize, place: usize| row % 2 == 1 || place < 2;
        let targets = rows.clone().flat_map(|row| {
            (0..LEN).map(move |place| if counts(row, place) { token(row, place + 1) } else { -100 })
        });
        let shape = (rows.len(), LEN);
        Ok((
            Tensor::from_iter(input, device)?.reshape(shape)?,
            Tensor::from_iter(targets, device)?.reshape(shape)?,
        )
            .into())
    }
}

pub(crate) fn config(far: FarConfig) -> TrainConfig {
    TrainConfig {
        steps: STEPS,
        batch_size: BATCH,
        learning_rate: 0.01,
        shuffle: false,
        clip: None,
        evaluation_rows: 36,
        far,
        ..TrainConfig::default()
    }
}

#[derive(Default)]
pub(crate) struct Reports(pub(crate) Vec<StepReport>);

impl<M> Observer<M> for Reports {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.0.push(*report);
        Ok(())
    }
}

/// Trains until a step, from the latest checkpoint; of the first rank, the losses and the loss of the model on all rows, which must be
/// the same on all ranks to the bit where they hold equal parts.
fn train(setup: Setup, layout: &str, config: &TrainConfig, until: usize) -> (Vec<f64>, f64) {
    let layout: Layout = layout.parse().unwrap();
    let of_ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut model = setup.parallel(comm, &layout, None)?;
        let mut reports = Reports::default();
        let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?;
        trainer.resume_latest()?;
        trainer.run_until(until, &mut reports)?;
        let losses: Vec<f64> = reports.0.iter().map(|report| report.loss).collect();
        Ok((losses, trainer.evaluate_on(&ALL)?))
    });
    let of_ranks = of_ranks.unwrap();
    if until == config.steps {
        assert!(of_ranks.iter().all(|(_, loss)| *loss == of_ranks[0].1), "{layout}: {of_ranks:?}");
    }
    of_ranks.into_iter().next().unwrap()
}

pub(crate) fn assert_close(got: &[f64], expected: &[f64], what: &str) {
    let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(got.len() == expected.len() && gap < 1e-10, "{what}: {gap:e}: {got:?}, expected {expected:?}");
}

const LAYOUTS: [&str; 8] = [
    "far=2", "far=2,dp=2", "far=2,shard=2", "far=2,tp=2", "far=2,pp=2", "far=2,cp=2", "far=2,dp=2,tp=2",
    "far=2,pp=2,shard=2",
];

#[test]
fn averages_after_each_step_are_data_parallelism() {
    let far = FarConfig { every: 1, learning_rate: 1.0, momentum: 0.0, ..FarConfig::default() };
    let sgd = OptimizerConfig::Sgd(SgdConfig::default());
    let config = TrainConfig { optimizer: sgd, learning_rate: 0.3, ..config(far) };
    let (losses, expected) = train(Setup::default(), "", &config, STEPS);
    assert!(expected < losses[0] - 0.1, "{losses:?}, {expected}");
    for layout in LAYOUTS.into_iter().chain(["far=4", "far=8"]) {
        let (_, loss) = train(Setup::default(), layout, &config, STEPS);
        assert_close(&[loss], &[expected], layout);
    }
}

/// Trains two groups by hand.
fn by_hand(far: FarConfig) -> (Vec<f64>, f64) {
    let (mut losses, loss) = ByHand { config: config(far), groups: 2, away: vec![] }.train();
    (losses.remove(0), loss)
}

#[test]
fn groups_step_by_the_formula_in_every_layout() {
    let far = FarConfig { every: 3, ..FarConfig::default() };
    let (losses, expected) = by_hand(far);
    assert!(losses.len() == STEPS && expected < losses[0] - 0.1, "{losses:?}, {expected}");
    for layout in LAYOUTS {
        let (got, loss) = train(Setup::default(), layout, &config(far), STEPS);
        assert_close(&got, &losses, layout);
        assert_close(&[loss], &[expected], layout);
    }
}

#[test]
fn fragments_are_averaged_at_their_own_steps() {
    let whole = by_hand(FarConfig { every: 3, ..FarConfig::default() }).1;
    for fragments in [2, 3] {
        let far = FarConfig { every: 3, fragments, ..FarConfig::default() };
        let (losses, expected) = by_hand(far);
        assert!((expected - whole).abs() > 1e-4, "{expected}, {whole}");
        for layout in LAYOUTS {
            let (got, loss) = train(Setup::default(), layout, &config(far), STEPS);
            assert_close(&got, &losses, layout);
            assert_close(&[loss], &[expected], layout);
        }
        // Each fragment has its own targets since its last average.
        let dir = tempfile::tempdir().unwrap();
        let config = with_checkpoints(dir.path(), far, false);
        let (mut got, mut last) = (Vec::new(), 0.0);
        for (layout, until) in [("far=2,dp=2", 2), ("far=2,pp=2", 4), ("far=2,shard=2", STEPS)] {
            let (of_run, loss) = train(Setup::default(), layout, &config, until);
            got.extend(of_run);
            last = loss;
        }
        assert_close(&got, &losses, "losses of a run that goes on");
        assert_close(&[last], &[expected], "a run that goes on");
    }
}

#[test]
fn what_groups_learn_while_their_changes_are_on_the_way_stays() {
    let of = |every, fragments, delay| FarConfig { every, fragments, delay, ..FarConfig::default() };
    let at_once = by_hand(of(3, 1, 0)).1;
    // The first sums come at another step than any, those of two fragments between each other, and the last ones when all are averaged.
    for far in [of(3, 1, 1), of(3, 1, 2), of(6, 2, 2), of(4, 2, 1)] {
        let (losses, expected) = by_hand(far);
        assert!((expected - at_once).abs() > 1e-4, "{expected}, {at_once}");
        for layout in LAYOUTS {
            let (got, loss) = train(Setup::default(), layout, &config(far), STEPS);
            assert_close(&got, &losses, layout);
            assert_close(&[loss], &[expected], layout);
        }
        // Runs that end while something is on its way.
        for ends in [[1, 3, 4, 5], [2, 4, 6, 7]] {
            let dir = tempfile::tempdir().unwrap();
            let plan =
                CheckpointPlan { dir: dir.path().into(), every: 1, keep: 2, in_background: ends[0] == 1 };
            let config = TrainConfig { checkpoints: Some(plan), ..config(far) };
            let (mut got, mut last) = (Vec::new(), 0.0);
            let layouts = ["far=2,dp=2", "far=2,pp=2", "far=2,tp=2", "far=2", "far=2,shard=2"];
            for (layout, until) in layouts.into_iter().zip(ends.into_iter().chain([STEPS])) {
                let (of_run, loss) = train(Setup::default(), layout, &config, until);
                got.extend(of_run);
                last = loss;
            }
            assert_close(&got, &losses, "losses of a run that goes on");
            assert_close(&[last], &[expected], "a run that goes on");
        }
    }
}

#[test]
fn what_is_on_its_way_does_not_come_into_a_state_that_is_loaded() {
    let far = FarConfig { every: 3, delay: 2, ..FarConfig::default() };
    let (losses, expected) = by_hand(far);
    let dir = tempfile::tempdir().unwrap();
    let config = with_checkpoints(dir.path(), far, false);
    let layout: Layout = "far=2".parse().unwrap();
    let of_ranks = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        let mut reports = Reports::default();
        let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?;
        // What was sent after step 3 is on its way in the checkpoint, and what was sent after step 6 when that is loaded.
        trainer.run_until(6, &mut reports)?;
        let folder = CheckpointConfig { dir: dir.path().into(), ..CheckpointConfig::default() };
        let folder = Checkpoints::open(folder).unwrap();
        let all = folder.list().unwrap().into_iter().map(|one| folder.contents(&one));
        let of_step_4 = all.flatten().find(|contents| contents.step == 4).unwrap();
        trainer.resume(&of_step_4)?;
        reports.0.clear();
        trainer.run(&mut reports)?;
        let losses: Vec<f64> = reports.0.iter().map(|report| report.loss).collect();
        Ok((losses, trainer.evaluate_on(&ALL)?))
    });
    let of_ranks = of_ranks.unwrap();
    assert_close(&of_ranks[0].0, &losses[4..], "losses of the first group");
    assert_close(&[of_ranks[0].1, of_ranks[1].1], &[expected; 2], "the model of all");
}

#[test]
fn random_numbers_belong_to_rows() {
    let setup = Setup { gpt2: true, dropout: 0.3, ..Setup::default() };
    let config = config(FarConfig { every: 2, ..FarConfig::default() });
    let (losses, expected) = train(setup, "far=2", &config, STEPS);
    for layout in ["far=2,dp=2", "far=2,pp=2", "far=2,shard=2"] {
        let (got, loss) = train(setup, layout, &config, STEPS);
        assert_close(&got, &losses, layout);
        assert_close(&[loss], &[expected], layout);
    }
}

#[test]
fn experts_and_their_corrections_are_averaged() {
    let setup = Setup { deepseek: true, ..Setup::default() };
    let config = config(FarConfig { every: 2, ..FarConfig::default() });
    let (losses, expected) = train(setup, "far=2", &config, STEPS);
    for layout in ["far=2,ep=2", "far=2,dp=2", "far=2,shard=2,ep=2"] {
        let (got, loss) = train(setup, layout, &config, STEPS);
        assert_close(&got, &losses, layout);
        assert_close(&[loss], &[expected], layout);
    }
}

fn with_checkpoints(dir: &Path, far: FarConfig, in_background: bool) -> TrainConfig {
    let plan = CheckpointPlan { dir: dir.into(), every: 2, keep: 2, in_background };
    TrainConfig { checkpoints: Some(plan), ..config(far) }
}

#[test]
fn a_run_goes_on_between_two_averages_in_another_layout() {
    for (precision, in_background) in
        [(FarPrecision::F32, false), (FarPrecision::F32, true), (FarPrecision::Int8, false)]
    {
        let far = FarConfig { every: 3, precision, ..FarConfig::default() };
        let (losses, expected) = train(Setup::default(), "far=2", &config(far), STEPS);
        let dir = tempfile::tempdir().unwrap();
        let config = with_checkpoints(dir.path(), far, in_background);
        let (mut got, mut last) = (Vec::new(), 0.0);
        // Of the run that ends after step 5, the checkpoint of step 4 is the last.
        for (layout, from, until) in
            [("far=2,dp=2", 0, 2), ("far=2,tp=2", 2, 5), ("far=2", 4, 6), ("far=2,pp=2,shard=2", 6, STEPS)]
        {
            let (of_run, loss) = train(Setup::default(), layout, &config, until);
            got.truncate(from);
            got.extend(of_run);
            last = loss;
        }
        if precision == FarPrecision::F32 {
            assert_close(&got, &losses, "losses");
            assert_close(&[last], &[expected], "the last loss");
        } else {
            // Another order of sums may round another way.
            assert!((last - expected).abs() < 1e-3, "{last}, expected {expected}");
        }
        // With one group more, and with none.
        for layout in ["far=4", "dp=2"] {
            let config = TrainConfig { steps: STEPS + 2, ..config.clone() };
            let (_, loss) = train(Setup::default(), layout, &config, STEPS + 2);
            assert!(loss < expected + 0.05, "{layout}: {loss} after {expected}");
        }
    }
}

#[test]
fn few_bits_are_enough() {
    let of = |precision, layout: &str| {
        let far = FarConfig { every: 2, precision, ..FarConfig::default() };
        train(Setup { dtype: DType::F32, ..Setup::default() }, layout, &config(far), STEPS).1
    };
    let whole = of(FarPrecision::F32, "far=2");
    for (precision, most) in
        [(FarPrecision::F16, 1e-4), (FarPrecision::Int8, 1e-3), (FarPrecision::Int4, 2e-2)]
    {
        for layout in ["far=2", "far=2,dp=2", "far=4", "far=2,shard=2"] {
            let loss = of(precision, layout);
            let expected = if layout == "far=4" { of(FarPrecision::F32, layout) } else { whole };
            assert!((loss - expected).abs() < most * expected, "{precision:?}, {layout}: {loss}, {expected}");
        }
    }
}

/// Parameters that ranks of `tp` hold whole, beside other parts of others on each, have the same scales on each.
#[test]
fn in_few_bits_ranks_keep_equal_what_all_have_whole() {
    let layout: Layout = "far=2,tp=2".parse().unwrap();
    let config = config(FarConfig { every: 2, precision: FarPrecision::Int4, ..FarConfig::default() });
    let norms = Local::run_shared(4, |comm| {
        let setup = Setup { dtype: DType::F32, ..Setup::default() };
        let mut model = setup.parallel(comm, &layout, None)?;
        Trainer::new(&mut model, Arc::new(ALL), config.clone())?.run(&mut NoObserver)?;
        let vars = model.named_vars().into_iter().filter(|(name, _)| name.contains("norm"));
        vars.map(|(_, var)| var.flatten_all()?.to_vec1::<f32>())
            .collect::<Result<Vec<_>>>()
            .map_err(girandole::comm::Error::from)
    });
    let norms = norms.unwrap();
    assert!(norms[0].len() > 12 && norms[0].iter().flatten().any(|x| *x != 1.0), "{:?}", norms[0]);
    assert!(norms.iter().all(|of_rank| *of_rank == norms[0]));
}

/// The first and the last stage have the embedding, at other places among their parameters.
#[test]
fn stages_of_three_groups_keep_equal_what_both_have() {
    let layout: Layout = "far=3,pp=2".parse().unwrap();
    let far = FarConfig { every: 2, ..FarConfig::default() };
    let config = TrainConfig { batch_size: 6, ..config(far) };
    let embeddings = Local::run_shared(6, |comm| {
        let setup = Setup { dtype: DType::F32, ..Setup::default() };
        let mut model = setup.parallel(comm, &layout, None)?;
        Trainer::new(&mut model, Arc::new(ALL), config.clone())?.run(&mut NoObserver)?;
        let of_tokens = |(_, var): &(String, Var)| var.dims().first() == Some(&48);
        let (_, var) = model.named_vars().into_iter().find(of_tokens).unwrap();
        Ok(var.flatten_all()?.to_vec1::<f32>()?)
    });
    let embeddings = embeddings.unwrap();
    assert!(embeddings.iter().all(|of_rank| *of_rank == embeddings[0]));
}

#[test]
fn a_checkpoint_that_not_all_groups_have_is_not_gone_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let config = with_checkpoints(dir.path(), FarConfig { every: 3, ..FarConfig::default() }, false);
    train(Setup::default(), "far=2", &config, 5);
    let newest = |dir: &Path| {
        let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.to_string_lossy().contains("checkpoint-")).max().unwrap()
    };
    // The second group's of step 4 is lost: both go on from step 2.
    std::fs::remove_dir_all(newest(&dir.path().join("far-1"))).unwrap();
    std::fs::remove_file(dir.path().join("far-1/latest")).unwrap();
    let (losses, _) = train(Setup::default(), "far=2", &config, 6);
    assert_eq!(losses.len(), 4);
    std::fs::remove_dir_all(dir.path().join("far-1")).unwrap();
    let layout = "far=2".parse().unwrap();
    let said = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        Ok(Trainer::new(&mut model, Arc::new(ALL), config.clone())?.resume_latest().unwrap_err().to_string())
    });
    assert!(said.unwrap()[0].contains("all groups must see one folder"));
    let plan = CheckpointPlan { keep: 1, ..config.checkpoints.clone().unwrap() };
    let config = TrainConfig { checkpoints: Some(plan), ..config };
    let said = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        Ok(Trainer::new(&mut model, Arc::new(ALL), config.clone()).unwrap_err().to_string())
    });
    assert!(said.unwrap()[1].contains("give 2 or more"));
}

#[test]
fn what_cannot_be_averaged_is_refused() {
    let of = |setup: Setup, config: TrainConfig| {
        let said = Local::run_shared(2, |comm| {
            let layout = "far=2".parse().map_err(carry)?;
            let mut model = setup.parallel(comm, &layout, None)?;
            Ok(Trainer::new(&mut model, Arc::new(ALL), config.clone()).unwrap_err().to_string())
        });
        said.unwrap().remove(0)
    };
    let said = of(Setup { dtype: DType::BF16, ..Setup::default() }, config(FarConfig::default()));
    assert!(said.contains("the parameters of a layout with far") && said.contains("give f32"), "{said}");
    let said = of(Setup::default(), config(FarConfig { every: 0, ..FarConfig::default() }));
    assert!(said.contains("the steps between averages"), "{said}");
    let said = of(Setup::default(), config(FarConfig { every: 4, fragments: 5, ..FarConfig::default() }));
    assert!(said.contains("the fragments of far groups: got 5; give 1 to 4"), "{said}");
    let late = FarConfig { every: 6, fragments: 2, delay: 3, ..FarConfig::default() };
    let said = of(Setup::default(), config(late));
    assert!(said.contains("the delay of far groups: got 3; give 0 to 2, fewer than"), "{said}");
}

#[test]
fn optimizers_have_their_own_state_in_each_group() {
    let adam = OptimizerConfig::AdamW(AdamConfig::adamw());
    let far = FarConfig { every: 4, ..FarConfig::default() };
    let config = TrainConfig { optimizer: adam, ..config(far) };
    let layout: Layout = "far=2".parse().unwrap();
    let losses = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        let mut trainer = Trainer::new(&mut model, Arc::new(ALL), config.clone())?;
        trainer.run_until(3, &mut NoObserver)?;
        Ok(trainer.evaluate_on(&ALL)?)
    });
    let losses = losses.unwrap();
    assert!((losses[0] - losses[1]).abs() > 1e-6, "before an average, groups differ: {losses:?}");
}
