//! `Mesh { pp, dp, tp }`: a language model with pipeline, data and tensor parallelism combined gives the results of
//! one process.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, Optimizer, VarMap, func};
use comm::{Local, Mesh};
use pipeline::{Cost, Modules, ParameterGroups, Pipeline, PipelineConfig, ScheduleKind, Split};
use sampler::Generator;
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, DistributedModel, LanguageModel, LanguageModelConfig,
    ParallelTransformerLayer, Shards, TensorParallel, TensorParallelConfig, TransformerLayerConfig,
    VocabParallelEmbedding, Weights, norm, vocab_parallel_cross_entropy,
};
use training::{Sgd, SgdConfig, clip_grad_norm};

const STEPS: usize = 4;
const LENGTH: usize = 6;
/// Rows per micro-batch.
const ROWS: usize = 2;
const MICRO_BATCHES: usize = 4;
/// Less than the gradient norms of all steps, so that every step is clipped.
const MAX_NORM: f64 = 0.2;

/// Returns the model's sizes; the ranks may or may not divide the vocabulary.
fn sizes(vocab_size: usize) -> LanguageModelConfig {
    LanguageModelConfig {
        vocab_size,
        d_model: 8,
        num_heads: 4,
        num_layers: 3,
        max_len: LENGTH,
        ..LanguageModelConfig::default()
    }
}

fn config(sequence_parallel: bool) -> TensorParallelConfig {
    TensorParallelConfig { sequence_parallel, dtype: DType::F64, ..TensorParallelConfig::default() }
}

fn sgd(vars: Vec<(String, Var)>) -> Sgd {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
    Sgd::named(vars, config).unwrap()
}

/// Returns the tokens of a step, and the tokens that follow them.
fn batch(step: usize, rows: usize, vocab_size: usize) -> Result<(Tensor, Tensor)> {
    let mut generator = Generator::new(100 + step as u64);
    let tokens = generator.randint(rows * (LENGTH + 1), 0, vocab_size as i64).unwrap();
    let tokens = Tensor::from_vec(tokens, (rows, LENGTH + 1), &Device::Cpu)?.to_dtype(DType::U32)?;
    Ok((tokens.narrow(1, 0, LENGTH)?.contiguous()?, tokens.narrow(1, 1, LENGTH)?.contiguous()?))
}

/// Trains one process on whole batches; returns its losses and gradient norms, and saves its weights to the file.
fn alone(vocab_size: usize, copies: usize, path: &Path) -> Vec<(f64, f64)> {
    let losses = Local::run_shared(1, |comm| {
        let mesh = Mesh::new(comm, &[("tp", 1)])?;
        let model = |builder| LanguageModel::new(builder, &sizes(vocab_size));
        let parallel = TensorParallel::new(&mesh, &config(false), &Weights::seed(3), model)?;
        let mut sgd = sgd(parallel.named_vars());
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (tokens, next) = batch(step, ROWS * MICRO_BATCHES * copies, vocab_size)?;
            let loss = parallel.model()?.loss(&tokens, &next)?;
            let mut grads = loss.backward()?;
            let norm = clip_grad_norm(&mut grads, &parallel.vars(), MAX_NORM).unwrap();
            sgd.step(&grads)?;
            losses.push((loss.to_scalar::<f64>()?, norm));
        }
        parallel.save_full(path)?;
        Ok(losses)
    });
    losses.unwrap().remove(0)
}

/// Returns each rank's parts of those weights in a group of `tp` ranks, by name.
fn parts(vocab_size: usize, path: &Path, tp: usize) -> Vec<Vec<(String, Vec<f64>)>> {
    let parts = Local::run_shared(tp, |comm| {
        let mesh = Mesh::new(comm, &[("tp", tp)])?;
        let model = |builder| LanguageModel::new(builder, &sizes(vocab_size));
        let parallel = TensorParallel::new(&mesh, &config(false), &Weights::File(path.into()), model)?;
        Ok(values(&parallel.named_vars()))
    });
    parts.unwrap()
}

fn values(vars: &[(String, Var)]) -> Vec<(String, Vec<f64>)> {
    let value = |var: &Var| var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let mut all: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), value(var))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Returns the same model as modules.
