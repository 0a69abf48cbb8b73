//! The check of gradients in every layout: nothing is found in our layers, and what a model of one's own loses is.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::loss;
use girandole::comm::Local;
use girandole::ops::{LayerNorm, Precision, autocast, layer_norm};
use girandole::trainer::{Data, NoObserver, TrainConfig, Trainer};
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::training::{GradientCheck, GradientCheckConfig, OnMissingGradient};
use girandole::{Batch, InitialWeights, Layout, Parallel, ParallelConfig};

use crate::common::{Setup, own_batch};

const LAYOUTS: [&str; 13] = [
    "", "dp=2", "shard=2", "tp=2", "pp=2", "dp=2,shard=2", "shard=2,tp=2", "pp=2,tp=2", "cp=2", "pp=2,cp=2",
    "shard=2,cp=2", "pp=2,shard=2", "pp=2,dp=2",
];

fn bits(parallel: &Parallel<impl Model>) -> Vec<Vec<u64>> {
    let of = |tensor: Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let all = parallel.named_vars().into_iter().chain(parallel.buffers());
    all.map(|(_, var)| of(var.as_detached_tensor()).unwrap().into_iter().map(f64::to_bits).collect())
        .collect()
}

/// Models of this project, with dropout and tied parameters, agree, and are as they were.
#[test]
fn our_models_pass_in_every_layout() {
    for layout in LAYOUTS {
        for setup in [
            Setup { dtype: DType::F32, dropout: 0.2, gpt2: true, ..Setup::default() },
            Setup { dtype: DType::F32, ..Setup::default() },
            Setup { dtype: DType::F32, experts: true, ..Setup::default() },
        ] {
            let layout: Layout = layout.parse().unwrap();
            let ranks = Local::run_shared(layout.ranks(), |comm| {
                let mut parallel = setup.parallel(comm, &layout, None)?;
                let (input, targets) = own_batch(&parallel, 0)?;
                let step = parallel.step(&input, &targets)?;
                let before = bits(&parallel);
                let check = parallel.check_gradient(
                    &(input, targets).into(),
                    &step,
                    &GradientCheckConfig::default(),
                )?;
                assert!(bits(&parallel) == before, "{layout}: the parameters have changed");
                Ok(check)
            });
            let found = ranks.unwrap();
            assert!(found.iter().all(|check| *check == found[0]), "{layout}: {found:?}");
            let GradientCheck { lost, undecided, parameters, .. } = &found[0];
            assert!(lost.is_empty(), "{layout}: {lost:?}");
            assert!(undecided.len() * 2 < *parameters, "{layout}: {undecided:?} of {parameters}");
        }
    }
}

/// A block with candle's norm, which has no backward, or the norm of `training`.
struct Block {
    candles: candle_nn::LayerNorm,
    ours: LayerNorm,
    by_candle: bool,
    layer: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = if self.by_candle { self.candles.forward(x)? } else { self.ours.forward(x)? };
        x + self.layer.forward(&normed)?
    }
}

struct Net(Vec<Unit<Block>>);

impl Net {
    fn new(builder: &Builder, by_candle: bool) -> Result<Self> {
        let block = |name: &str| {
            builder.unit(name, |part| {
                let (part, config) = (part.pp(name), LinearConfig::new(8, 8, Division::Whole));
                let ours = layer_norm(8, 1e-5, part.pp("norm").whole())?;
                let candles = candle_nn::LayerNorm::new(ours.weight().clone(), ours.bias().clone(), 1e-5);
                Ok(Block { candles, ours, by_candle, layer: part.pp("layer").linear(&config)? })
            })
        };
        Ok(Self(["a", "b"].into_iter().map(block).collect::<Result<_>>()?))
    }
}

impl Units for Net {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Net {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        loss::mse(output, targets)
    }
}

struct Rows(Tensor);

impl Data for Rows {
    fn rows(&self) -> usize {
        self.0.dims()[0]
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let x = self.0.index_select(&Tensor::new(rows, device)?, 0)?;
        Ok((x.clone(), x.sqr()?).into())
    }

    fn fingerprint(&self) -> String {
        "rows".into()
    }
}

