//! LoRA adapters, compared with peft.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex};

use crate::common::{Expected, FOLDERS, Trainer, assert_losses, folder, gap};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarMap;
use comm::{Communicator, Local, Mesh};
use fsdp::{Fsdp, FsdpConfig};
use models::{CausalLm, Error, Lora, LoraConfig, Weights};
use strategy::DistributedModel;
use tensor_parallel::{TensorParallel, TensorParallelConfig, Weights as Parts};
use training::build::Builder;
use training::{clip_grad_norm, load_tensors, named_vars};

fn adapted() -> (Weights, Lora) {
    let weights = Weights::folder(&folder("llama")).unwrap();
    let lora = Lora::from_folder(&folder("lora"), weights.config()).unwrap();
    (weights.with_adapters(&folder("lora"), &lora).unwrap(), lora)
}

fn build(weights: &Weights, lora: &Lora, vars: &VarMap) -> CausalLm {
    let builder = lora.adapt(Builder::new(weights.vars(vars, DType::F32, &Device::Cpu)));
    CausalLm::new(weights.config(), &builder).unwrap()
}

#[test]
fn adapters_compute_and_train_as_pefts() -> Result<()> {
    let ((weights, lora), vars, expected) = (adapted(), VarMap::new(), Expected::of("lora"));
    let model = build(&weights, &lora, &vars);
    let found = gap(&model.logits(expected.get("tokens"))?, expected.get("logits"));
    assert!(found < 1e-5, "{found} off");
    let all = named_vars(&vars);
    let adapters: Vec<_> = all.iter().filter(|(name, _)| Lora::is_adapter(name)).cloned().collect();
    assert_eq!((adapters.len(), lora.shapes().len()), (12, 12));
    let tensors: Vec<_> = adapters.iter().map(|(_, var)| var.clone()).collect();
    let mut trainer = Trainer::new(adapters, |_| true);
    let mut losses = Vec::new();
    for [tokens, targets] in expected.batches(0, 1) {
        let loss = model.loss(&tokens, &targets)?;
        let mut grads = loss.backward()?;
        assert!(all.iter().all(|(name, var)| grads.get(var).is_some() == Lora::is_adapter(name)));
        clip_grad_norm(&mut grads, &tensors, 1.0)?;
        trainer.step(&grads)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    assert_losses(&losses, &expected.losses(), "peft");
    Ok(())
}

#[test]
fn adapters_of_sharded_and_divided_models_train_as_pefts() {
    let ((weights, lora), expected) = (adapted(), Expected::of("lora"));
    let sharded = |comm: Arc<dyn Communicator>| -> Result<Vec<f32>> {
        let batches = expected.batches(comm.rank(), 2);
        let vb = weights.tensors(DType::F32, &Device::Cpu);
        let build = |units| CausalLm::new(weights.config(), &lora.adapt(Builder::from(units)));
        let frozen = weights.shapes().keys().cloned().collect();
        let audit = training::AuditConfig { frozen, ..Default::default() };
        let config = FsdpConfig { audit, ..FsdpConfig::default() };
        let fsdp = Fsdp::new(comm, vb, &config, build)?;
        let adapters = fsdp.named_vars().into_iter().filter(|(name, _)| Lora::is_adapter(name));
        let mut trainer = Trainer::new(adapters.collect(), |_| true);
        let mut losses = Vec::new();
        for [tokens, targets] in batches {
            let loss = fsdp.model()?.loss(&tokens, &targets)?;
            let mut grads = fsdp.backward(&loss)?;
            fsdp.clip_grad_norm(&mut grads, 1.0)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        Ok(losses)
    };
    let losses = Local::run_shared(2, |comm| Ok(sharded(comm)?)).unwrap();
    let mean: Vec<f32> = losses[0].iter().zip(&losses[1]).map(|(a, b)| (a + b) / 2.0).collect();
    assert_losses(&mean, &expected.losses(), "sharded");

    let saved = Mutex::new(HashMap::new());
    let divided = |comm: Arc<dyn Communicator>| -> Result<Vec<f32>> {
        let wrap = |error| candle_core::Error::wrap(error);
        let mesh = Mesh::new(comm, &[("tp", 2)])?;
        let parts = Parts::from(weights.parts());
        let build = |shards| Ok(CausalLm::new(weights.config(), &lora.adapt(Builder::from(shards)))?);
        let parallel = TensorParallel::new(&mesh, &TensorParallelConfig::default(), &parts, build);
        let parallel = parallel.map_err(wrap)?;
        let adapters = parallel.named_vars().into_iter().filter(|(name, _)| Lora::is_adapter(name));
        let mut trainer = Trainer::new(adapters.collect(), |_| true);
        let mut losses = Vec::new();
        for [tokens, targets] in expected.batches(0, 1) {
            let loss = parallel.model()?.loss(&tokens, &targets)?;
            let mut grads = parallel.backward(&loss).map_err(wrap)?;
            for parameter in parallel.parameters() {
                assert_eq!(grads.get(parameter.var()).is_some(), Lora::is_adapter(parameter.name()));
            }
            parallel.clip_grad_norm(&mut grads, 1.0).map_err(wrap)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        let keep = |name: &str, tensor: Tensor| {
            saved.lock().unwrap().insert(name.to_string(), tensor.copy()?);
            Ok(())
        };
        parallel.visit_full(keep).map_err(wrap)?;
        Ok(losses)
    };
    let losses = Local::run_shared(2, |comm| Ok(divided(comm)?)).unwrap();
    assert_losses(&losses[0], &expected.losses(), "divided");
    let shapes = saved.into_inner().unwrap();
    assert!(lora.shapes().iter().all(|(name, dims)| shapes[name].dims() == dims));
}

#[test]
fn adapters_are_saved_as_pefts_and_merged() -> Result<()> {
    let (weights, lora) = adapted();
    let (vars, out) = (VarMap::new(), tempfile::tempdir().unwrap());
    let model = build(&weights, &lora, &vars);
    let expected = Expected::of("lora");
    let tensors = || named_vars(&vars).into_iter().map(|(name, var)| (name, var.as_detached_tensor()));
    lora.save(out.path(), tensors()).unwrap();
    let file =
        |folder: &std::path::Path| load_tensors(&folder.join("adapter_model.safetensors"), &Device::Cpu);
    let (ours, theirs) = (file(out.path()).unwrap(), file(&folder("lora")).unwrap());
    assert_eq!(ours.len(), theirs.len());
    assert!(theirs.iter().all(|(name, tensor)| gap(&ours[name], tensor) == 0.0));
    let again = Lora::from_folder(out.path(), weights.config()).unwrap();
    assert_eq!(again.config(), lora.config());

    // Merged into the weights of a model without adapters.
    let adapters: HashMap<String, Tensor> = tensors().filter(|(name, _)| Lora::is_adapter(name)).collect();
    let merged = VarMap::new();
    let alone =
        CausalLm::new(weights.config(), &Builder::new(weights.vars(&merged, DType::F32, &Device::Cpu)))?;
    let mut changed = 0;
    for (name, var) in named_vars(&merged) {
        let value = lora.merged(&name, &var.as_detached_tensor(), &adapters)?;
        changed += usize::from(gap(&value, var.as_tensor()) > 0.0);
        var.set(&value.copy()?)?;
    }
    assert_eq!(changed, 6);
    let tokens = expected.get("tokens");
    assert!(gap(&alone.logits(tokens)?, &model.logits(tokens)?) < 1e-5);
    Ok(())
}

#[test]
fn new_adapters_change_nothing_at_first() -> Result<()> {
    for name in FOLDERS {
        let (weights, vars) = (Weights::folder(&folder(name)).unwrap(), VarMap::new());
        let lora = Lora::new(&LoraConfig::default(), weights.config()).unwrap();
        let model = build(&weights, &lora, &vars);
        let expected = Expected::of(name);
        assert!(gap(&model.logits(expected.get("tokens"))?, expected.get("logits")) < 1e-5, "{name}");
        let grads = model.loss(expected.get("tokens"), expected.get("tokens"))?.backward()?;
        for (name, var) in named_vars(&vars) {
            assert_eq!(grads.get(&var).is_some(), Lora::is_adapter(&name), "{name}");
        }
        // As in peft, experts and routers have none; a shared expert and its gate have.
        let layers = match name {
            "gpt2" => 2 * 4,
            "mixtral" => 2 * 4,
            // Attention, a dense layer, a shared expert.
            "deepseek" => 2 * 5 + 3 + 3,
            "deepseek-direct" => 2 * (4 + 3),
            "qwen2-moe" => 7 + 8,
            "qwen3-moe" => 7 + 4,
            _ => 2 * 7,
        };
        assert_eq!(lora.shapes().len(), 2 * layers, "{name}");
        let other = VarMap::new();
        build(&weights.with_seed(1), &lora, &other);
        let first = lora.shapes().keys().find(|name| name.contains("lora_A")).unwrap();
        let of = |vars: &VarMap| vars.data().lock().unwrap()[first].as_tensor().clone();
        assert!(gap(&of(&vars), &of(&other)) > 0.0);
    }
    Ok(())
}

/// Adapters in f32 with a model in bf16.
#[test]
fn adapters_may_have_a_dtype_of_their_own() -> Result<()> {
    let (weights, vars) = (Weights::folder(&folder("llama-tied")).unwrap(), VarMap::new());
    let config = LoraConfig { dtype: Some(DType::F32), ..LoraConfig::default() };
    let lora = Lora::new(&config, weights.config()).unwrap();
    let builder = lora.adapt(Builder::new(weights.vars(&vars, DType::BF16, &Device::Cpu)));
    let model = CausalLm::new(weights.config(), &builder)?;
    let expected = Expected::of("llama-tied");
    let tokens = expected.get("tokens");
    assert!(gap(&model.logits(tokens)?, expected.get("logits")) < 0.5);
    let grads = model.loss(tokens, tokens)?.backward()?;
    for (name, var) in named_vars(&vars) {
        let dtype = if Lora::is_adapter(&name) { DType::F32 } else { DType::BF16 };
        assert_eq!(var.dtype(), dtype, "{name}");
        assert_eq!(grads.get(&var).map(Tensor::dtype), Lora::is_adapter(&name).then_some(dtype), "{name}");
    }
    Ok(())
}

#[test]
fn adapters_that_cannot_be_are_named() {
    let weights = Weights::folder(&folder("llama")).unwrap();
    let line = |config: LoraConfig| Lora::new(&config, weights.config()).unwrap_err().to_string();
    let targets = |target: &str| LoraConfig { targets: vec![target.into()], ..LoraConfig::default() };
    let missed = line(targets("query"));
    assert!(
        missed.contains("\"query\" matches no layer") && missed.contains("down_proj, gate_proj, k_proj"),
        "{missed}"
    );
    assert!(line(targets("proj")).contains("matches no layer"));
    for target in ["lm_head", "embed_tokens", "norm"] {
        assert!(
            line(targets(target)).contains("adapters of the embedding, the head, norms and routers"),
            "{target}"
        );
    }
    assert!(line(LoraConfig { rank: 0, ..LoraConfig::default() }).contains("rank is 0"));
}

#[test]
fn one_target_of_a_folder_that_matches_a_layer_is_enough() {
    let weights = Weights::folder(&folder("llama")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(folder("lora").join(name), copy.path().join(name)).unwrap();
    }
    let path = copy.path().join("adapter_config.json");
    let text = fs::read_to_string(&path).unwrap();
    // As peft asks; the tensors say the rest.
    let targets = |names: &str| fs::write(&path, text.replace("\"down_proj\",", names)).unwrap();
    targets("\"down_proj\", \"c_attn\",");
    let lora = Lora::from_folder(copy.path(), weights.config()).unwrap();
    assert_eq!(lora.config().targets, ["down_proj", "q_proj", "v_proj"]);
    weights.with_adapters(copy.path(), &lora).unwrap();
    targets("\"c_proj\",");
    let lora = Lora::from_folder(copy.path(), weights.config()).unwrap();
    assert!(matches!(weights.with_adapters(copy.path(), &lora), Err(Error::Tensors { .. })));
    for (names, said) in [
        (text.replace("_proj\"", "\""), "LoRA target \"down\" matches no layer"),
        (text.replace("\"down_proj\"", "\"lm_head\""), "adapters of the embedding, the head"),
    ] {
        fs::write(&path, names).unwrap();
        let line = Lora::from_folder(copy.path(), weights.config()).unwrap_err().to_string();
        assert!(line.contains(said), "{line}");
    }
}

#[test]
fn folders_of_adapters_that_cannot_be_are_named() {
    let weights = Weights::folder(&folder("llama")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(folder("lora").join(name), copy.path().join(name)).unwrap();
    }
    let path = copy.path().join("adapter_config.json");
    let text = fs::read_to_string(&path).unwrap();
    for (from, to, part) in [
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias is \"all\""),
        (
            "\"rank_pattern\": {}",
            "\"rank_pattern\": {\"query\": 2}",
            "rank_pattern \"query\" matches no layer",
        ),
        (
            "\"rank_pattern\": {}",
            "\"rank_pattern\": {\"q_proj\": 0}",
            "rank_pattern is 0 for \"q_proj\"; it must be above 0",
        ),
        ("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": -1}", "rank_pattern.q_proj is -1"),
        (
            "\"rank_pattern\": {}",
            "\"rank_pattern\": {\"q_(proj\": 2}",
            "rank_pattern is \"q_(proj\"; it must be",
        ),
        (
            "\"alpha_pattern\": {}",
            "\"alpha_pattern\": {\"up_proj\": 2}",
            "alpha_pattern \"up_proj\" matches only layers without an adapter; layers with one are called",
        ),
        ("\"alpha_pattern\": {}", "\"alpha_pattern\": {\"v_proj\": null}", "alpha_pattern.v_proj is null"),
        (
            "\"modules_to_save\": null", "\"modules_to_save\": [\"head\"]",
            "save_modules is head; modules that can",
        ),
        ("\"modules_to_save\": null", "\"modules_to_save\": \"lm_head\"", "modules_to_save is \"lm_head\""),
        ("\"use_qalora\": false", "\"use_qalora\": true", "use_qalora"),
        ("\"layers_to_transform\": null", "\"layers_to_transform\": [0]", "layers_to_transform"),
        ("\"r\": 4,", "", "r is missing"),
        ("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "convert the adapters"),
    ] {
        assert!(text.contains(from));
        fs::write(&path, text.replace(from, to)).unwrap();
        let line = Lora::from_folder(copy.path(), weights.config()).unwrap_err().to_string();
        assert!(line.contains(part), "{line}");
    }
    let eva = text.replace("\"init_lora_weights\": true", "\"init_lora_weights\": \"eva\"");
    fs::write(&path, eva.replace("\"eva_config\": null", "\"eva_config\": {\"rho\": 2.0}")).unwrap();
    assert!(Lora::from_folder(copy.path(), weights.config()).is_ok());
    fs::write(&path, text.replace("\"r\": 4,", "\"r\": 2,").replace("\"v_proj\"", "\"k_proj\"")).unwrap();
    let lora = Lora::from_folder(copy.path(), weights.config()).unwrap();
    let Err(Error::Tensors { misfits, .. }) = weights.with_adapters(copy.path(), &lora) else {
        panic!("it was taken")
    };
    assert_eq!((misfits.missing.len(), misfits.surplus.len(), misfits.misshapen.len()), (4, 4, 8));
}
