//! Loss scaling: the gradients are the same, and all ranks skip a step in which the gradients of one overflow.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::common::{Chain, Setup, optimizer, own_batch, step};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Optimizer;
use girandole::comm::Local;
use girandole::ops::BalanceLoss;
use girandole::trainer::{CheckpointPlan, Data, NoObserver, Observer, TrainConfig, Trainer};
use girandole::training::build::{Builder, Division, Linear, LinearConfig};
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, LossScalerConfig};
use girandole::{Batch, DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};

const LAYOUTS: [&str; 15] = [
    "dp=2", "shard=2", "tp=2", "pp=2", "dp=2,shard=2", "dp=2,tp=2", "shard=2,tp=2", "pp=2,dp=2",
    "pp=2,shard=2", "pp=2,tp=2", "pp=2,shard=2,tp=2", "pp=2,dp=2,tp=2", "cp=2", "shard=2,cp=2", "pp=2,cp=2",
];

#[test]
fn a_scaled_loss_trains_as_one_that_is_not() {
    trains_scaled(Setup::default(), &LAYOUTS);
    let experts = Setup { experts: true, balance: Some(BalanceLoss::Row), ..Setup::default() };
    trains_scaled(experts, &["dp=2", "shard=2", "pp=2,tp=2", "cp=2", "ep=2", "shard=2,ep=2", "pp=2,ep=2"]);
}

fn trains_scaled(setup: Setup, layouts: &[&str]) {
    let train = |layout: &str, loss_scale| {
        let (layout, setup): (Layout, _) = (layout.parse().unwrap(), Setup { loss_scale, ..setup });
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let mut adam = optimizer(&parallel)?;
            let steps = (0..6).map(|number| step(&mut parallel, &mut adam, number));
            Ok(steps.collect::<girandole::Result<Vec<_>>>()?)
        });
        ranks.unwrap().remove(0)
    };
    let expected = train("", None);
    for layout in [""].iter().chain(layouts) {
        // Not a power of two, and growing every other step.
        let config = LossScalerConfig { scale: 3000.0, growth_interval: 2, ..LossScalerConfig::default() };
        let got = train(layout, Some(config));
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < 1e-10, "{layout}: {got:?}, expected {expected:?}");
    }
}

#[test]
fn f16_trains_in_every_layout() {
    let layouts = ["", "dp=2", "shard=2", "tp=2", "pp=2", "shard=2,tp=2", "pp=2,shard=2"];
    f16_trains(Setup::default(), &layouts);
}

/// Where gradients overflow, the router's scores are finite; the loss that balances experts is scaled, too.
#[test]
fn f16_trains_experts() {
    let setup = Setup { experts: true, balance: Some(BalanceLoss::Row), ..Setup::default() };
    f16_trains(setup, &["", "dp=2", "shard=2", "tp=2", "pp=2", "cp=2", "ep=2"]);
}

fn f16_trains(setup: Setup, layouts: &[&str]) {
    let train = |layout: &str, dtype, loss_scale| {
        let (layout, setup): (Layout, _) = (layout.parse().unwrap(), Setup { dtype, loss_scale, ..setup });
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let mut adam = optimizer(&parallel)?;
            let (mut losses, mut skipped) = (Vec::new(), 0);
            for _ in 0..20 {
                let (tokens, targets) = own_batch(&parallel, 0)?;
                let mut step = parallel.step(&tokens, &targets)?;
                skipped += usize::from(step.skipped);
                parallel.clip_grad_norm(&mut step.grads, 0.5)?;
                adam.step(&step.grads)?;
                if !step.skipped {
                    losses.push(step.loss);
                }
            }
            Ok((losses, skipped))
        });
        ranks.unwrap().remove(0)
    };
    let (expected, _) = train("", DType::F32, None);
    // So large that the first steps overflow.
    let config = LossScalerConfig { scale: f64::from(1 << 24), ..LossScalerConfig::default() };
    for layout in layouts {
        let (losses, skipped) = train(layout, DType::F16, Some(config));
        assert!((1..12).contains(&skipped), "{layout}: {skipped} skipped");
        let gap = losses.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < 0.05, "{layout}: {losses:?}, expected {expected:?}");
    }
}

/// A divided pair of layers, between which one rank's gradient can be made to overflow.
struct Pair {
    up: Linear,
    down: Linear,
    overflows: Option<Arc<AtomicBool>>,
}

impl Module for Pair {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.up.forward(x)?.tanh()?;
        let overflows = self.overflows.as_ref().is_some_and(|overflows| overflows.load(Ordering::Relaxed));
        // The forward result is unchanged.
        let y = if overflows { (&y + ((&y - y.detach())? * 1e306)?)? } else { y };
        x + self.down.forward(&y)?
    }
}

