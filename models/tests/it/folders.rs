//! Writing and reading model folders, and folders that are malformed.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::common::{Expected, FOLDERS, folder, gap};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use models::tokens::NamedTemplate;
use models::{CausalLm, Error, FolderConfig, FolderWriter, ModelConfig, Weights, WrittenFiles, save_folder};
use training::build::Builder;
use training::{load_tensors, named_vars, save_tensors};

/// Returns a copy of a folder, to be modified.
fn copy(name: &str) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

fn load(path: &Path, vars: &VarMap, dtype: DType) -> CausalLm {
    let weights = Weights::folder(path).unwrap();
    CausalLm::new(weights.config(), &Builder::new(weights.vars(vars, dtype, &Device::Cpu))).unwrap()
}

fn refused(path: &Path) -> String {
    let line = Weights::folder(path).map(drop).unwrap_err().to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

/// What transformers has in 32 bits in a model of 16, is saved so: corrections, and the routers of DeepSeek V3.
#[test]
fn routers_of_deepseek_are_saved_in_32_bits() {
    for (name, is_wide) in [("deepseek", true), ("qwen2-moe", false)] {
        let (vars, out) = (VarMap::new(), tempfile::tempdir().unwrap());
        let model = load(&folder(name), &vars, DType::BF16);
        save_folder(out.path(), model.config(), &named_vars(&vars), &FolderConfig::default()).unwrap();
        let saved = Weights::folder(out.path()).unwrap();
        let [of_router, of_layer] = ["mlp.gate.weight", "self_attn.o_proj.weight"]
            .map(|name| saved.dtype(&format!("model.layers.1.{name}")).unwrap());
        let expected = if is_wide { DType::F32 } else { DType::BF16 };
        assert_eq!((of_router, of_layer), (expected, DType::BF16), "{name}");
    }
}

#[test]
fn what_is_saved_loads_with_equal_logits() {
    for name in FOLDERS {
        let (vars, out) = (VarMap::new(), tempfile::tempdir().unwrap());
        let model = load(&folder(name), &vars, DType::F32);
        let tokens = Expected::of(name).get("tokens").clone();
        let logits = model.logits(&tokens).unwrap();
        // One file, then several, then one again.
        for (max_file_bytes, files) in [(usize::MAX, 1), (30_000, 2), (usize::MAX, 1)] {
            let how = FolderConfig { max_file_bytes, ..FolderConfig::default() };
            save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
            let again = load(out.path(), &VarMap::new(), DType::F32);
            assert_eq!(gap(&again.logits(&tokens).unwrap(), &logits), 0.0, "{name}");
            let names = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name());
            let count = names.filter(|name| name.to_string_lossy().ends_with(".safetensors")).count();
            assert!(if files == 1 { count == 1 } else { count > 1 }, "{name}: {count} files");
        }
        let how = FolderConfig { dtype: Some(DType::BF16), ..FolderConfig::default() };
        save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
        let halves = load(out.path(), &VarMap::new(), DType::F32);
        let found = gap(&halves.logits(&tokens).unwrap(), &logits);
        assert!(
            found < 0.5 && halves.config().json().values().any(|value| value == "bfloat16"),
            "{name}: {found}"
        );
    }
}

#[test]
fn every_dtype_computes() {
    for dtype in [DType::F64, DType::BF16, DType::F16] {
        let vars = VarMap::new();
        let model = load(&folder("qwen3"), &vars, dtype);
        let expected = Expected::of("qwen3");
        let tokens = expected.get("tokens");
        let logits = model.logits(tokens).unwrap();
        let most = if dtype == DType::F64 { 1e-4 } else { 0.5 };
        let found = gap(&logits, expected.get("logits"));
        assert!(logits.dtype() == dtype && found < most, "{dtype:?}: {found}");
        let grads = model.loss(tokens, tokens).unwrap().backward().unwrap();
        assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some_and(|grad| grad.dtype() == dtype)));
    }
}

