//! The training loop: it resumes from a checkpoint in another layout, with each row once per epoch.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use crate::common::{LEN, Setup};
use candle_core::{DType, Device, Result, Tensor};
use girandole::comm::Local;
use girandole::models::{CausalLm, FolderConfig, Weights};
use girandole::trainer::{
    CheckpointPlan, Data, Decay, LearningRate, NoObserver, Observer, StepReport, StopFlag, TrainConfig,
    Trainer,
};
use girandole::training::build::Builder;
use girandole::{Batch, Layout, Parallel};

/// Data that records which rows are requested, batch by batch, with the thread that requests them.
struct Noted {
    rows: usize,
    asked: Mutex<Vec<(ThreadId, Vec<usize>)>>,
    name: &'static str,
}

impl Noted {
    fn new(rows: usize) -> Self {
        Self { rows, asked: Mutex::default(), name: "noted" }
    }
}

impl Data for Noted {
    fn rows(&self) -> usize {
        self.rows
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        self.asked.lock().unwrap().push((std::thread::current().id(), rows.to_vec()));
        let token = |row: usize, place: usize| ((row * 5 + place * place * 3) % 48) as i64;
        let of = |first: usize| {
            rows.iter().flat_map(move |row| (0..LEN).map(move |place| token(*row, place + first)))
        };
        let tensor = |first| Tensor::from_iter(of(first), device)?.reshape((rows.len(), LEN));
        Ok((tensor(0)?, tensor(1)?).into())
    }

    fn fingerprint(&self) -> String {
        format!("{} {}", self.name, self.rows)
    }
}

struct Losses(Vec<f64>);

impl<M> Observer<M> for Losses {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.0.push(report.loss);
        Ok(())
    }
}

fn config(steps: usize, dir: Option<&Path>, in_background: bool) -> TrainConfig {
    let plan = |dir: &Path| CheckpointPlan { dir: dir.into(), every: 2, keep: 2, in_background };
    TrainConfig {
        steps,
        batch_size: 8,
        learning_rate: 0.01,
        schedule: LearningRate { warmup: 3, decay: Decay::Cosine, lowest: 0.1 },
        checkpoints: dir.map(plan),
        ..TrainConfig::default()
    }
}

/// Trains until a step that may not be the last one.
fn train(layout: &str, data: &Arc<Noted>, config: &TrainConfig, until: usize) -> Vec<f64> {
    let layout: Layout = layout.parse().unwrap();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        let mut losses = Losses(Vec::new());
        let mut trainer = Trainer::new(&mut model, data.clone(), config.clone())?;
        trainer.resume_latest()?;
        // Like a run that is stopped there.
        trainer.run_until(until, &mut losses)?;
        Ok(losses.0)
    });
    ranks.unwrap().remove(0)
}

#[test]
fn a_run_goes_on_with_the_next_row_in_another_layout() {
    for in_background in [false, true] {
        let (dir, whole, parts) =
            (tempfile::tempdir().unwrap(), Arc::new(Noted::new(36)), Arc::new(Noted::new(36)));
        let expected = train("", &whole, &config(18, None, false), 18);
        let config = config(18, Some(dir.path()), in_background);
        let (mut got, mut counts) = (Vec::new(), [0; 36]);
        for (until, layout) in [(4, "shard=2"), (8, "tp=2"), (12, "pp=2,dp=2"), (18, "")] {
            let steps = until - got.len();
            got.extend(train(layout, &parts, &config, until));
            // Each rank has a thread that reads ahead: only its first batches are those of steps.
            let mut of_threads = HashMap::new();
            for (thread, rows) in parts.asked.lock().unwrap().drain(..) {
                of_threads.entry(thread).or_insert_with(Vec::new).push(rows);
            }
            let mut own: Vec<usize> = of_threads
                .into_values()
                .flat_map(|batches| batches.into_iter().take(steps).flatten())
                .collect();
            own.sort_unstable();
            // Ranks that differ in tp or pp only request the same rows.
            let layout: Layout = layout.parse().unwrap();
            let times = layout.ranks() / layout.data_ranks();
            own.into_iter().step_by(times).for_each(|row| counts[row] += 1);
        }
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!((got - expected).abs() < 1e-10, "step {step}: {got}, expected {expected}");
        }
        assert_eq!(got.len(), 18);
        // 18 steps of 8 rows are 4 epochs of 36.
        assert_eq!(counts, [4; 36]);
    }
}