type Net = Chain<Pair>;

const WIDTH: usize = 4;
const ROWS: usize = 8;

impl Net {
    fn new(builder: &Builder, overflows: &Arc<AtomicBool>, everywhere: bool) -> candle_core::Result<Self> {
        let unit = |place: usize| {
            builder.unit(&format!("{place}"), |part| {
                let part = part.pp(place);
                Ok(Pair {
                    up: part.pp("up").linear(&LinearConfig::new(WIDTH, 8, Division::Outputs))?,
                    down: part.pp("down").linear(&LinearConfig::new(8, WIDTH, Division::Inputs))?,
                    overflows: (everywhere || place == 0).then(|| overflows.clone()),
                })
            })
        };
        Ok(Self((0..2).map(unit).collect::<candle_core::Result<_>>()?))
    }
}

/// A model in which the last rank's gradients overflow while the flag is set.
fn net(
    comm: Arc<dyn girandole::comm::Communicator>,
    layout: &Layout,
    config: LossScalerConfig,
) -> girandole::Result<(Parallel<Net>, Arc<AtomicBool>)> {
    let (flag, is_last) = (Arc::new(AtomicBool::new(false)), comm.rank() + 1 == comm.world_size());
    // A stage may not contain the first unit, so all units overflow with `pp`. With divided layers, no other rank has
    // the gradient of the first layer.
    let (own, everywhere) = (if is_last { flag.clone() } else { Arc::default() }, layout.pp > 1);
    let settings = ParallelConfig {
        dtype: DType::F64,
        example: Some(Tensor::zeros((ROWS / layout.data_ranks(), WIDTH), DType::F64, &Device::Cpu)?),
        loss_scale: Some(config),
        ..ParallelConfig::default()
    };
    let build = move |builder: &Builder| Net::new(builder, &own, everywhere);
    Ok((Parallel::new(comm, layout, InitialWeights::seed(3), &settings, build)?, flag))
}

/// Resumes for some steps; returns the loss of each, whether it was skipped, and the loss scale after it.
fn go_on(layout: &str, dir: &Path, steps: usize, overflowing: usize) -> Vec<(f64, bool, f64)> {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm| -> girandole::Result<_> {
        let config = LossScalerConfig { scale: 4096.0, growth_interval: 2, ..LossScalerConfig::default() };
        let (mut model, flag) = net(comm, &layout, config)?;
        let mut adam = Adam::named(model.named_vars(), AdamConfig::default())?;
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 2 })?;
        let begin = match checkpoints.latest()? {
            Some(contents) => {
                model.load_checkpoint(&contents, Some(&mut adam))?;
                contents.step as usize
            }
            None => 0,
        };
        let data = model.data_ranks().clone();
        let rows = ROWS / data.world_size();
        let all = Tensor::arange(0f64, (ROWS * WIDTH) as f64, &Device::Cpu)?.reshape((ROWS, WIDTH))?;
        let own = all.narrow(0, data.rank() * rows, rows)?.contiguous()?;
        let mut seen = Vec::new();
        for number in begin..begin + steps {
            flag.store(number == overflowing, Ordering::Relaxed);
            let values = |model: &Parallel<Net>| {
                let vars = model.named_vars().into_iter();
                vars.map(|(_, var)| var.flatten_all()?.to_vec1::<f64>())
                    .collect::<candle_core::Result<Vec<_>>>()
            };
            let before = values(&model)?;
            let mut step = model.step(&(&own * 0.1)?, &(&own * 0.3)?.sin()?)?;
            model.clip_grad_norm(&mut step.grads, 0.1)?;
            adam.step(&step.grads)?;
            assert_eq!(step.skipped, values(&model)? == before, "{layout}");
            seen.push((step.loss, step.skipped, model.loss_scaler().unwrap().factor()));
        }
        model.save_checkpoint(
            &checkpoints,
            Some(&adam),
            &Checkpoint { step: (begin + steps) as u64, ..Checkpoint::default() },
        )?;
        Ok(seen)
    };
    let ranks = Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{layout}: {ranks:?}");
    ranks.into_iter().next().unwrap()
}

