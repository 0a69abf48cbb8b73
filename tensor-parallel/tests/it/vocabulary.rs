//! A vocabulary that is not divisible by the number of ranks: everything equals a single process, and nothing is padded.

use std::path::Path;

use crate::common::{Dense, Part, batch, bits, copied, gap, gradients, on_mesh, values, whole};
use candle_core::{DType, Device, Module, Tensor, Var, safetensors};
use candle_nn::Optimizer;
use ops::cross_entropy;
use sampler::Generator;
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, DistributedModel, LanguageModel, LanguageModelConfig, Result,
    TensorParallel, TensorParallelConfig, VocabParallelEmbedding, Weights, vocab_parallel_cross_entropy,
};
use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, OptimizerState, clip_grad_norm};
use training::{Sgd, SgdConfig};

const STEPS: usize = 8;
const SEED: u64 = 13;
const MAX_NORM: f64 = 1.0;

fn sizes(vocab_size: usize) -> LanguageModelConfig {
    LanguageModelConfig { vocab_size, ..crate::common::sizes() }
}

fn config(sequence_parallel: bool) -> TensorParallelConfig {
    TensorParallelConfig { sequence_parallel, dtype: DType::F64, ..TensorParallelConfig::default() }
}

fn sgd(vars: Vec<(String, Var)>) -> Sgd {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
    Sgd::named(vars, config).unwrap()
}

/// Vocabulary size, `dp`, `tp`.
const CASES: [(usize, usize, usize); 6] =
    [(25, 1, 2), (23, 1, 4), (26, 1, 4), (5, 1, 4), (24, 1, 2), (25, 2, 2)];

#[test]
fn training_is_that_of_one_process() {
    for (vocab_size, dp, tp) in CASES {
        let sizes = sizes(vocab_size);
        let dense = Dense::new(&sizes, SEED, DType::F64);
        let (names, mut optimizer) = (dense.named_vars(), sgd(dense.named_vars()));
        let vars: Vec<Var> = names.into_iter().map(|(_, var)| var).collect();
        let mut expected = vec![];
        for step in 0..STEPS {
            let loss = dense.loss(step, dp);
            let mut grads = loss.backward().unwrap();
            let gradients = dense.gradients(&grads);
            let norm = clip_grad_norm(&mut grads, &vars, MAX_NORM).unwrap();
            optimizer.step(&grads).unwrap();
            expected.push((loss.to_scalar::<f64>().unwrap(), norm, gradients));
        }
        let logits = dense.logits(&batch(&sizes, 0, 0).0).unwrap();
        for sequence_parallel in [false, true] {
            let what = format!("{vocab_size} tokens, {dp} x {tp}, sequence parallel {sequence_parallel}");
            let ranks = on_mesh(dp, tp, |mesh| {
                let model = |builder| LanguageModel::new(builder, &sizes);
                let parallel =
                    TensorParallel::new(mesh, &config(sequence_parallel), &Weights::seed(SEED), model)?;
                let mut optimizer = sgd(parallel.named_vars());
                let mut seen = vec![];
                for step in 0..STEPS {
                    let (tokens, next) = batch(&sizes, step, mesh.axis("dp")?.rank());
                    let loss = parallel.model()?.loss(&tokens, &next)?;
                    let mut grads = parallel.backward(&loss)?;
                    let own = gradients(&parallel, &grads);
                    let norm = parallel.clip_grad_norm(&mut grads, MAX_NORM)?;
                    optimizer.step(&grads)?;
                    seen.push((loss.to_scalar::<f64>()?, norm, own));
                }
                parallel.check_parameters()?;
                let logits = copied(&parallel.model()?.logits(&batch(&sizes, 0, 0).0)?);
                Ok((seen, logits, values(&parallel)))
            });
            for (step, (loss, norm, of_step)) in expected.iter().enumerate() {
                let mean = (0..dp).map(|copy| ranks[copy * tp].0[step].0).sum::<f64>() / dp as f64;
                assert!((mean - loss).abs() < 1e-9, "{what}: loss of step {step}: {mean}, {loss}");
                for copy in ranks.chunks(tp) {
                    assert!(copy.iter().all(|rank| (rank.0[step].1 - norm).abs() < 1e-9), "{what}: norms");
                    let parts: Vec<Vec<Part>> = copy.iter().map(|rank| rank.0[step].2.clone()).collect();
                    for (name, tensor) in whole(&parts) {
                        // The gradient of the bias of keys is zero except for rounding.
                        let error =
                            if name.ends_with("qkv.bias") { 0.0 } else { gap(&tensor, &of_step[&name]) };
                        assert!(error < 1e-9, "{what}: gradient of {name}: {error:.1e}");
                    }
                }
            }
            for copy in ranks.chunks(tp) {
                let parts: Vec<Vec<Part>> = copy.iter().map(|rank| rank.2.clone()).collect();
                for (name, tensor) in whole(&parts) {
                    assert!(gap(&tensor, &dense.values()[&name]) < 1e-9, "{what}: {name}");
                }
                for rank in copy {
                    // The logits have one column per token, without padding.
                    assert!(gap(&rank.1, &logits) < 1e-9, "{what}: logits");
                }
            }
        }
    }
}