#[test]
fn all_misfits_are_listed_at_once() {
    let spoilt = copy("qwen2");
    let path = spoilt.path().join("model.safetensors");
    let mut tensors: HashMap<String, Tensor> = load_tensors(&path, &Device::Cpu).unwrap();
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    tensors.remove("model.norm.weight");
    tensors.remove("model.layers.1.self_attn.q_proj.bias");
    tensors.insert("model.layers.2.mlp.up_proj.weight".into(), zeros(&[2]));
    tensors.insert("lm_head.weight".into(), zeros(&[32, 96]));
    let whole = Tensor::zeros(32, DType::U32, &Device::Cpu).unwrap();
    tensors.insert("model.layers.0.input_layernorm.weight".into(), whole);
    save_tensors(&path, &tensors).unwrap();
    let Err(Error::Tensors { misfits, .. }) = Weights::folder(spoilt.path()) else { panic!("it was taken") };
    assert_eq!(misfits.missing, ["model.layers.1.self_attn.q_proj.bias", "model.norm.weight"]);
    assert_eq!(misfits.surplus, ["model.layers.2.mlp.up_proj.weight"]);
    assert_eq!(misfits.misshapen, [("lm_head.weight".to_string(), vec![32, 96], vec![96, 32])]);
    assert_eq!(
        misfits.unreadable,
        [("model.layers.0.input_layernorm.weight".to_string(), "U32".to_string())]
    );
    let line = refused(spoilt.path());
    assert!(line.contains("missing model.layers.1") && line.contains("should be of [96, 32]"), "{line}");
}

#[test]
fn folders_that_are_not_whole_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    assert!(refused(empty.path()).contains("config.json"));
    fs::copy(folder("llama").join("config.json"), empty.path().join("config.json")).unwrap();
    assert!(refused(empty.path()).contains("model.safetensors.index.json"));

    let damaged = copy("llama");
    let shard = damaged.path().join("model-00002-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 7]).unwrap();
    assert!(refused(damaged.path()).contains("model-00002-of-00002.safetensors: no whole safetensors file"));
    fs::remove_file(&shard).unwrap();
    assert!(refused(damaged.path()).contains("cannot read"));
    fs::write(&shard, &bytes).unwrap();
    let index = damaged.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("\"model.norm.weight\"", "\"model.norm.scale\"")).unwrap();
    assert!(refused(damaged.path()).contains("missing model.norm.scale"));
    fs::write(&index, text.replace("model-00002-of-00002.safetensors", "../secret")).unwrap();
    assert!(refused(damaged.path()).contains("no file of this folder"));
    fs::write(&index, "{").unwrap();
    assert!(refused(damaged.path()).contains("index.json"));
}

/// A folder with a tied embedding and another head was trained with a separate head, whatever its configuration says.
#[test]
fn a_head_beside_a_tied_embedding_must_be_the_same() {
    let folder = copy("llama-tied");
    let file = folder.path().join("model.safetensors");
    let mut tensors = load_tensors(&file, &Device::Cpu).unwrap();
    let embedding = tensors["model.embed_tokens.weight"].clone();
    for (head, is_right) in [(embedding.clone(), true), ((embedding * 1.5).unwrap(), false)] {
        tensors.insert("lm_head.weight".into(), head);
        save_tensors(&file, &tensors).unwrap();
        match is_right {
            true => assert!(Weights::folder(folder.path()).is_ok()),
            false => assert!(refused(folder.path()).contains("set tie_word_embeddings to false")),
        }
    }
}

/// GPT-2 as it was first published: names without the `transformer.` prefix, and with mask buffers.
#[test]
fn older_files_of_gpt2_are_read() {
    let old = copy("gpt2");
    let path = old.path().join("model.safetensors");
    let tensors = load_tensors(&path, &Device::Cpu).unwrap();
    let mut tensors: HashMap<String, Tensor> = tensors
        .into_iter()
        .map(|(name, tensor)| (name.strip_prefix("transformer.").unwrap_or(&name).to_string(), tensor))
        .collect();
    tensors.insert("h.0.attn.bias".into(), Tensor::ones((1, 1, 64, 64), DType::U8, &Device::Cpu).unwrap());
    save_tensors(&path, &tensors).unwrap();
    let expected = Expected::of("gpt2");
    let logits = load(old.path(), &VarMap::new(), DType::F32).logits(expected.get("tokens")).unwrap();
    assert!(gap(&logits, expected.get("logits")) < 1e-5);
}

