//! Variants of LoRA, compared with peft: `fixtures/make_lora.py` makes what is compared.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::common::{Expected, Trainer, assert_losses, folder, gap};
use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarMap;
use models::{CausalLm, Lora, LoraConfig, Weights, export_gguf_adapters};
use training::build::Builder;
use training::{clip_grad_norm, load_tensors, named_vars};

/// Folders of adapters, and the models that they are of.
const VARIANTS: [(&str, &str); 11] = [
    ("rslora", "llama"),
    ("patterns", "llama"),
    ("saved", "llama"),
    ("saved-tied", "llama-tied"),
    ("dora", "llama"),
    ("dora-gpt2", "gpt2"),
    ("dora-moe", "qwen2-moe"),
    ("experts", "qwen3-moe"),
    ("experts-mixtral", "mixtral"),
    ("experts-qwen2", "qwen2-moe"),
    ("experts-deepseek", "deepseek"),
];

fn variant(name: &str) -> PathBuf {
    folder("lora-variants").join(name)
}

fn adapted(name: &str, base: &str) -> (Weights, Lora) {
    let weights = Weights::folder(&folder(base)).unwrap();
    let lora = Lora::from_folder(&variant(name), weights.config()).unwrap();
    (weights.with_adapters(&variant(name), &lora).unwrap(), lora)
}

fn build(weights: &Weights, lora: &Lora, vars: &VarMap) -> CausalLm {
    let builder = lora.adapt(Builder::new(weights.vars(vars, DType::F32, &Device::Cpu)));
    CausalLm::new(weights.config(), &builder).unwrap()
}

#[test]
fn variants_compute_and_train_as_pefts() -> Result<()> {
    for (name, base) in VARIANTS {
        let ((weights, lora), vars) = (adapted(name, base), VarMap::new());
        let expected = Expected::of(&format!("lora-variants/{name}"));
        let model = build(&weights, &lora, &vars);
        let found = gap(&model.logits(expected.get("tokens"))?, expected.get("logits"));
        assert!(found < 1e-5, "{name}: {found} off");
        let all = named_vars(&vars);
        let trained: Vec<_> = all.iter().filter(|(name, _)| lora.trains(name)).cloned().collect();
        assert_eq!(trained.len(), lora.shapes().len(), "{name}");
        let tensors: Vec<_> = trained.iter().map(|(_, var)| var.clone()).collect();
        let mut trainer = Trainer::new(trained, |name| !name.ends_with("magnitude_vector"));
        let mut losses = Vec::new();
        for [tokens, targets] in expected.batches(0, 1) {
            let loss = model.loss(&tokens, &targets)?;
            let mut grads = loss.backward()?;
            assert!(all.iter().all(|(name, var)| grads.get(var).is_some() == lora.trains(name)), "{name}");
            clip_grad_norm(&mut grads, &tensors, 1.0)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert_losses(&losses, &expected.losses(), name);
    }
    Ok(())
}

/// What is saved is what peft saved, and so has the same effect where peft loads it.
#[test]
fn variants_are_saved_as_pefts_and_merged() -> Result<()> {
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
        let again = Lora::from_folder(out.path(), weights.config()).unwrap();
        assert_eq!(again.shapes(), lora.shapes(), "{name}");
        let of = |lora: &Lora| LoraConfig { save_modules: Vec::new(), ..lora.config().clone() };
        assert_eq!(of(&again), of(&lora), "{name}");

        let adapters: HashMap<String, Tensor> = tensors().filter(|(name, _)| lora.trains(name)).collect();
        let merged = VarMap::new();
        let alone =
            CausalLm::new(weights.config(), &Builder::new(weights.vars(&merged, DType::F32, &Device::Cpu)))?;
        for (name, var) in named_vars(&merged) {
            var.set(&lora.merged(&name, &var.as_detached_tensor(), &adapters)?.copy()?)?;
        }
        let tokens = Expected::of(&format!("lora-variants/{name}")).get("tokens").clone();
        assert!(gap(&alone.logits(&tokens)?, &model.logits(&tokens)?) < 1e-5, "{name}");
    }
    Ok(())
}

