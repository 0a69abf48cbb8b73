//! Tensor parallelism, alone and with FSDP, data parallelism and pipelines.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::common::{Expected, FOLDERS, Trainer, assert_losses, folder, gap};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarMap;
use comm::{Communicator, Local, Mesh};
use fsdp::{Fsdp, FsdpConfig};
use models::{CausalLm, FolderConfig, FolderWriter, GenerateConfig, Weights, generate};
use ops::cross_entropy;
use pipeline::{Modules, Pipeline, PipelineConfig, Split};
use strategy::DistributedModel;
use tensor_parallel::{Shards, TensorParallel, TensorParallelConfig, Weights as Parts};
use training::build::Builder;

type Comm = Arc<dyn Communicator>;

fn weights(name: &str) -> Weights {
    Weights::folder(&folder(name)).unwrap()
}

fn wrapped<T>(result: tensor_parallel::Result<T>) -> Result<T> {
    result.map_err(candle_core::Error::wrap)
}

/// Trains on a mesh of so many replicas, each divided over two ranks; returns the losses of the first rank of each
/// replica.
fn train(name: &str, copies: usize) -> Vec<Vec<f32>> {
    let (weights, expected, out) = (weights(name), Expected::of(name), tempfile::tempdir().unwrap());
    let body = |comm: Comm| -> Result<(Vec<f32>, Tensor)> {
        let first = comm.rank() == 0;
        let mesh = Mesh::new(comm, &[("dp", copies), ("tp", 2)])?;
        let batches = expected.batches(mesh.axis("dp")?.rank(), copies);
        let parts = Parts::from(weights.parts());
        let build = |shards| Ok(CausalLm::new(weights.config(), &Builder::from(shards))?);
        let parallel = wrapped(TensorParallel::new(&mesh, &TensorParallelConfig::default(), &parts, build))?;
        let found = gap(&parallel.model()?.logits(expected.get("tokens"))?, expected.get("logits"));
        assert!(found < 1e-5, "{name}: {found} off");
        let config = GenerateConfig { max_new_tokens: 24, ..GenerateConfig::default() };
        let numbers =
            |tensor: &str| expected.get(tensor).to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>();
        let text = generate(parallel.model()?, &numbers("prompt")?, &config, |_| ControlFlow::Continue(()));
        assert_eq!(text.unwrap(), numbers("greedy")?, "{name}");
        let mut trainer = Trainer::new(parallel.named_vars(), |name| weights.shapes()[name].len() > 1);
        let mut losses = Vec::new();
        for [tokens, targets] in batches {
            let loss = parallel.model()?.loss(&tokens, &targets)?;
            let mut grads = wrapped(parallel.backward(&loss))?;
            wrapped(parallel.clip_grad_norm(&mut grads, 1.0))?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        let begin =
            || FolderWriter::begin(out.path(), weights.config(), DType::F32, &FolderConfig::default());
        let mut writer = if first { Some(begin().unwrap()) } else { None };
        wrapped(parallel.visit_full(|name, tensor| match &mut writer {
            Some(writer) => writer.write(name, &tensor).map_err(candle_core::Error::wrap),
            None => Ok(()),
        }))?;
        writer.map(FolderWriter::finish).transpose().unwrap();
        Ok((losses, parallel.model()?.logits(expected.get("tokens"))?))
    };
    let ranks = Local::run_shared(2 * copies, |comm| Ok(body(comm)?)).unwrap();
    let saved = Weights::folder(out.path()).unwrap();
    let builder = Builder::new(saved.tensors(DType::F32, &Device::Cpu));
    let alone = CausalLm::new(saved.config(), &builder).unwrap().logits(expected.get("tokens")).unwrap();
    assert!(gap(&alone, &ranks[0].1) < 1e-5, "{name}");
    ranks.into_iter().step_by(2).map(|(losses, _)| losses).collect()
}

#[test]
fn divided_layers_train_as_one_process() {
    for name in FOLDERS {
        assert_losses(&train(name, 1)[0], &Expected::of(name).losses(), name);
    }
}

#[test]
fn copies_of_divided_layers_train_as_one_process() {
    for name in ["llama-tied", "qwen2-moe", "qwen3", "qwen3-moe", "gpt2"] {
        let losses = train(name, 2);
        let mean: Vec<f32> = losses[0].iter().zip(&losses[1]).map(|(a, b)| (a + b) / 2.0).collect();
        assert_losses(&mean, &Expected::of(name).losses(), name);
    }
}

#[test]
fn stages_of_divided_layers_train_as_one_process() {
    for name in ["llama-tied", "qwen2-moe", "qwen3", "qwen3-moe", "gpt2"] {
        let (weights, expected) = (weights(name), Expected::of(name));
        let body = |comm: Comm| -> Result<Vec<f32>> {
            let mesh = Mesh::new(comm, &[("pp", 2), ("tp", 2)])?;
            let parts = Parts::from(weights.parts());
            let shards = wrapped(Shards::new(&mesh, &TensorParallelConfig::default(), &parts))?;
            let (model, layers) = (weights.config().clone(), shards.layers());
            let second = format!("{}.1", if name == "gpt2" { "transformer.h" } else { "model.layers" });
            let modules = Modules::of_units(move |builder| {
                CausalLm::new(&model, &builder.clone().with_layers(layers.clone()))
            })?;
            let config = PipelineConfig {
                micro_batches: 2,
                split: Split::at([second.as_str()]),
                tied: weights.config().ties(),
                tp: Some(mesh.axis("tp")?.clone()),
                ..PipelineConfig::default()
            };
            let builder = |map: &VarMap| shards.var_builder(map);
            let batches = expected.batches(0, 1);
            let (pp, example) = (mesh.axis("pp")?.clone(), batches[0][0].narrow(0, 0, 2)?);
            let of_logits = |logits: &Tensor, targets: &Tensor| {
                cross_entropy(&logits.reshape(((), 96))?, &targets.flatten_all()?, None)
            };
            let pipeline = Pipeline::new(pp, &modules, &builder, &example, of_logits, &config);
            let mut pipeline = pipeline.map_err(candle_core::Error::wrap)?;
            pipeline.set_divided(|name| shards.divided(name));
            let is_matrix = |name: &str| name == "lm_head.weight" || weights.shapes()[name].len() > 1;
            let mut trainer = Trainer::new(pipeline.named_vars(), is_matrix);
            let mut losses = Vec::new();
            for [tokens, targets] in batches {
                let step = pipeline.step(Some(&tokens), Some(&targets));
                let mut step = step.map_err(candle_core::Error::wrap)?;
                wrapped(shards.sum_gradients(&pipeline.named_vars(), &mut step.grads))?;
                pipeline.clip_grad_norm(&mut step.grads, 1.0).map_err(candle_core::Error::wrap)?;
                trainer.step(&step.grads)?;
                losses.extend(step.loss);
            }
            Ok(losses)
        };
        let losses = Local::run_shared(4, |comm| Ok(body(comm)?)).unwrap();
        assert!(losses[0].is_empty() && losses[1].is_empty());
        assert_losses(&losses[2], &expected.losses(), name);
        assert_eq!(losses[2], losses[3], "{name}");
    }
}

#[test]
fn shards_of_divided_layers_train_as_one_process() {
    for name in FOLDERS {
        let (weights, expected) = (weights(name), Expected::of(name));
        let body = |comm: Comm| -> Result<Vec<f32>> {
            let mesh = Mesh::new(comm, &[("shard", 2), ("tp", 2)])?;
            let (shard, tp) = (mesh.axis("shard")?.clone(), mesh.axis("tp")?.clone());
            let batches = expected.batches(shard.rank(), 2);
            let parts = Parts::from(weights.parts());
            let shards = wrapped(Shards::new(&mesh, &TensorParallelConfig::default(), &parts))?;
            // The sharded model shards these parts further.
            let vars = VarMap::new();
            let build =
                |units| CausalLm::new(weights.config(), &Builder::from(units).with_layers(shards.layers()));
            let mut fsdp = Fsdp::new(shard, shards.var_builder(&vars), &FsdpConfig::default(), build)?;
            vars.data().lock().unwrap().clear();
            let (is_first, divided) = (tp.rank() == 0, shards.clone());
            fsdp.set_norm_over(vec![tp], move |name| is_first || divided.divided(name).is_some());
            let mut trainer = Trainer::new(fsdp.named_vars(), |name| weights.shapes()[name].len() > 1);
            let mut losses = Vec::new();
            for [tokens, targets] in batches {
                let loss = fsdp.model()?.loss(&tokens, &targets)?;
                let mut grads = fsdp.backward(&loss)?;
                wrapped(shards.sum_gradients(&fsdp.named_vars(), &mut grads))?;
                fsdp.clip_grad_norm(&mut grads, 1.0)?;
                trainer.step(&grads)?;
                losses.push(loss.to_scalar::<f32>()?);
            }
            Ok(losses)
        };
        let losses = Local::run_shared(4, |comm| Ok(body(comm)?)).unwrap();
        let mean: Vec<f32> = losses[0].iter().zip(&losses[2]).map(|(a, b)| (a + b) / 2.0).collect();
        assert_losses(&mean, &expected.losses(), name);
    }
}

#[test]
fn targets_that_do_not_count_are_left_out_of_divided_losses() {
    let weights = weights("llama");
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let alone = CausalLm::new(weights.config(), &builder).unwrap();
    let tokens = Tensor::new(&[[1i64, 2, 3, 4]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[[2i64, -100, 4, -100]], &Device::Cpu).unwrap();
    let expected = alone.loss(&tokens, &targets).unwrap();
    let body = |comm: Comm| -> Result<Tensor> {
        let mesh = Mesh::new(comm, &[("tp", 2)])?;
        let parts = Parts::from(weights.parts());
        let build = |shards| Ok(CausalLm::new(weights.config(), &Builder::from(shards))?);
        let parallel = wrapped(TensorParallel::new(&mesh, &TensorParallelConfig::default(), &parts, build))?;
        parallel.model()?.loss(&tokens, &targets)
    };
    let losses = Local::run_shared(2, |comm| Ok(body(comm)?)).unwrap();
    assert!(losses.iter().all(|loss| gap(loss, &expected) < 1e-5));
}

/// With a model in bf16, and with targets that are all ignored.
#[test]
fn divided_losses_are_f32_and_nan_where_nothing_counts() {
    let weights = weights("llama");
    let tokens = Tensor::new(&[[1i64, 2, 3, 4]], &Device::Cpu).unwrap();
    let body = |comm: Comm| -> Result<[f32; 2]> {
        let mesh = Mesh::new(comm, &[("tp", 2)])?;
        let parts = Parts::from(weights.parts());
        let config = TensorParallelConfig { dtype: DType::BF16, ..TensorParallelConfig::default() };
        let build = |shards| Ok(CausalLm::new(weights.config(), &Builder::from(shards))?);
        let parallel = wrapped(TensorParallel::new(&mesh, &config, &parts, build))?;
        let loss = |targets: [[i64; 4]; 1]| {
            parallel.model()?.loss(&tokens, &Tensor::new(&targets, &Device::Cpu)?)?.to_scalar::<f32>()
        };
        Ok([loss([[2, 3, 4, 5]])?, loss([[-100; 4]])?])
    };
    for [some, none] in Local::run_shared(2, |comm| Ok(body(comm)?)).unwrap() {
        assert!(some.is_finite() && none.is_nan(), "{some}, {none}");
    }
}

#[test]
fn heads_that_the_ranks_do_not_divide_are_named() {
    let weights = weights("llama");
    let build = |ranks: usize, sequence_parallel: bool| {
        let body = |comm: Comm| -> Result<()> {
            let mesh = Mesh::new(comm, &[("tp", ranks)])?;
            let parts = Parts::from(weights.parts());
            let build = |shards| Ok(CausalLm::new(weights.config(), &Builder::from(shards))?);
            let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
            wrapped(TensorParallel::new(&mesh, &config, &parts, build)).map(drop)
        };
        Local::run_shared(ranks, |comm| Ok(body(comm)?)).map(drop).unwrap_err().to_string()
    };
    assert!(
        build(4, false).contains(": 2 cannot be divided over 4 tensor-parallel ranks (tp=4 of a layout)")
    );
    assert!(build(2, true).contains("sequence_parallel"));
}
