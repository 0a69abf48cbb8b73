//! A training run with checkpoints, for tests and for a bench.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use girandole::comm::Local;
use girandole::models::{CausalLm, ModelConfig, Weights};
use girandole::trainer::{CheckpointPlan, Data, Observer, StepReport, Summary, TrainConfig, Trainer};
use girandole::{Batch, Layout, Parallel, ParallelConfig};

/// Rows of a few tokens.
#[derive(Clone)]
pub(crate) struct Rows {
    pub(crate) len: usize,
    pub(crate) tokens: usize,
}

impl Data for Rows {
    fn rows(&self) -> usize {
        16
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let (len, tokens) = (self.len, self.tokens);
        let all = |first| {
            rows.iter().flat_map(move |row| {
                (0..len).map(move |place| ((row * 37 + place * 11 + first) % tokens) as i64)
            })
        };
        let tensor = |first| Tensor::from_iter(all(first), device)?.reshape((rows.len(), len));
        Ok((tensor(0)?.to_dtype(DType::U32)?, tensor(1)?).into())
    }
}

fn model((vocabulary, hidden, layers): (usize, usize, usize)) -> ModelConfig {
    let intermediate = 8 * hidden / 3 / 32 * 32;
    let json = format!(
        r#"{{"model_type": "llama", "vocab_size": {vocabulary}, "hidden_size": {hidden}, "intermediate_size": {intermediate},
             "num_hidden_layers": {layers}, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
             "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": true,
             "rope_theta": 10000.0}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

/// Records the time of each step.
#[derive(Default)]
pub(crate) struct Times(pub(crate) Vec<f64>);

impl<M> Observer<M> for Times {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.0.push(report.seconds);
        Ok(())
    }
}

/// Trains with a checkpoint every `every` steps; returns what rank 0 has recorded.
pub(crate) fn train(
    (layout, sizes): (&str, (usize, usize, usize)),
    rows: &Rows,
    (steps, every): (usize, usize),
    plan: Option<(&Path, bool)>,
) -> (Summary, Vec<f64>) {
    let layout: Layout = layout.parse().unwrap();
    let plan =
        plan.map(|(dir, in_background)| CheckpointPlan { dir: dir.into(), every, keep: 9, in_background });
    let train = TrainConfig { steps, batch_size: 2, checkpoints: plan, ..TrainConfig::default() };
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let config = model(sizes);
        let weights = Weights::random(&config, 1).unwrap();
        let build = move |builder: &_| CausalLm::new(&config, builder);
        let mut model = Parallel::new(comm, &layout, weights.parts(), &ParallelConfig::default(), build)?;
        let mut times = Times::default();
        let summary = Trainer::new(&mut model, Arc::new(rows.clone()), train.clone())?.run(&mut times)?;
        Ok((summary, times.0))
    });
    ranks.unwrap().swap_remove(0)
}