#[test]
fn a_step_that_one_rank_cannot_take_is_skipped_by_all() {
    let dir = tempfile::tempdir().unwrap();
    let expected = go_on("", dir.path(), 8, 2);
    let factors: Vec<(bool, f64)> = expected.iter().map(|(_, skipped, factor)| (*skipped, *factor)).collect();
    let of = |factor| (false, factor);
    assert_eq!(
        factors,
        [
            of(4096.0),
            of(8192.0),
            (true, 4096.0),
            of(4096.0),
            of(8192.0),
            of(8192.0),
            of(16384.0),
            of(16384.0)
        ]
    );
    for layout in LAYOUTS.into_iter().filter(|layout| !layout.contains("cp")) {
        let dir = tempfile::tempdir().unwrap();
        // Resumes in another layout in between, before the scale grows again.
        let mut got = go_on(layout, dir.path(), 4, 2);
        got.extend(go_on("dp=2", dir.path(), 2, 2));
        got.extend(go_on(layout, dir.path(), 2, 2));
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!((got.0 - expected.0).abs() < 1e-10, "{layout}, step {step}: {got:?}, {expected:?}");
            assert_eq!((got.1, got.2), (expected.1, expected.2), "{layout}, step {step}");
        }
    }
}

struct Rows;

impl Data for Rows {
    fn rows(&self) -> usize {
        ROWS
    }

    fn batch(&self, rows: &[usize], device: &Device) -> candle_core::Result<Batch> {
        let x = Tensor::ones((rows.len(), WIDTH), DType::F64, device)?;
        Ok((x.clone(), (x * 0.5)?).into())
    }
}

#[test]
fn gradients_that_no_scale_helps_end_the_training() {
    let layout: Layout = "dp=2".parse().unwrap();
    let said = Local::run_shared(2, |comm| {
        let config = LossScalerConfig { scale: 64.0, ..LossScalerConfig::default() };
        let (mut model, flag) = net(comm, &layout, config)?;
        let train = TrainConfig { steps: 20, batch_size: ROWS, ..TrainConfig::default() };
        // As with a division by zero in backward; a scale of 1/65536 or less would help here.
        flag.store(true, Ordering::Relaxed);
        let mut trainer = Trainer::new(&mut model, Arc::new(Rows), train)?;
        Ok(trainer.run(&mut NoObserver).unwrap_err().to_string())
    });
    for said in said.unwrap() {
        // From 64 to 1/256 there are 14 halvings.
        assert!(said.starts_with("step 16: the gradients' norm is inf"), "{said}");
        assert!(said.contains("scaled by 0.001953125"), "{said}");
    }
}

/// The rows of [`Rows`], not numbers in some batches, by their number from 0.
struct Broken {
    asked: AtomicUsize,
    broken: &'static [usize],
}

impl Data for Broken {
    fn rows(&self) -> usize {
        ROWS
    }

    fn batch(&self, rows: &[usize], device: &Device) -> candle_core::Result<Batch> {
        let batch = Rows.batch(rows, device)?;
        let is_broken = self.broken.contains(&self.asked.fetch_add(1, Ordering::Relaxed));
        Ok(Batch { input: if is_broken { (batch.input * f64::NAN)? } else { batch.input }, ..batch })
    }
}

#[derive(Default)]
struct Saved(Vec<usize>);

impl<M> Observer<M> for Saved {
    fn saved(&mut self, step: usize, _: &Path) -> girandole::Result<()> {
        self.0.push(step);
        Ok(())
    }
}

/// The scale cannot be the reason, since the loss is computed without it.
#[test]
fn a_loss_that_is_not_finite_is_not_saved_and_two_in_a_row_end_the_training() {
    let train = |broken: &'static [usize]| {
        let ran = Local::run_shared(1, |comm| {
            let (mut model, _) = net(comm, &Layout::copies(1), LossScalerConfig::default())?;
            let dir = tempfile::tempdir().unwrap();
            let plan = CheckpointPlan { dir: dir.path().into(), every: 1, keep: 9, in_background: false };
            let train =
                TrainConfig { steps: 6, batch_size: ROWS, checkpoints: Some(plan), ..TrainConfig::default() };
            let (data, mut saved) = (Broken { asked: AtomicUsize::new(0), broken }, Saved::default());
            let ended = Trainer::new(&mut model, Arc::new(data), train)?.run(&mut saved);
            Ok((ended.map(|summary| summary.steps).map_err(|error| error.to_string()), saved.0))
        });
        ran.unwrap().remove(0)
    };
    assert_eq!(train(&[2, 4]), (Ok(6), vec![1, 2, 4, 6]));
    let (ended, saved) = train(&[2, 3, 4, 5]);
    let said = ended.unwrap_err();
    assert!(said.starts_with("step 4: ") && said.contains("the loss, which is NaN"), "{said}");
    assert_eq!(saved, [1, 2]);
}

#[test]
fn a_scale_that_cannot_be_is_refused() {
    let said = Local::run_shared(1, |comm| {
        let config = LossScalerConfig { scale: f64::NAN, ..LossScalerConfig::default() };
        Ok(net(comm, &Layout::copies(1), config).unwrap_err().to_string())
    });
    assert!(said.unwrap()[0].contains("scale is NaN"));
}
