//! Test helpers: folders and results of transformers, and training as in the script that made them.
#![allow(dead_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use training::{Adam, AdamConfig};

/// Warm-up steps of the learning rate.
const WARMUP: usize = 5;

/// Names of the model folders.
pub(crate) const FOLDERS: [&str; 11] = [
    "deepseek", "deepseek-direct", "llama", "llama-tied", "mistral", "mixtral", "qwen2", "qwen2-moe",
    "qwen3", "qwen3-moe", "gpt2",
];

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Results of transformers.
pub(crate) struct Expected(HashMap<String, Tensor>);

impl Expected {
    pub(crate) fn of(name: &str) -> Self {
        Self(training::load_tensors(&folder(name).join("expected.safetensors"), &Device::Cpu).unwrap())
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        &self.0[name]
    }

    /// Returns the losses of training.
    pub(crate) fn losses(&self) -> Vec<f32> {
        self.0["losses"].to_vec1().unwrap()
    }

    /// Returns inputs and targets for each step; of each batch the rows of one rank.
    pub(crate) fn batches(&self, rank: usize, ranks: usize) -> Vec<[Tensor; 2]> {
        let (steps, rows, len) = self.0["batches"].dims3().unwrap();
        let part = |step: usize| {
            let own = self.0["batches"].get(step)?.narrow(0, rank * rows / ranks, rows / ranks)?;
            Ok([own.narrow(1, 0, len - 1)?.contiguous()?, own.narrow(1, 1, len - 1)?.contiguous()?])
        };
        (0..steps).map(part).collect::<Result<_>>().unwrap()
    }
}

pub(crate) fn gap(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let gap = (a.to_dtype(DType::F64).unwrap() - b.to_dtype(DType::F64).unwrap()).unwrap();
    gap.abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

pub(crate) fn assert_losses(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 1e-4, "{what}: step {step}: {got}, expected {expected}");
    }
}

/// Returns the likeliest token of each row.
pub(crate) fn best(logits: &Tensor) -> Vec<u32> {
    logits.argmax(D::Minus1).unwrap().to_vec1().unwrap()
}

/// AdamW with weight decay on matrices only, and a learning rate that warms up.
pub(crate) struct Trainer {
    optimizers: [Adam; 2],
    step: usize,
}

impl Trainer {
    /// `is_matrix` decides by the name, because a rank may have a flat part of the parameter.
    pub(crate) fn new(vars: Vec<(String, Var)>, is_matrix: impl Fn(&str) -> bool) -> Self {
        let (matrices, others): (Vec<_>, Vec<_>) = vars.into_iter().partition(|(name, _)| is_matrix(name));
        let optimizer = |vars, weight_decay| {
            let config = AdamConfig { learning_rate: 0.01, beta2: 0.95, weight_decay, ..AdamConfig::adamw() };
            Adam::named(vars, config).unwrap()
        };
        Self { optimizers: [optimizer(matrices, 0.1), optimizer(others, 0.0)], step: 0 }
    }

    pub(crate) fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step += 1;
        for optimizer in &mut self.optimizers {
            optimizer.set_learning_rate(0.01 * (self.step as f64 / WARMUP as f64).min(1.0));
            optimizer.step(grads)?;
        }
        Ok(())
    }
}