/// Asks for a stop after a step.
struct Asks {
    losses: Vec<f64>,
    after: usize,
    flag: StopFlag,
}

impl<M> Observer<M> for Asks {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.losses.push(report.loss);
        if report.step == self.after {
            self.flag.request();
        }
        Ok(())
    }
}

/// Trains until one rank asks for a stop, and returns the losses of all steps, after the step at which all have stopped.
fn stopped(layout: &Layout, data: &Arc<Noted>, config: &TrainConfig, after: usize) -> Vec<f64> {
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let (flag, asks) = (StopFlag::default(), comm.rank() + 1 == layout.ranks());
        let mut model = Setup::default().parallel(comm, layout, None)?;
        let mut asks = Asks { losses: Vec::new(), after: if asks { after } else { 0 }, flag: flag.clone() };
        let config = TrainConfig { stop: Some(flag), ..config.clone() };
        let mut trainer = Trainer::new(&mut model, data.clone(), config)?;
        trainer.resume_latest()?;
        let mut saves = |_: &mut Parallel<CausalLm>| -> girandole::Result<()> { panic!("it is not done") };
        let error = trainer.run_and(&mut asks, &mut [&mut saves]).unwrap_err();
        let girandole::Error::Stopped { step, signal: None } = error else { panic!("{error}") };
        assert!(step >= after && step == trainer.step());
        Ok((step, asks.losses))
    });
    let ranks = ranks.unwrap();
    let (step, losses) = &ranks[0];
    assert!(ranks.iter().all(|(other, _)| other == step), "the ranks have stopped at different steps");
    losses.clone()
}

#[test]
fn a_run_that_any_rank_asks_to_stop_goes_on_with_the_same_bits() {
    for (layout, in_background) in [("dp=2", true), ("shard=2", false), ("tp=2", true), ("pp=2,dp=2", true)] {
        let (dir, layout): (_, Layout) = (tempfile::tempdir().unwrap(), layout.parse().unwrap());
        let text = layout.to_string();
        let expected = train(&text, &Arc::new(Noted::new(36)), &config(40, None, false), 40);
        let data = Arc::new(Noted::new(36));
        let config = config(40, Some(dir.path()), in_background);
        // Its own checkpoints are far apart.
        let plan = config.checkpoints.clone().map(|plan| CheckpointPlan { every: 1000, ..plan });
        let config = TrainConfig { checkpoints: plan, ..config };
        let mut got = stopped(&layout, &data, &config, 5);
        let done = got.len();
        got.extend(stopped(&layout, &data, &config, done + 1));
        let done = got.len();
        assert!(done < 40, "it has stopped after {done} steps only");
        got.extend(train(&text, &data, &config, 40));
        assert_eq!(got, expected, "{layout}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let (dir, data) = (tempfile::tempdir().unwrap(), Arc::new(Noted::new(36)));
    train("", &data, &config(2, Some(dir.path()), false), 2);
    let said = |layout: &str, data: &Arc<Noted>, config: TrainConfig| {
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let mut model = Setup::default().parallel(comm, &layout, None)?;
            let made = Trainer::new(&mut model, data.clone(), config.clone());
            let made = made.and_then(|mut trainer| trainer.resume_latest().map(drop));
            Ok(made.unwrap_err().to_string())
        });
        said.unwrap().remove(0)
    };
    let other = Arc::new(Noted { name: "other", ..Noted::new(36) });
    assert!(said("dp=2", &other, config(4, Some(dir.path()), false)).contains("it was made with other data"));
    let odd = TrainConfig { batch_size: 6, ..config(4, None, false) };
    assert!(said("dp=2", &data, odd).contains("give a multiple of 4"));
    assert!(said("", &Arc::new(Noted::new(0)), config(4, None, false)).contains("the data"));
}