#[test]
fn fingerprints_are_of_the_numbers() {
    let (one, other) = (copy("gpt2"), copy("gpt2"));
    let of = |path: &Path| Weights::folder(path).unwrap().fingerprint().unwrap();
    assert_eq!(of(one.path()), of(other.path()));
    let path = other.path().join("model.safetensors");
    let mut tensors = load_tensors(&path, &Device::Cpu).unwrap();
    let (name, tensor) = tensors.iter().next().map(|(name, tensor)| (name.clone(), tensor.clone())).unwrap();
    // The last number of one tensor.
    let mut numbers: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    *numbers.last_mut().unwrap() += 1.0;
    tensors.insert(name, Tensor::from_vec(numbers, tensor.shape(), &Device::Cpu).unwrap());
    save_tensors(&path, &tensors).unwrap();
    assert_ne!(of(one.path()), of(other.path()));
    // The work can be shared.
    for ranks in 1..5 {
        let weights = Weights::folder(one.path()).unwrap();
        let parts: Vec<_> = (0..ranks).map(|rank| weights.hashes(rank, ranks).unwrap()).collect();
        let all = parts.iter().map(Vec::len).sum();
        let all: Vec<_> = (0..all).map(|piece| parts[piece % ranks][piece / ranks].clone()).collect();
        assert_eq!(weights.fingerprint_of(&all), of(one.path()), "{ranks}");
    }
}

#[test]
fn the_tokenizer_goes_with_the_model() {
    let (from, out) = (copy("llama"), tempfile::tempdir().unwrap());
    fs::write(from.path().join("tokenizer.json"), "{}").unwrap();
    fs::write(from.path().join("notes.txt"), "mine").unwrap();
    let vars = VarMap::new();
    let model = load(from.path(), &vars, DType::F32);
    let how = FolderConfig { tokenizer_of: Some(from.path().into()), ..FolderConfig::default() };
    save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
    assert_eq!(fs::read_to_string(out.path().join("tokenizer.json")).unwrap(), "{}");
    assert!(!out.path().join("notes.txt").exists());
}

#[test]
fn a_writer_takes_each_tensor_once() {
    let out = tempfile::tempdir().unwrap();
    let config = ModelConfig::from_folder(&folder("llama")).unwrap();
    let begin = || FolderWriter::begin(out.path(), &config, DType::F32, &FolderConfig::default()).unwrap();
    let tensor = Tensor::ones(32, DType::F32, &Device::Cpu).unwrap();
    let mut writer = begin();
    let mut line =
        |name: &str, tensor: &Tensor| writer.write(name, tensor).map_err(|error| error.to_string());
    assert_eq!(line("model.norm.weight", &tensor), Ok(()));
    assert!(line("model.norm.weight", &tensor).unwrap_err().contains("before"));
    assert!(line("model.norm.bias", &tensor).unwrap_err().contains("none of the model's"));
    assert!(line("lm_head.weight", &tensor).unwrap_err().contains("should be of [96, 32]"));
    assert!(begin().finish().unwrap_err().to_string().contains("not written: lm_head.weight"));
    assert!(!out.path().join("model.safetensors").exists() && !out.path().join("config.json").exists());
}

/// A program that loads the folder would apply adapters to the model. Other files may be the user's: they stay.
#[test]
fn adapters_do_not_stay_beside_a_model() {
    let (from, out) = (copy("llama"), tempfile::tempdir().unwrap());
    fs::write(from.path().join("tokenizer.json"), "{}").unwrap();
    let stale =
        ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "generation_config.json"];
    let write = || stale.iter().for_each(|name| fs::write(out.path().join(name), "old").unwrap());
    let left = || stale.iter().filter(|name| out.path().join(name).exists()).count();
    write();
    let vars = VarMap::new();
    let model = load(from.path(), &vars, DType::F32);
    let how = FolderConfig { tokenizer_of: Some(from.path().into()), ..FolderConfig::default() };
    save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
    assert_eq!(left(), 2, "not the adapters");
}