#[test]
fn variants_that_cannot_be_are_named() {
    let tied = Weights::folder(&folder("llama-tied")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(variant("saved-tied").join(name), copy.path().join(name)).unwrap();
    }
    let path = copy.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"ensure_weight_tying\": true", "\"ensure_weight_tying\": false"))
        .unwrap();
    let line = Lora::from_folder(copy.path(), tied.config()).unwrap_err().to_string();
    assert!(line.contains("ensure_weight_tying is false") && line.contains("apart"), "{line}");
    // Trained apart all the same: the head is not there.
    let llama = Weights::folder(&folder("llama")).unwrap();
    let lora = Lora::from_folder(&variant("saved"), llama.config()).unwrap();
    let line = llama.with_adapters(&variant("rslora"), &lora).unwrap_err().to_string();
    assert!(line.contains("missing lm_head.weight, model.embed_tokens.weight"), "{line}");
    let save_modules = vec!["lm_head".into(), "model.layers".into()];
    let config = LoraConfig { save_modules, ..LoraConfig::default() };
    let line = Lora::new(&config, llama.config()).unwrap_err().to_string();
    assert!(line.contains("save_modules is model.layers; modules that can be trained whole are"), "{line}");
    let experts = Weights::folder(&folder("qwen3-moe")).unwrap();
    let of = |targets: &[&str], dora| {
        let targets = targets.iter().map(ToString::to_string).collect();
        let config = LoraConfig { targets, dora, ..LoraConfig::default() };
        Lora::new(&config, experts.config()).unwrap_err().to_string()
    };
    // peft would add adapters of experts to "all-linear".
    let lora = |targets: &[&str]| {
        let targets = targets.iter().map(ToString::to_string).collect();
        Lora::new(&LoraConfig { targets, ..LoraConfig::default() }, experts.config()).unwrap()
    };
    let (all, out) = (lora(&["all-linear", "experts.down_proj"]), tempfile::tempdir().unwrap());
    let zeros = |dims: &Vec<usize>| Tensor::zeros(&dims[..], DType::F32, &Device::Cpu).unwrap();
    all.save(out.path(), all.shapes().iter().map(|(name, dims)| (name.clone(), zeros(dims)))).unwrap();
    let again = Lora::from_folder(out.path(), experts.config()).unwrap();
    assert_eq!(again.shapes(), all.shapes());
    // Nor may the layers that experts have, too, be named by themselves.
    let dense = ["down", "gate", "up"].map(|name| format!("layers.0.mlp.{name}_proj"));
    let named = ["k_proj", "o_proj", "q_proj", "v_proj", "experts.down_proj"].map(String::from);
    assert_eq!(again.config().targets, [&named[..], &dense].concat());
    // Each expert by itself, as before transformers 5.
    let name = "base_model.model.model.layers.1.mlp.experts.0.down_proj.lora_A.weight";
    let single = HashMap::from([(name, zeros(&vec![2, 2]))]);
    candle_core::safetensors::save(&single, out.path().join("adapter_model.safetensors")).unwrap();
    let line = Lora::from_folder(out.path(), experts.config()).unwrap_err().to_string();
    assert!(line.contains(&format!("each expert has adapters of its own ({name})")), "{line}");
    let line = of(&["experts.down_proj"], true);
    assert!(line.contains("dora is true; adapters of experts have neither dropout nor magnitudes"), "{line}");
    let line = of(&["experts.gate_proj"], false);
    assert!(
        line.contains("\"experts.gate_proj\" matches no layer")
            && line.contains("experts.down_proj, experts.gate_up_proj"),
        "{line}"
    );
    let line = of(&["mlp.gate"], false);
    assert!(
        line.contains("adapters of the embedding, the head, norms and routers are not supported"),
        "{line}"
    );
}

/// A GGUF file has one alpha: other scales are in the second matrices.
#[test]
fn scales_of_layers_are_in_gguf_files() {
    let ((weights, lora), out) = (adapted("patterns", "llama"), tempfile::tempdir().unwrap());
    let path = out.path().join("adapters.gguf");
    export_gguf_adapters(&path, &weights, &lora).unwrap();
    let mut file = std::fs::File::open(&path).unwrap();
    let content = gguf_file::Content::read(&mut file).unwrap();
    let alpha = f64::from(content.metadata["adapter.lora.alpha"].to_f32().unwrap());
    let builder = weights.tensors(DType::F32, &Device::Cpu);
    for (name, layer) in [
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
    ] {
        let tensor = content.tensor(&mut file, &format!("{name}.weight.lora_b"), &Device::Cpu).unwrap();
        let b = format!("{layer}.lora_B.weight");
        let ours = builder.get(lora.shapes()[&b].as_slice(), &b).unwrap();
        let expected = (ours * lora.config().scale_of(layer)).unwrap();
        let of_file = tensor.dequantize(&Device::Cpu).unwrap();
        let rank = of_file.dim(1).unwrap() as f64;
        assert!(gap(&(of_file * (alpha / rank)).unwrap(), &expected) < 1e-6, "{layer}");
    }
    for (name, base, part) in
        [("dora", "llama", "lora_magnitude_vector"), ("saved", "llama", "lm_head.weight")]
    {
        let (weights, lora) = adapted(name, base);
        let line = export_gguf_adapters(&path, &weights, &lora).unwrap_err().to_string();
        assert!(line.contains(part) && line.contains("merge them"), "{line}");
    }
}
