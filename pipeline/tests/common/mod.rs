//! Test helpers: a small model of many modules, and its training in a single process.
#![allow(dead_code)]

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ModuleT, Optimizer, VarBuilder, VarMap, func};
use comm::Communicator;
use ops::{layer_norm, linear};
use pipeline::{Modules, Pipeline, PipelineConfig};
use sampler::{Generator, SharedGenerator};
use training::{Sgd, SgdConfig, TorchInit};

pub(crate) type Comm = Arc<dyn Communicator>;

pub(crate) const WIDTH: usize = 6;
/// Rows of a micro-batch.
pub(crate) const ROWS: usize = 2;
pub(crate) const STEPS: usize = 3;

/// Linear layers of `training` and of candle, norms, and modules without parameters.
pub(crate) fn modules(blocks: usize) -> Modules {
    (0..blocks).fold(Modules::new(), |modules, block| {
        let name = |what: &str| format!("blocks.{block}.{what}");
        modules
            .module(&name("fc"), |vb| linear(WIDTH, WIDTH, vb))
            .module(&name("act"), |_| Ok(func(Tensor::tanh)))
            .module(&name("plain"), |vb| candle_nn::linear(WIDTH, WIDTH, vb))
            .module(&name("norm"), |vb| layer_norm(WIDTH, 1e-5, vb))
    })
}

/// Returns PyTorch's initial weights for seed 5.
pub(crate) fn weights() -> impl Fn(&VarMap) -> VarBuilder<'static> {
    let generator = SharedGenerator::from(Generator::new(5));
    move |map| TorchInit::var_builder(&generator, map, DType::F64, &Device::Cpu)
}

/// Returns input and target of a step.
pub(crate) fn batch(step: usize, rows: usize) -> Result<(Tensor, Tensor)> {
    let mut generator = Generator::new(1000 + step as u64);
    let mut draw = || {
        let numbers = generator.randn(rows * WIDTH).map_err(candle_core::Error::wrap)?;
        Tensor::from_vec(numbers, (rows, WIDTH), &Device::Cpu)?.to_dtype(DType::F64)
    };
    Ok((draw()?, draw()?))
}

pub(crate) fn loss(output: &Tensor, target: &Tensor) -> Result<Tensor> {
    (output - target)?.sqr()?.mean_all()
}

pub(crate) fn optimizer(vars: Vec<Var>) -> Sgd {
    Sgd::new(vars, SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() }).unwrap()
}

/// Names and values, sorted by name.
pub(crate) type Trained = Vec<(String, Vec<f64>)>;

pub(crate) fn values(vars: &[(String, Var)]) -> Trained {
    let value =
        |(name, var): &(String, Var)| (name.clone(), var.flatten_all().unwrap().to_vec1::<f64>().unwrap());
    let mut all: Trained = vars.iter().map(value).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Builds the layers of [`modules`] in order, without a pipeline.
pub(crate) fn layers(blocks: usize, root: &VarBuilder<'_>) -> Vec<Box<dyn ModuleT>> {
    let mut layers: Vec<Box<dyn ModuleT>> = Vec::new();
    for block in 0..blocks {
        let vb = root.pp("blocks").pp(block);
        layers.push(Box::new(linear(WIDTH, WIDTH, vb.pp("fc")).unwrap()));
        layers.push(Box::new(func(Tensor::tanh)));
        layers.push(Box::new(candle_nn::linear(WIDTH, WIDTH, vb.pp("plain")).unwrap()));
        layers.push(Box::new(layer_norm(WIDTH, 1e-5, vb.pp("norm")).unwrap()));
    }
    layers
}

/// Trains in a single process, on the whole batch at once; returns parameters and losses.
pub(crate) fn alone(blocks: usize, rows: usize) -> (Trained, Vec<f32>) {
    let (map, builder) = (VarMap::new(), weights());
    let layers = layers(blocks, &builder(&map));
    let vars: Vec<(String, Var)> =
        map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    let mut optimizer = optimizer(vars.iter().map(|(_, var)| var.clone()).collect());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (x, y) = batch(step, rows).unwrap();
        let output = layers.iter().try_fold(x, |x, layer| layer.forward_t(&x, true)).unwrap();
        let loss = loss(&output, &y).unwrap();
        optimizer.step(&loss.backward().unwrap()).unwrap();
        losses.push(loss.to_scalar::<f64>().unwrap() as f32);
    }
    (values(&vars), losses)
}

/// Trains the same on a rank of a pipeline.
pub(crate) fn in_stages(
    comm: Comm,
    blocks: usize,
    config: &PipelineConfig,
) -> pipeline::Result<(Trained, Vec<f32>, usize)> {
    let tensor = |error| pipeline::Error::Comm(comm::Error::from(error));
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).map_err(tensor)?;
    let mut pipeline = Pipeline::new(comm, &modules(blocks), &weights(), &example, loss, config)?;
    let mut optimizer = optimizer(pipeline.vars());
    let (mut losses, mut most_alive) = (Vec::new(), 0);
    for step in 0..STEPS {
        let (x, y) = batch(step, ROWS * config.micro_batches).map_err(tensor)?;
        let step = pipeline.step(Some(&x), Some(&y))?;
        optimizer.step(&step.grads).map_err(tensor)?;
        losses.extend(step.loss);
        most_alive = most_alive.max(step.most_alive);
    }
    Ok((values(&pipeline.named_vars()), losses, most_alive))
}

pub(crate) fn assert_equal(got: &[(String, Vec<f64>)], expected: &[(String, Vec<f64>)], what: &str) {
    let names = |all: &[(String, Vec<f64>)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(got), names(expected), "{what}");
    for ((name, got), (_, expected)) in got.iter().zip(expected) {
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-10, "{what}, {name}: {got}, in one process {expected}");
        }
    }
}