#[test]
fn shares_differ_by_one_token_at_most_and_are_as_before_where_ranks_divide() {
    for (vocab_size, expected) in
        [(24, [6, 6, 6, 6]), (25, [7, 6, 6, 6]), (26, [7, 7, 6, 6]), (5, [2, 1, 1, 1]), (4, [1, 1, 1, 1])]
    {
        let rows = on_mesh(1, 4, |mesh| {
            let model = |builder| LanguageModel::new(builder, &sizes(vocab_size));
            let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(SEED), model)?;
            let of = |name: &str| {
                let found = parallel.parameters().iter().find(|p| p.name() == name).unwrap();
                assert_eq!(found.dims(), [vocab_size, 16]);
                found.var().dim(0).unwrap()
            };
            assert_eq!(of("embedding.weight"), of("head.weight"));
            Ok(of("head.weight"))
        });
        assert_eq!(rows, expected);
    }
}

/// Values of a rank, and its optimizer state.
type Kept = (Vec<Part>, Vec<Part>);

fn open(folder: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: folder.into(), ..CheckpointConfig::default() }).unwrap()
}

#[test]
fn files_are_those_of_one_process_and_checkpoints_go_to_any_layout() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = sizes(23);
    let dense = Dense::new(&sizes, SEED, DType::F64).values();
    let path = folder.path().join("dense.safetensors");
    safetensors::save(&dense.clone().into_iter().collect(), &path).unwrap();
    let model = |builder: tensor_parallel::ShardBuilder| LanguageModel::new(builder, &sizes);
    Weights::File(path.clone()).check(&config(false), model).unwrap();
    // The optimizer state (`exp_avg`) of each parameter.
    let state = |adam: &Adam, parallel: &TensorParallel<LanguageModel>| -> Vec<Part> {
        let all: std::collections::HashMap<_, _> = adam.state().unwrap().into_iter().collect();
        let part = |p: &tensor_parallel::Parameter| {
            (p.name().to_string(), all[&format!("{}.exp_avg", p.name())].clone(), p.split())
        };
        parallel.parameters().iter().map(part).collect()
    };
    for (dp, tp) in [(1, 1), (1, 2), (2, 2), (1, 4)] {
        let saved = folder.path().join("saved.safetensors");
        let checkpoints = folder.path().join(format!("{dp}x{tp}"));
        let written = on_mesh(dp, tp, |mesh| {
            let parallel = TensorParallel::new(mesh, &config(false), &Weights::File(path.clone()), model)?;
            parallel.save_full(&saved)?;
            let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default())?;
            let (tokens, next) = batch(&sizes, 0, mesh.axis("dp")?.rank());
            adam.step(&parallel.backward(&parallel.model()?.loss(&tokens, &next)?)?)?;
            parallel.save_checkpoint(&open(&checkpoints), Some(&adam), &Checkpoint::default())?;
            Ok((values(&parallel), state(&adam, &parallel)))
        });
        let file = safetensors::load(&saved, &Device::Cpu).unwrap();
        assert_eq!(file.len(), dense.len());
        for (name, tensor) in &dense {
            assert_eq!((file[name].dims(), bits(&file[name])), (tensor.dims(), bits(tensor)), "{name}");
        }
        let parts = |ranks: &[Kept]| {
            let of = |which: fn(&Kept) -> &Vec<Part>| {
                whole(&ranks.iter().map(|rank| which(rank).clone()).collect::<Vec<_>>())
            };
            [of(|rank| &rank.0), of(|rank| &rank.1)]
        };
        let expected = parts(&written[..tp]);
        for (other_dp, other_tp) in [(1, 1), (1, 2), (2, 2), (1, 4)] {
            let read = on_mesh(other_dp, other_tp, |mesh| {
                let mut parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(1), model)?;
                let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default())?;
                parallel.load_checkpoint(&open(&checkpoints).latest()?.unwrap(), Some(&mut adam))?;
                Ok((values(&parallel), state(&adam, &parallel)))
            });
            for copy in read.chunks(other_tp) {
                for (found, expected) in parts(copy).iter().zip(&expected) {
                    for (name, tensor) in found {
                        assert!(bits(tensor) == bits(&expected[name]), "{name}: {tp} to {other_tp} ranks");
                    }
                }
            }
        }
    }
}

