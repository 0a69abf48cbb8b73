//! Reading weights: from a model folder, each rank only reads the parts of parameters that it keeps.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use girandole::checkpoint::CheckpointReader;
use girandole::comm::{Communicator, Local};
use girandole::models::{CausalLm, FolderConfig, Lora, LoraConfig, ModelConfig, Weights, save_folder};
use girandole::training::build::Builder;
use girandole::training::{Checkpoint, CheckpointConfig, Checkpoints, named_vars};
use girandole::{DistributedModel, Layout, Parallel, ParallelConfig};
use tempfile::TempDir;

fn llama(tied: bool) -> ModelConfig {
    let json = format!(
        r#"{{"model_type": "qwen3", "head_dim": 16, "vocab_size": 1001, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 16,
             "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": {tied}, "rope_theta": 10000.0}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

fn gpt2() -> ModelConfig {
    let json = r#"{"model_type": "gpt2", "vocab_size": 1001, "n_embd": 128, "n_inner": 512, "n_layer": 4, "n_head": 8, "n_positions": 16,
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0}"#;
    ModelConfig::from_json(json).unwrap()
}

/// Writes a folder with random weights, in several files.
fn folder(config: &ModelConfig, dtype: DType) -> TempDir {
    let (dir, vars, weights) =
        (tempfile::tempdir().unwrap(), VarMap::new(), Weights::random(config, 3).unwrap());
    CausalLm::new(config, &Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu))).unwrap();
    let how = FolderConfig { dtype: Some(dtype), max_file_bytes: 500_000, ..FolderConfig::default() };
    save_folder(dir.path(), config, &named_vars(&vars), &how).unwrap();
    dir
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Returns the bytes that this thread has read from files so far.
#[cfg(target_os = "linux")]
fn bytes_read() -> usize {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
    line.parse().unwrap()
}

#[cfg(not(target_os = "linux"))]
fn bytes_read() -> usize {
    0
}

/// Builds a model, compares it with the folder's weights, and returns how many bytes each rank reads.
fn read(dir: &TempDir, layout: &str, dtype: DType, lora: bool) -> Vec<usize> {
    let layout: Layout = layout.parse().unwrap();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let weights = Weights::folder(dir.path()).unwrap();
        let config = weights.config().clone();
        let lora =
            lora.then(|| Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &config).unwrap());
        let settings = ParallelConfig {
            dtype,
            example: Some(Tensor::zeros((2, 8), DType::U32, &Device::Cpu)?),
            is_trained: lora.is_some().then(|| Arc::new(Lora::is_adapter) as _),
            ..ParallelConfig::default()
        };
        let build = move |builder: &Builder| match &lora {
            Some(lora) => CausalLm::new(&config, &lora.adapt(builder.clone())),
            None => CausalLm::new(&config, builder),
        };
        let before = bytes_read();
        let parallel = Parallel::new(comm, &layout, weights.parts(), &settings, build)?;
        let read = bytes_read() - before;
        let whole = weights.tensors(dtype, &Device::Cpu);
        for piece in parallel.pieces()? {
            let region = &piece.region;
            let all = numbers(&whole.get(region.dims.as_slice(), &piece.name)?);
            let own: Vec<f64> =
                region.runs.within(region.window.clone()).flat_map(|range| &all[range]).copied().collect();
            let got = numbers(piece.var.as_tensor());
            assert!(
                got[..own.len()] == own && got[own.len()..].iter().all(|x| *x == 0.0),
                "{layout}: {}",
                piece.name
            );
        }
        Ok(read)
    });
    ranks.unwrap()
}

/// Returns the size of a folder's weights in bytes.
fn size(config: &ModelConfig, dtype: DType) -> usize {
    let shapes = Weights::random(config, 0).unwrap().shapes().clone();
    shapes.values().map(|dims| dims.iter().product::<usize>()).sum::<usize>() * dtype.size_in_bytes()
}

#[test]
fn sharded_ranks_read_the_folder_once() {
    for (config, saved, dtype) in [
        (llama(false), DType::F32, DType::F32),
        (llama(true), DType::BF16, DType::F32),
        (llama(true), DType::F16, DType::BF16),
        (gpt2(), DType::F32, DType::F64),
    ] {
        let (dir, all) = (folder(&config, saved), size(&config, saved));
        // With the number of times that the ranks together hold the model.
        for (layout, times) in
            [("shard=2", 1), ("shard=3", 1), ("tp=2", 1), ("shard=2,tp=2", 1), ("dp=2,shard=2", 2)]
        {
            let ranks = read(&dir, layout, dtype, false);
            if cfg!(target_os = "linux") {
                // Some elements of each parameter are read by all ranks.
                let (sum, most) = (ranks.iter().sum::<usize>(), all * times / ranks.len());
                assert!(sum >= all * times && sum < all * times * 106 / 100, "{layout}: {ranks:?} of {all}");
                assert!(ranks.iter().all(|read| *read < most * 110 / 100), "{layout}: {ranks:?} of {all}");
            }
        }
        read(&dir, "pp=2,shard=2", dtype, false);
        read(&dir, "pp=2,tp=2", dtype, false);
    }
}

#[test]
fn what_adapters_are_put_on_is_read_once_as_well() {
    for config in [llama(true), gpt2()] {
        let (dir, all) = (folder(&config, DType::BF16), size(&config, DType::BF16));
        let ranks = read(&dir, "shard=2", DType::F32, true);
        let sum: usize = ranks.iter().sum();
        assert!(
            cfg!(not(target_os = "linux")) || (sum >= all && sum < all * 106 / 100),
            "{ranks:?} of {all}"
        );
    }
}

/// A rank whose columns are far apart reads only these, and not the data in between.
#[test]
fn a_checkpoint_is_read_by_ranges() {
    let json = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 20000, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
    let (config, dir) = (ModelConfig::from_json(json).unwrap(), tempfile::tempdir().unwrap());
    let all = size(&config, DType::F32);
    let checkpoints = || Checkpoints::open(CheckpointConfig { dir: dir.path().into(), keep: 1 }).unwrap();
    let model = |comm: Arc<dyn Communicator>, layout: &str, seed: u64| {
        let (weights, own) = (Weights::random(&config, seed).unwrap(), config.clone());
        let build = move |builder: &Builder| CausalLm::new(&own, builder);
        Parallel::new(comm, &layout.parse()?, weights.parts(), &ParallelConfig::default(), build)
    };
    Local::run_shared(1, |comm| {
        Ok(model(comm, "", 5)?.save_checkpoint(&checkpoints(), None, &Checkpoint::default()).map(drop)?)
    })
    .unwrap();
    for layout in ["tp=4", "shard=4", "shard=2,tp=2"] {
        let ranks = Local::run_shared(4, |comm| {
            let (parallel, contents) = (model(comm, layout, 6)?, checkpoints().latest().unwrap().unwrap());
            let (mut saved, before) = (CheckpointReader::open(&contents)?, bytes_read());
            for piece in parallel.pieces()? {
                assert_eq!(saved.read(&piece.name, &piece.region)?.elem_count(), piece.region.len());
            }
            Ok(bytes_read() - before)
        });
        let ranks = ranks.unwrap();
        let is_little = ranks.iter().all(|read| *read < all / 4 * 104 / 100);
        assert!(cfg!(not(target_os = "linux")) || is_little, "{layout}: {ranks:?} of {all}");
    }
}