#[test]
fn a_trained_model_is_a_folder_in_every_layout() {
    for layout in ["", "dp=2", "shard=2", "tp=2", "pp=2", "shard=2,tp=2", "pp=2,shard=2,tp=2"] {
        let (out, data) = (tempfile::tempdir().unwrap(), Arc::new(Noted::new(36)));
        let layout: Layout = layout.parse().unwrap();
        let model_config = crate::common::config(true);
        let losses = Local::run_shared(layout.ranks(), |comm| {
            let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &layout, None)?;
            let mut trainer = Trainer::new(&mut model, data.clone(), config(3, None, false))?;
            trainer.run(&mut NoObserver)?;
            let loss = trainer.evaluate_on(&*data)?;
            let weights = Weights::random(&model_config, 7).unwrap();
            model.save_folder(out.path(), &weights, &FolderConfig::default(), None)?;
            Ok(loss)
        });
        let losses = losses.unwrap();
        let names: Vec<_> =
            std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        let weights = Weights::folder(out.path()).unwrap();
        let model = CausalLm::new(weights.config(), &Builder::new(weights.tensors(DType::F64, &Device::Cpu)))
            .unwrap();
        let rows: Vec<usize> = (0..36).collect();
        let Batch { input: tokens, targets, .. } = data.batch(&rows, &Device::Cpu).unwrap();
        let loss = model.loss(&tokens, &targets).unwrap().to_scalar::<f64>().unwrap();
        assert!((loss - losses[0]).abs() < 1e-10, "{layout}: {loss}, expected {}", losses[0]);
    }
}

/// Data of which no target counts.
struct Ignored(Noted);

impl Data for Ignored {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let batch = self.0.batch(rows, device)?;
        Ok(Batch { targets: Tensor::full(-100i64, batch.targets.shape(), device)?, ..batch })
    }
}

/// Data of which a row cannot be read.
struct Unreadable(Noted);

impl Data for Unreadable {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        match rows.contains(&21) {
            true => candle_core::bail!("row 21 cannot be read"),
            false => self.0.batch(rows, device),
        }
    }
}

/// Also if it is read ahead, and on one rank only.
#[test]
fn a_row_that_cannot_be_read_ends_the_step_that_takes_it() {
    for layout in ["", "dp=2", "pp=2,dp=2"] {
        let layout: Layout = layout.parse().unwrap();
        let data = Arc::new(Unreadable(Noted::new(36)));
        let ended = Local::run_shared(layout.ranks(), |comm| {
            let mut model = Setup::default().parallel(comm, &layout, None)?;
            let (mut losses, config) =
                (Losses(Vec::new()), TrainConfig { shuffle: false, ..config(6, None, false) });
            let error = Trainer::new(&mut model, data.clone(), config)?.run(&mut losses).unwrap_err();
            Ok((error.to_string(), losses.0.len()))
        });
        let ended = ended.unwrap();
        assert!(ended.iter().any(|(said, _)| said.contains("row 21 cannot be read")), "{ended:?}");
        assert!(ended.iter().all(|(_, steps)| *steps == 2), "{ended:?}");
    }
}

#[test]
fn evaluation_rows_without_targets_are_named() {
    let (data, ignored) = (Arc::new(Noted::new(36)), Ignored(Noted::new(20)));
    let said = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &Layout::copies(2), None)?;
        let mut trainer = Trainer::new(&mut model, data.clone(), config(3, None, false))?;
        Ok(trainer.evaluate_on(&ignored).unwrap_err().to_string())
    });
    for said in said.unwrap() {
        assert!(said.starts_with("the rows to evaluate on: got 20 rows of which no target counts"), "{said}");
    }
}

#[test]
fn the_time_of_steps_is_without_evaluations() {
    struct Seconds(f64);
    impl<M> Observer<M> for Seconds {
        fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
            self.0 += report.seconds;
            Ok(())
        }
    }
    let data = Arc::new(Noted::new(36));
    let config = TrainConfig { evaluate_every: Some(1), ..config(3, None, false) };
    let ran = Local::run_shared(1, |comm| {
        let mut model = Setup::default().parallel(comm, &Layout::copies(1), None)?;
        let mut steps = Seconds(0.0);
        let mut trainer = Trainer::new(&mut model, data.clone(), config.clone())?.evaluating(&*data);
        Ok((trainer.run(&mut steps)?, steps.0))
    });
    let (summary, seconds) = ran.unwrap().remove(0);
    assert_eq!(summary.step_seconds, seconds);
    assert!(summary.seconds > summary.step_seconds, "{summary:?}");
}