fn modules(shards: &Shards, sizes: LanguageModelConfig) -> Modules {
    let LanguageModelConfig { vocab_size, d_model, num_heads, num_layers, max_len, mask, dropout, .. } =
        sizes;
    let layer = TransformerLayerConfig { d_model, num_heads, d_ff: 4 * d_model, mask, dropout };
    let of = || shards.clone();
    let (first, second, third, fourth) = (of(), of(), of(), of());
    let list = Modules::new()
        .module("embedding", move |vb| Ok(VocabParallelEmbedding::new(vocab_size, d_model, &first.of(vb))?))
        .module("position", move |vb| {
            let (builder, init) = (second.of(vb), Init::Randn { mean: 0.0, stdev: 1.0 });
            let table = builder.get_between((max_len, d_model), "weight", init)?;
            let place = if builder.context().sequence_parallel() { builder.context().rank() } else { 0 };
            Ok(func(move |x: &Tensor| x.broadcast_add(&table.narrow(0, place * x.dim(1)?, x.dim(1)?)?)))
        });
    let list = (0..num_layers).fold(list, |list, place| {
        let (layer, shards) = (layer.clone(), of());
        list.module(&format!("layers.{place}"), move |vb| {
            Ok(ParallelTransformerLayer::new(&layer, &shards.of(vb))?)
        })
    });
    list.module("norm", move |vb| Ok(norm(d_model, &third.of(vb))?)).module("head", move |vb| {
        let head = ColumnConfig { bias: false, uneven: true, ..ColumnConfig::default() };
        Ok(ColumnParallelLinear::new(d_model, vocab_size, &head, &fourth.of(vb))?)
    })
}

/// Result of a rank.
struct Learnt {
    copy: usize,
    place: usize,
    weights: Vec<(String, Vec<f64>)>,
    losses: Vec<f32>,
    norms: Vec<f64>,
}

fn on_mesh(
    vocab_size: usize,
    axes: [(&str, usize); 3],
    schedule: ScheduleKind,
    split: &Split,
    sequence_parallel: bool,
) -> Vec<Learnt> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let learnt = Local::run_shared(ranks, |comm| {
        let mesh = Mesh::new(comm, &axes)?;
        let shards = Shards::new(&mesh, &config(sequence_parallel), &Weights::seed(3))?;
        let (copies, tp) = (mesh.axis("dp")?.clone(), mesh.axis("tp")?.clone());
        let (copy, place, count) = (copies.rank(), tp.rank(), copies.world_size());
        let config = PipelineConfig {
            schedule,
            micro_batches: MICRO_BATCHES,
            split: split.clone(),
            averaged_over: Some(ParameterGroups::of(copies)),
            tp: Some(tp),
            ..PipelineConfig::default()
        };
        let context = shards.context().clone();
        let loss =
            move |logits: &Tensor, next: &Tensor| Ok(vocab_parallel_cross_entropy(logits, next, &context)?);
        let builder = |map: &VarMap| shards.var_builder(map);
        let example = Tensor::zeros((ROWS, LENGTH), DType::U32, &Device::Cpu)?;
        let stages = mesh.axis("pp")?.clone();
        let mut pipeline =
            Pipeline::new(stages, &modules(&shards, sizes(vocab_size)), &builder, &example, loss, &config)?;
        pipeline.set_divided(|name| shards.divided(name));
        let mut sgd = sgd(pipeline.named_vars());
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let rows = ROWS * MICRO_BATCHES;
            let (tokens, next) = batch(step, rows * count, vocab_size)?;
            let own = |all: &Tensor| all.narrow(0, copy * rows, rows);
            let mut step = pipeline.step(Some(&own(&tokens)?), Some(&own(&next)?))?;
            shards.sum_gradients(&pipeline.named_vars(), &mut step.grads)?;
            norms.push(pipeline.clip_grad_norm(&mut step.grads, MAX_NORM)?);
            sgd.step(&step.grads)?;
            losses.extend(step.loss);
        }
        pipeline.check_parameters()?;
        Ok(Learnt { copy, place, weights: values(&pipeline.named_vars()), losses, norms })
    });
    learnt.unwrap()
}