/// The first rank's part of the large table is written in pieces, and the other parts are sent in pieces.
#[test]
fn large_tables_are_saved_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.safetensors");
    let parts = on_mesh(1, 3, |mesh| {
        let make = |builder| VocabParallelEmbedding::new(1201, 700, &builder);
        let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(5), make)?;
        parallel.save_full(&path)?;
        Ok(values(&parallel))
    });
    let saved = safetensors::load(&path, &Device::Cpu).unwrap();
    assert!(bits(&saved["weight"]) == bits(&whole(&parts)["weight"]));
}

fn random(shape: &[usize], seed: u64) -> Tensor {
    let numbers = Generator::new(seed).randn(shape.iter().product()).unwrap();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()
}

/// Ranks may have any numbers of classes.
#[test]
fn cross_entropy_takes_any_parts() {
    for widths in [[4, 3, 3], [1, 8, 1], [5, 5, 0]] {
        let logits = random(&[2, 3, 10], 4);
        let targets = Tensor::new(&[[0u32, 3, 4], [8, 9, 5]], &Device::Cpu).unwrap();
        let all = Var::from_tensor(&logits).unwrap();
        let expected = cross_entropy(&all, &targets, None).unwrap();
        let gradient = expected.backward().unwrap().get(&all).unwrap().clone();
        let found = on_mesh(1, 3, |mesh| {
            let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(0), |_| Ok(()))?;
            let rank = parallel.context().rank();
            let own = logits.narrow(2, widths[..rank].iter().sum(), widths[rank])?.contiguous()?;
            let own = Var::from_tensor(&own)?;
            let loss = vocab_parallel_cross_entropy(&own, &targets, parallel.context())?;
            let beyond = Tensor::new(&[[0u32, 3, 10], [8, 9, 5]], &Device::Cpu)?;
            let line =
                vocab_parallel_cross_entropy(&own, &beyond, parallel.context()).unwrap_err().to_string();
            assert_eq!(line, "targets: got 10 in row 2; there are 10 classes");
            let grads = loss.backward()?;
            Ok((copied(&loss), copied(grads.get(&own).unwrap())))
        });
        let parts: Vec<&Tensor> =
            found.iter().map(|rank| &rank.1).filter(|part| part.elem_count() > 0).collect();
        assert!(gap(&Tensor::cat(&parts, 2).unwrap(), &gradient) < 1e-12, "{widths:?}");
        assert!(found.iter().all(|(loss, _)| gap(loss, &expected) < 1e-12), "{widths:?}");
    }
}

#[test]
fn uneven_outputs_are_gathered_whole() {
    let uneven = ColumnConfig { gather_output: true, uneven: true, ..ColumnConfig::default() };
    let x = random(&[2, 3, 4], 9);
    let factors = random(&[7], 2);
    let run = |tp: usize| -> Vec<(Tensor, Tensor)> {
        on_mesh(1, tp, |mesh| {
            let layer = |builder| ColumnParallelLinear::new(4, 7, &uneven, &builder);
            let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(3), layer)?;
            let x = Var::from_tensor(&x)?;
            let y = Module::forward(parallel.model()?, &x)?;
            let grads = parallel.backward(&y.sqr()?.broadcast_mul(&factors)?.sum_all()?)?;
            Ok((copied(&y), copied(grads.get(&x).unwrap())))
        })
    };
    let alone = run(1).remove(0);
    for tp in [2, 3, 4, 7] {
        for (y, of_x) in run(tp) {
            assert!(gap(&y, &alone.0) < 1e-12 && gap(&of_x, &alone.1) < 1e-12, "{tp} ranks");
        }
    }
    // Layers without `uneven` still require a divisible size.
    let line = on_mesh(1, 2, |mesh| {
        let layer = |builder| ColumnParallelLinear::new(4, 7, &ColumnConfig::default(), &builder);
        let made: Result<_> = TensorParallel::new(mesh, &config(false), &Weights::seed(3), layer);
        Ok(made.map(drop).unwrap_err().to_string())
    });
    assert!(line[0].starts_with("the rows of weight: 7 cannot be divided"), "{line:?}");
}

#[test]
fn a_token_beyond_the_vocabulary_is_refused() {
    let lines = on_mesh(1, 2, |mesh| {
        let make = |builder| VocabParallelEmbedding::new(25, 4, &builder);
        let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(5), make)?;
        let tokens = Tensor::new(&[[24u32, 25]], &Device::Cpu)?;
        Ok(parallel.model()?.forward(&tokens).unwrap_err().to_string())
    });
    assert_eq!(lines, vec!["tokens: got 25 at place 1; the vocabulary has the tokens 0 to 24"; 2]);
}
