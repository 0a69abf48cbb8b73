//! The training loop with a callback, evaluation and checkpoints: `cargo run --release -p girandole --example callback -- FOLDER`
//!
//! Kill it and start it again with the same folder: it resumes from its last checkpoint, in any layout.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use girandole::launch::{self, RankContext};
use girandole::models::{CausalLm, ModelConfig, Weights};
use girandole::trainer::{CheckpointPlan, Data, Observer, StepReport, TrainConfig, Trainer};
use girandole::{Batch, Evaluation, Parallel, ParallelConfig, Result, comm::carry};

const SIZES: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
    "initializer_range": 0.1, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;

/// Rows of consecutive tokens; each row starts at its index.
struct Counting;

impl Data for Counting {
    fn rows(&self) -> usize {
        64
    }

    fn batch(&self, rows: &[usize], device: &Device) -> candle_core::Result<Batch> {
        let tokens = |first| {
            rows.iter().flat_map(move |row| (first..first + 16).map(move |i| ((row + i) % 64) as u32))
        };
        let tensor = |first| Tensor::from_iter(tokens(first), device)?.reshape((rows.len(), 16));
        Ok((tensor(0)?, tensor(1)?.to_dtype(DType::I64)?).into())
    }
}

/// Prints on the first rank. An error that a callback returns ends the run.
struct Printer(bool);

impl<M> Observer<M> for Printer {
    fn stepped(&mut self, report: &StepReport) -> Result<()> {
        if self.0 && report.step.is_multiple_of(20) {
            println!("step {}: loss {:.4}, gradients {:.3}", report.step, report.loss, report.grad_norm);
        }
        Ok(())
    }

    fn evaluated(&mut self, step: usize, evaluation: &Evaluation, _: &mut Parallel<M>) -> Result<()> {
        if self.0 {
            println!("step {step}: evaluated, loss {:.4}", evaluation.loss);
        }
        Ok(())
    }
}

fn train(rank: RankContext) -> Result<()> {
    let (comm, config) =
        (std::sync::Arc::new(rank.connect()?), ModelConfig::from_json(SIZES).map_err(carry)?);
    let weights = Weights::random(&config, 1).map_err(carry)?;
    let build = move |builder: &_| CausalLm::new(&config, builder);
    let mut model =
        Parallel::new(comm, &"shard=2".parse()?, weights.parts(), &ParallelConfig::default(), build)?;
    let printer = &mut Printer(model.mesh().world().rank() == 0);
    let folder = std::env::args().nth(1).unwrap_or("checkpoints".into());
    let checkpoints = CheckpointPlan { dir: folder.into(), every: 20, keep: 2, in_background: true };
    let config = TrainConfig {
        steps: 60,
        learning_rate: 0.01,
        evaluate_every: Some(30),
        checkpoints: Some(checkpoints),
        ..Default::default()
    };
    let mut trainer = Trainer::new(&mut model, Arc::new(Counting), config)?.evaluating(&Counting);
    trainer.resume_latest()?;
    trainer.run(printer)?;
    Ok(())
}

fn main() -> ExitCode {
    launch::run(2, train)
}