/// Otherwise each replicated variable would be counted once per rank.
#[test]
fn what_is_divided_must_be_said_before_anything_is_clipped() {
    let lines = Local::run_shared(2, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 1), ("tp", 2)])?;
        let shards = Shards::new(&mesh, &config(false), &Weights::seed(3))?;
        let tp = Some(mesh.axis("tp")?.clone());
        let config = PipelineConfig { tp, ..PipelineConfig::default() };
        let context = shards.context().clone();
        let loss =
            move |logits: &Tensor, next: &Tensor| Ok(vocab_parallel_cross_entropy(logits, next, &context)?);
        let builder = |map: &VarMap| shards.var_builder(map);
        let example = Tensor::zeros((ROWS, LENGTH), DType::U32, &Device::Cpu)?;
        let (stages, modules) = (mesh.axis("pp")?.clone(), modules(&shards, sizes(12)));
        let mut pipeline = Pipeline::new(stages, &modules, &builder, &example, loss, &config)?;
        let (tokens, next) = batch(0, ROWS, 12)?;
        let mut grads = pipeline.step(Some(&tokens), Some(&next))?.grads;
        let refused = [
            pipeline.clip_grad_norm(&mut grads, 1.0).map(drop).unwrap_err().to_string(),
            pipeline.check_parameters().unwrap_err().to_string(),
        ];
        pipeline.set_divided(|name| shards.divided(name));
        pipeline.clip_grad_norm(&mut grads, 1.0)?;
        // Clipping by each rank's own norm makes replicated parameters differ, which is detected.
        let mut sgd = sgd(pipeline.named_vars());
        clip_grad_norm(&mut grads, &pipeline.vars(), 0.01).unwrap();
        sgd.step(&grads)?;
        let differ = pipeline.check_parameters().unwrap_err().to_string();
        assert!(differ.contains("is not the same on every rank"), "{differ}");
        Ok(refused)
    });
    for line in lines.unwrap().into_iter().flatten() {
        assert!(line.contains("call `pipeline.set_divided(|name| shards.divided(name))`"), "{line}");
    }
}

#[test]
fn stages_copies_and_divided_layers_learn_what_one_process_learns() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let by_time = Split::Balanced(Cost::ForwardTime);
    for (vocab_size, pp, dp, tp, schedule, split, sequence_parallel) in [
        (12, 2, 1, 2, ScheduleKind::OneFOneB, Split::default(), false),
        (13, 2, 2, 2, ScheduleKind::GPipe, Split::at(["layers.1"]), true),
        (12, 3, 1, 2, ScheduleKind::ZbH1, by_time.clone(), true),
        (12, 2, 2, 2, ScheduleKind::ZbV, by_time, false),
        (14, 2, 1, 4, ScheduleKind::Interleaved, Split::default(), false),
    ] {
        let what = format!(
            "{pp} stages, {dp} copies, {tp} parts, {schedule}, sequence parallel: {sequence_parallel}"
        );
        // f64 throughout, so that only the order of sums differs.
        let expected_losses = alone(vocab_size, dp, &path);
        let expected = parts(vocab_size, &path, tp);
        let learnt =
            on_mesh(vocab_size, [("pp", pp), ("dp", dp), ("tp", tp)], schedule, &split, sequence_parallel);
        for copy in 0..dp {
            for (place, expected) in expected.iter().enumerate() {
                let own = || learnt.iter().filter(|rank| (rank.copy, rank.place) == (copy, place));
                let mut got: Vec<_> = own().flat_map(|rank| rank.weights.clone()).collect();
                got.sort_by(|a, b| a.0.cmp(&b.0));
                assert_eq!(got.len(), expected.len(), "{what}");
                for ((name, got), (other, expected)) in got.iter().zip(expected) {
                    assert_eq!(name, other);
                    let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(got.len() == expected.len() && gap < 1e-10, "{what}, {name}: {gap}");
                }
            }
        }
        assert!(
            expected_losses.iter().all(|(_, norm)| *norm > MAX_NORM),
            "nothing is clipped: {expected_losses:?}"
        );
        for (step, (expected, norm)) in expected_losses.iter().enumerate() {
            for rank in &learnt {
                assert_eq!(rank.norms, learnt[0].norms, "to the bit: {what}");
                assert!((rank.norms[step] - norm).abs() < 1e-10, "{what}: {} for {norm}", rank.norms[step]);
            }
            let own: Vec<f32> = learnt.iter().filter_map(|rank| rank.losses.get(step).copied()).collect();
            assert_eq!(own.len(), dp * tp, "{what}");
            let mean = own.iter().sum::<f32>() / own.len() as f32;
            assert!((f64::from(mean) - expected).abs() < 1e-5, "{what}, step {step}: {mean}, {expected}");
        }
    }
}
