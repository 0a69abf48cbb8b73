//! Adapters of models that score documents, compared with peft: `fixtures/make_lora_heads.py` makes what is compared.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::common::{Expected, Trainer, assert_losses, folder, gap};
use crate::heads::{Packed, pairs_of, scores};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarMap;
use models::{CausalLm, LabelsConfig, Lora, LoraConfig, Problem, Weights};
use training::build::Builder;
use training::{clip_grad_norm, load_tensors, named_vars};

/// Folders of adapters, and the models that they are of.
const VARIANTS: [(&str, &str); 6] = [
    ("single-label", "heads/llama"),
    ("multi-label", "heads/qwen2"),
    ("regression", "heads/mistral"),
    ("reward", "heads/reward"),
    ("gpt2", "heads/gpt2"),
    ("new-head", "qwen3"),
];
/// Fills up the documents of all.
const PAD: u32 = 59;

fn variant(name: &str) -> PathBuf {
    folder("lora-heads").join(name)
}

/// The model below adapters. The one that gets a new head has no such token in its own folder.
fn below(name: &str, base: &str) -> Weights {
    let weights = Weights::for_adapters(&folder(base), &variant(name)).unwrap();
    if name != "new-head" {
        return weights;
    }
    let found = weights.config().labels.clone().unwrap();
    assert_eq!((found.names.len(), found.problem), (3, Problem::SingleLabel));
    Weights::with_new_head(&folder(base), &LabelsConfig { pad_token: Some(PAD), ..found }).unwrap()
}

fn adapted(name: &str, base: &str) -> (Weights, Lora) {
    let weights = below(name, base);
    let lora = Lora::from_folder(&variant(name), weights.config()).unwrap();
    (weights.with_adapters(&variant(name), &lora).unwrap(), lora)
}

fn build(weights: &Weights, lora: &Lora, vars: &VarMap) -> CausalLm {
    let builder = lora.adapt(Builder::new(weights.vars(vars, DType::F32, &Device::Cpu)));
    CausalLm::new(weights.config(), &builder).unwrap()
}

#[test]
fn heads_beside_adapters_compute_and_train_as_pefts() -> Result<()> {
    for (name, base) in VARIANTS {
        let ((weights, lora), vars) = (adapted(name, base), VarMap::new());
        let (expected, labels) =
            (Expected::of(&format!("lora-heads/{name}")), weights.config().labels.clone().unwrap());
        let model = build(&weights, &lora, &vars);
        let found = gap(&scores(&model, &expected.get("tokens").i(0)?)?, expected.get("logits"));
        assert!(found < 1e-5, "{name}: {found} off");
        let all = named_vars(&vars);
        let trained: Vec<_> = all.iter().filter(|(name, _)| lora.trains(name)).cloned().collect();
        assert!(trained.len() == lora.shapes().len() && lora.trains("score.weight"), "{name}");
        let tensors: Vec<_> = trained.iter().map(|(_, var)| var.clone()).collect();
        let mut trainer = Trainer::new(trained, |name| !name.ends_with("magnitude_vector"));
        let mut losses = Vec::new();
        for step in 0..expected.losses().len() {
            let batch = match name {
                "reward" => pairs_of(&expected, step, &labels)?,
                _ => Packed::of(&expected, step, &labels)?,
            };
            let loss = batch.loss(&model)?;
            let mut grads = ops::backward(&loss)?;
            assert!(all.iter().all(|(name, var)| grads.get(var).is_some() == lora.trains(name)), "{name}");
            clip_grad_norm(&mut grads, &tensors, 1.0)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert_losses(&losses, &expected.losses(), name);
    }
    Ok(())
}

/// What is saved is what peft saved, and so has the same effect where peft loads it; beside it are the labels.
#[test]
fn heads_beside_adapters_are_saved_as_pefts_and_merged() -> Result<()> {
    for (name, base) in VARIANTS {
        let ((weights, lora), vars, out) = (adapted(name, base), VarMap::new(), tempfile::tempdir().unwrap());
        let model = build(&weights, &lora, &vars);
        let tensors = || named_vars(&vars).into_iter().map(|(name, var)| (name, var.as_detached_tensor()));
        lora.save(out.path(), tensors()).unwrap();
        let file =
            |folder: &std::path::Path| load_tensors(&folder.join("adapter_model.safetensors"), &Device::Cpu);
        let (ours, theirs) = (file(out.path()).unwrap(), file(&variant(name)).unwrap());
        assert_eq!(ours.len(), theirs.len(), "{name}");
        assert!(theirs.iter().all(|(name, tensor)| gap(&ours[name], tensor) == 0.0), "{name}");
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.path().join("adapter_config.json")).unwrap()).unwrap();
        let saved = json["modules_to_save"].as_array().unwrap();
        assert!(json["task_type"] == "SEQ_CLS" && saved.contains(&"score".into()), "{json}");
        assert_eq!(Lora::labels_of(out.path()).unwrap(), weights.config().labels, "{name}");
        let again = Weights::for_adapters(&folder(base), out.path()).unwrap();
        assert_eq!(again.config().labels, weights.config().labels, "{name}");
        assert_eq!(Lora::from_folder(out.path(), again.config()).unwrap().shapes(), lora.shapes(), "{name}");

        let adapters: HashMap<String, Tensor> = tensors().filter(|(name, _)| lora.trains(name)).collect();
        let merged = VarMap::new();
        let alone =
            CausalLm::new(weights.config(), &Builder::new(weights.vars(&merged, DType::F32, &Device::Cpu)))?;
        for (name, var) in named_vars(&merged) {
            var.set(&lora.merged(&name, &var.as_detached_tensor(), &adapters)?.copy()?)?;
        }
        let tokens = Expected::of(&format!("lora-heads/{name}")).get("tokens").i(0)?;
        assert!(gap(&scores(&alone, &tokens)?, &scores(&model, &tokens)?) < 1e-5, "{name}");
    }
    Ok(())
}

/// A new head is trained without being named; adapters of a language model have none.
#[test]
fn a_head_is_always_trained() {
    let names = ["ham", "spam"].map(String::from).to_vec();
    let labels = LabelsConfig { names, problem: Problem::SingleLabel, pad_token: Some(3) };
    let weights = Weights::with_new_head(&folder("llama-tied"), &labels).unwrap();
    let lora = Lora::new(&LoraConfig::default(), weights.config()).unwrap();
    assert_eq!(lora.config().save_modules, ["score"]);
    assert!(lora.shapes().contains_key("score.weight") && !lora.trains("model.embed_tokens.weight"));
    let save_modules = vec!["embed_tokens".into()];
    let lora = Lora::new(&LoraConfig { save_modules, ..LoraConfig::default() }, weights.config()).unwrap();
    assert!(lora.trains("score.weight") && lora.trains("model.embed_tokens.weight"));
    assert_eq!(Lora::labels_of(&folder("lora")).unwrap(), None);
    let line = weights.with_adapters(&folder("lora"), &lora).unwrap_err().to_string();
    assert!(line.contains("missing ") && line.contains("score.weight"), "{line}");
}