/// The trainer checks the first step: in every layout the same parameters are named, on every rank. It does so neither in a
/// run that costs more, nor where it is told not to.
#[test]
fn what_is_lost_is_named_in_every_layout() {
    let train = |layout: &str, by_candle: bool, config: &TrainConfig| {
        let layout: Layout = layout.parse().unwrap();
        let rows =
            Tensor::arange(0f32, 128.0, &Device::Cpu).unwrap().affine(0.7, 0.0).unwrap().sin().unwrap();
        let rows = Arc::new(Rows(rows.reshape((16, 8)).unwrap()));
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let example = rows.0.narrow(0, 0, 8 / layout.data_ranks())?;
            let mut settings = ParallelConfig { example: Some(example), ..ParallelConfig::default() };
            settings.audit.on_missing = OnMissingGradient::Ignore;
            let build = move |builder: &Builder| Net::new(builder, by_candle);
            let mut model = Parallel::new(comm, &layout, InitialWeights::seed(1), &settings, build)?;
            let mut trainer = Trainer::new(&mut model, rows.clone(), config.clone())?;
            Ok(trainer
                .run(&mut NoObserver)
                .map(|summary| summary.last_loss)
                .map_err(|error| error.to_string()))
        });
        ranks.unwrap()
    };
    let config = TrainConfig { steps: 2, batch_size: 8, ..TrainConfig::default() };
    let never = TrainConfig { gradient_check_work: 0, ..config.clone() };
    for layout in LAYOUTS.into_iter().filter(|layout| !layout.contains("cp")) {
        for line in train(layout, true, &config) {
            let line = line.unwrap_err();
            for name in
                ["a.norm.weight (", "a.norm.bias (", "b.norm.weight (", "b.norm.bias (", "a.layer.weight"]
            {
                assert!(line.contains(name), "{layout}: {name}: {line}");
            }
            assert!(!line.contains("b.layer"), "{layout}: {line}");
        }
        // The check changes no bit of the run.
        let checked = train(layout, false, &config);
        assert!(checked[0].is_ok(), "{layout}: {checked:?}");
        assert_eq!(checked, train(layout, false, &never), "{layout}");
    }
    let off = GradientCheckConfig { on_lost: OnMissingGradient::Ignore, ..GradientCheckConfig::default() };
    for quiet in [never, TrainConfig { gradient_check: off, ..config }] {
        assert!(train("", true, &quiet)[0].is_ok());
    }
}

/// What a layer adds for the difference of two inputs that bf16 cannot tell apart.
struct Difference {
    layer: Linear,
}

impl Module for Difference {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let next = self.layer.forward(&x.affine(1.0 + 1.0 / 1024.0, 0.0)?)?;
        x + (next - self.layer.forward(x)?)?.affine(1024.0, 0.0)
    }
}

struct Differences(Unit<Difference>);

impl Units for Differences {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.0]
    }
}

impl Model for Differences {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        loss::mse(output, targets)
    }
}

/// A gradient that 16 bits round to zero is not lost: backward does find it in f32.
#[test]
fn a_gradient_that_is_zero_in_16_bits_is_not_lost() {
    for layout in ["", "dp=2", "shard=2"] {
        let layout: Layout = layout.parse().unwrap();
        let x = Tensor::arange(1f32, 33.0, &Device::Cpu).unwrap().affine(0.125, 0.0).unwrap();
        let batch: Batch = (x.reshape((4, 8)).unwrap(), x.reshape((4, 8)).unwrap().sqr().unwrap()).into();
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let build = |builder: &Builder| {
                let config = LinearConfig::new(8, 8, Division::Whole);
                let unit =
                    builder.unit("", |part| Ok(Difference { layer: part.pp("layer").linear(&config)? }));
                unit.map(Differences)
            };
            let settings = ParallelConfig::default();
            let mut model = Parallel::new(comm, &layout, InitialWeights::seed(1), &settings, build)?;
            autocast(Precision::Bf16, || {
                let step = model.step_batch(&batch)?;
                let largest = |var: &Var| step.grads.get(var).unwrap().abs()?.max_all()?.to_scalar::<f32>();
                for (name, var) in model.named_vars() {
                    assert_eq!(largest(&var)?, 0.0, "{name}");
                }
                let before = bits(&model);
                let config = GradientCheckConfig {
                    on_lost: OnMissingGradient::Ignore,
                    ..GradientCheckConfig::default()
                };
                assert!(!model.check_gradient(&batch, &step, &config)?.lost.is_empty());
                let again = model.step_in_f32(&batch)?;
                let check = model.check_gradient(&batch, &again, &GradientCheckConfig::default())?;
                assert!(bits(&model) == before && model.step_batch(&batch)?.loss == step.loss);
                Ok(check)
            })
        });
        for check in ranks.unwrap() {
            assert!(check.lost.is_empty() && check.undecided.is_empty(), "{layout}: {check:?}");
        }
    }
}
