//! Trains a folder's model on rows of tokens, and writes a folder that `transformers` loads; with a rank, adapters that `peft` loads.
//!
//! `cargo run -p girandole-models --example finetune -- FOLDER TOKENS.safetensors OUT [RANK]`, where the file has `tokens`, whole numbers
//! of (rows, length).

use std::path::Path;

use candle_core::{DType, Device};
use candle_nn::{Optimizer, VarMap};
use models::{CausalLm, FolderConfig, Lora, LoraConfig, Weights, save_folder};
use training::build::Builder;
use training::{Adam, AdamConfig, clip_grad_norm, load_tensors, named_vars};

/// Rows of a step.
const ROWS: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, tokens, out, rank @ ..] = &args[..] else { return Err("FOLDER TOKENS OUT [RANK]".into()) };
    let (folder, out) = (Path::new(folder), Path::new(out));
    let tokens = load_tensors(Path::new(tokens), &Device::Cpu)?;
    let tokens = tokens.get("tokens").ok_or("the file has no tensor called tokens")?;

    let (weights, vars) = (Weights::folder(folder)?, VarMap::new());
    let mut builder = Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu));
    let lora = match rank {
        [] => None,
        [rank, ..] => {
            Some(Lora::new(&LoraConfig { rank: rank.parse()?, ..LoraConfig::default() }, weights.config())?)
        }
    };
    if let Some(lora) = &lora {
        builder = lora.adapt(builder);
    }
    let model = CausalLm::new(weights.config(), &builder)?;

    let trained: Vec<_> =
        named_vars(&vars).into_iter().filter(|(name, _)| lora.is_none() || Lora::is_adapter(name)).collect();
    let parameters: Vec<_> = trained.iter().map(|(_, var)| var.clone()).collect();
    let mut optimizer = Adam::named(trained, AdamConfig { learning_rate: 1e-3, ..AdamConfig::adamw() })?;
    let (rows, len) = tokens.dims2()?;
    for step in 0..rows / ROWS {
        let batch = tokens.narrow(0, step * ROWS, ROWS)?;
        let loss = model.loss(&batch.narrow(1, 0, len - 1)?, &batch.narrow(1, 1, len - 1)?)?;
        let mut grads = loss.backward()?;
        clip_grad_norm(&mut grads, &parameters, 1.0)?;
        optimizer.step(&grads)?;
        eprintln!("step {step}: loss {:.4}", loss.to_scalar::<f32>()?);
    }
    match lora {
        Some(lora) => {
            lora.save(
                out,
                named_vars(&vars).into_iter().map(|(name, var)| (name, var.as_detached_tensor())),
            )?;
        }
        None => {
            let how = FolderConfig { tokenizer_of: Some(folder.into()), ..FolderConfig::default() };
            save_folder(out, weights.config(), &named_vars(&vars), &how)?;
        }
    }
    Ok(())
}