#[test]
fn further_chat_templates_go_with_the_tokenizer() {
    let (from, out) = (copy("llama"), tempfile::tempdir().unwrap());
    let write = |folder: &Path, name: &str| {
        let folder = folder.join("additional_chat_templates");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), "template").unwrap();
    };
    write(from.path(), "tool_use.jinja");
    write(out.path(), "rag.jinja");
    let is_there = |name: &str| out.path().join("additional_chat_templates").join(name).exists();
    let vars = VarMap::new();
    let model = load(from.path(), &vars, DType::F32);
    let how = FolderConfig { tokenizer_of: Some(from.path().into()), ..FolderConfig::default() };
    save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
    assert!(is_there("tool_use.jinja") && is_there("rag.jinja"));
    // Only those that were written there for another model go with it.
    let written = WrittenFiles::begin(out.path(), Some(from.path()), None, true).unwrap();
    save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
    assert_eq!(written.finish().unwrap(), ["additional_chat_templates/rag.jinja"]);
    WrittenFiles::begin(out.path(), None, None, true).unwrap();
    assert!(!is_there("tool_use.jinja") && is_there("rag.jinja"));
}

/// Otherwise a template for conversations with tools that is not its own would be taken for them.
#[test]
fn a_template_of_its_own_is_saved_without_those_of_the_folder() {
    let (from, out, adapters) = (copy("llama"), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let more = "additional_chat_templates/tool_use.jinja";
    fs::create_dir(from.path().join("additional_chat_templates")).unwrap();
    fs::write(from.path().join("chat_template.jinja"), "the model's").unwrap();
    fs::write(from.path().join(more), "the model's, with tools").unwrap();
    let chosen = |named| NamedTemplate::chosen(named, Some(adapters.path())).unwrap();
    assert_eq!(chosen(None), None);
    fs::write(adapters.path().join("tokenizer_config.json"), r#"{"chat_template": "the adapters'"}"#)
        .unwrap();
    assert_eq!(chosen(Some(&NamedTemplate::ChatMl)), Some(NamedTemplate::ChatMl));
    let template = chosen(None);
    let vars = VarMap::new();
    let model = load(from.path(), &vars, DType::F32);
    let save = |template: &Option<NamedTemplate>| {
        let (tokenizer_of, template) = (Some(from.path().into()), template.clone());
        let written = WrittenFiles::begin(out.path(), Some(from.path()), template.as_ref(), true).unwrap();
        let how = FolderConfig { tokenizer_of, template, ..FolderConfig::default() };
        save_folder(out.path(), model.config(), &named_vars(&vars), &how).unwrap();
        assert!(written.finish().unwrap().is_empty());
        ["chat_template.jinja", more].map(|name| fs::read_to_string(out.path().join(name)).ok())
    };
    let some = |text: &str| Some(text.to_string());
    assert_eq!(save(&None), [some("the model's"), some("the model's, with tools")]);
    assert_eq!(save(&template), [some("the adapters'"), None]);
    // Adapters may have both.
    fs::create_dir(adapters.path().join("additional_chat_templates")).unwrap();
    fs::write(adapters.path().join("chat_template.jinja"), "a file").unwrap();
    fs::write(adapters.path().join(more), "with tools").unwrap();
    assert_eq!(save(&template), [some("a file"), some("with tools")]);
}

#[test]
fn sizes_whose_product_is_too_large_are_refused() {
    let folder = copy("llama");
    let path = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for name in ["num_attention_heads", "num_key_value_heads", "head_dim"] {
        json[name] = 2_147_483_648u64.into();
    }
    fs::write(&path, json.to_string()).unwrap();
    assert!(ModelConfig::from_folder(folder.path()).unwrap_err().to_string().contains("head_dim"));
}
