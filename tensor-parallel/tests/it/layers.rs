//! Each layer compared with a single process; memory; dropout.

use crate::common::{batch, bits, copied, gap, on_mesh, sizes, values, whole};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use ops::{cross_entropy, linear};
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, LanguageModel, LanguageModelConfig, RowConfig, RowParallelLinear,
    Split, TensorParallel, TensorParallelConfig, Weights, vocab_parallel_cross_entropy,
};
use training::{Adam, AdamConfig, OptimizerState, TorchInit};

fn random(shape: &[usize], seed: u64) -> Tensor {
    let numbers = Generator::new(seed).randn(shape.iter().product()).unwrap();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()
}

fn config() -> TensorParallelConfig {
    TensorParallelConfig { dtype: DType::F64, ..TensorParallelConfig::default() }
}

fn dense(inputs: usize, outputs: usize) -> (ops::Linear, VarMap) {
    let vars = VarMap::new();
    let generator = SharedGenerator::from(Generator::new(3));
    let builder: VarBuilder<'_> = TorchInit::var_builder(&generator, &vars, DType::F64, &Device::Cpu);
    (linear(inputs, outputs, builder).unwrap(), vars)
}

/// The output, and the gradients of the input, weight and bias, whole.
type Found = (Tensor, Tensor, Tensor, Tensor);

fn check_linear(
    (tp, outputs): (usize, usize),
    make: impl Fn(tensor_parallel::ShardBuilder) -> tensor_parallel::Result<Box<Forward>> + Sync,
) {
    let (layer, vars) = dense(12, outputs);
    // Each output has a different weight in the loss.
    let factors = random(&[outputs], 7);
    let loss = |y: &Tensor| y.sqr()?.broadcast_mul(&factors)?.sum_all();
    let x = Var::from_tensor(&random(&[2, 5, 12], 1)).unwrap();
    let y = layer.forward(&x).unwrap();
    let grads = loss(&y).unwrap().backward().unwrap();
    let var = |name: &str| vars.data().lock().unwrap()[name].clone();
    let gradient = |var: &Var| grads.get(var).unwrap().clone();
    let expected: Found = (y, gradient(&x), gradient(&var("weight")), gradient(&var("bias")));
    let ranks = on_mesh(1, tp, |mesh| {
        let parallel = TensorParallel::new(mesh, &config(), &Weights::seed(3), &make)?;
        let x = Var::from_tensor(&random(&[2, 5, 12], 1))?;
        let y = (parallel.model()?)(&x)?;
        let grads = parallel.backward(&loss(&y)?)?;
        Ok((copied(&y), copied(grads.get(&x).unwrap()), crate::common::gradients(&parallel, &grads)))
    });
    let parts: Vec<_> = ranks.iter().map(|rank| rank.2.clone()).collect();
    let parts = whole(&parts);
    for (y, of_x, _) in &ranks {
        assert!(gap(y, &expected.0) < 1e-12 && gap(of_x, &expected.1) < 1e-12);
    }
    assert!(gap(&parts["weight"], &expected.2) < 1e-12 && gap(&parts["bias"], &expected.3) < 1e-12);
}

type Forward = dyn Fn(&Tensor) -> tensor_parallel::Result<Tensor> + Send + Sync;

#[test]
fn a_column_layer_whose_output_is_gathered_is_a_linear_layer() {
    let gathered = ColumnConfig { gather_output: true, ..ColumnConfig::default() };
    for tp in [1, 2, 4] {
        check_linear((tp, 8), |builder| {
            let layer = ColumnParallelLinear::new(12, 8, &gathered, &builder)?;
            Ok(Box::new(move |x: &Tensor| layer.forward(x)))
        });
    }
}

#[test]
fn gathered_groups_are_one_after_the_other() {
    for tp in 1..=4 {
        for groups in 2..=3 {
            let gathered = ColumnConfig { gather_output: true, groups, ..ColumnConfig::default() };
            check_linear((tp, 72), |builder| {
                let layer = ColumnParallelLinear::new(12, 72, &gathered, &builder)?;
                Ok(Box::new(move |x: &Tensor| layer.forward(x)))
            });
        }
    }
}

#[test]
fn a_row_layer_whose_input_is_divided_here_is_a_linear_layer() {
    let whole = RowConfig { input_is_divided: false, ..RowConfig::default() };
    for tp in [1, 2, 4] {
        check_linear((tp, 8), |builder| {
            let layer = RowParallelLinear::new(12, 8, &whole, &builder)?;
            Ok(Box::new(move |x: &Tensor| layer.forward(x)))
        });
    }
}

#[test]
fn cross_entropy_of_divided_logits_is_that_of_whole_ones() {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6)] {
        for scale in [1.0, 300.0] {
            let logits = (random(&[3, 4, 12], 5) * scale).unwrap().to_dtype(dtype).unwrap();
            let targets =
                Tensor::from_vec(Generator::new(2).randint(12, 0, 12).unwrap(), (3, 4), &Device::Cpu);
            let targets = targets.unwrap();
            let all = Var::from_tensor(&logits).unwrap();
            let expected = cross_entropy(&all, &targets, None).unwrap();
            let gradient = expected.affine(3.0, 0.0).unwrap().backward().unwrap();
            for tp in [1, 2, 4] {
                let found = on_mesh(1, tp, |mesh| {
                    let parallel = TensorParallel::new(mesh, &config(), &Weights::seed(0), |_| Ok(()))?;
                    let context = parallel.context();
                    let own = logits.narrow(2, context.rank() * 12 / tp, 12 / tp)?;
                    let own = Var::from_tensor(&own.contiguous()?)?;
                    let loss = vocab_parallel_cross_entropy(&own, &targets, context)?;
                    let gradient = loss.affine(3.0, 0.0)?.backward()?;
                    Ok((copied(&loss), copied(gradient.get(&own).unwrap())))
                });
                let parts: Vec<&Tensor> = found.iter().map(|rank| &rank.1).collect();
                assert!(gap(&Tensor::cat(&parts, 2).unwrap(), gradient.get(&all).unwrap()) < tolerance);
                for (loss, _) in &found {
                    assert!(gap(loss, &expected) < tolerance);
                    assert_eq!(bits(loss), bits(&found[0].0), "the same on every rank");
                }
            }
        }
    }
}

#[test]
fn each_rank_has_its_share_of_the_memory() {
    let bytes = |tensors: Vec<Tensor>| -> usize {
        tensors.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
    };
    for sequence_parallel in [false, true] {
        for tp in [1, 2, 4] {
            for (weights, optimizer, expected) in on_mesh(1, tp, |mesh| {
                let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
                let model = |builder| LanguageModel::new(builder, &sizes());
                let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), model)?;
                let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default()).unwrap();
                let (tokens, next) = batch(&sizes(), 0, 0);
                adam.step(&parallel.backward(&parallel.model()?.loss(&tokens, &next)?)?)?;
                let share = |p: &tensor_parallel::Parameter| {
                    let all: usize = p.dims().iter().product();
                    4 * if p.split() == Split::Whole { all } else { all / tp }
                };
                let expected: usize = parallel.parameters().iter().map(share).sum();
                let state = adam.state().unwrap().into_iter();
                let state = state.filter(|(name, _)| !name.ends_with(".step")).map(|(_, tensor)| tensor);
                let weights = parallel.vars().iter().map(|var| var.as_tensor().clone()).collect();
                Ok((bytes(weights), bytes(state.collect()), expected))
            }) {
                assert_eq!((weights, optimizer), (expected, 2 * expected));
            }
        }
    }
}

/// Returns the losses and the final values of training with dropout.
fn with_dropout(
    tp: usize,
    sequence_parallel: bool,
    from_step: u64,
) -> (Vec<f64>, Vec<Vec<crate::common::Part>>) {
    let sizes = LanguageModelConfig { dropout: 0.3, ..sizes() };
    let ranks = on_mesh(1, tp, |mesh| {
        let config = TensorParallelConfig { sequence_parallel, ..config() };
        let model = |builder| LanguageModel::new(builder, &sizes);
        let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), model)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default()).unwrap();
        let mut losses = vec![];
        for step in from_step..from_step + 5 {
            parallel.begin_step(step);
            let (tokens, next) = batch(&sizes, 0, 0);
            let loss = parallel.model()?.loss(&tokens, &next)?;
            losses.push(loss.to_scalar::<f64>()?);
            adam.step(&parallel.backward(&loss)?)?;
        }
        Ok((losses, values(&parallel)))
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0));
    let (losses, values): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    (losses[0].clone(), values)
}

#[test]
fn dropout_keeps_what_every_rank_has_equal() {
    let (alone, _) = with_dropout(1, false, 0);
    for tp in [2, 4] {
        for sequence_parallel in [false, true] {
            let (losses, values) = with_dropout(tp, sequence_parallel, 0);
            // `whole` checks that replicated parameters are bitwise equal.
            whole(&values);
            let as_alone = losses.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-9);
            assert_eq!(as_alone, !sequence_parallel, "masks are one process's where activations are whole");
        }
    }
    assert_ne!(with_dropout(2, true, 1).0, with_dropout(2, true, 0).0, "each step has masks of its own");
    assert_eq!(with_dropout(2, true, 1).0, with_dropout(2, true, 1).0);
}

#[test]
fn half_types_train_and_stay_equal() {
    for dtype in [DType::BF16, DType::F16] {
        for sequence_parallel in [false, true] {
            let ranks = on_mesh(1, 2, |mesh| {
                let config = TensorParallelConfig { sequence_parallel, dtype, ..config() };
                let model = |builder| LanguageModel::new(builder, &sizes());
                let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), model)?;
                let config = AdamConfig { learning_rate: 0.01, eps: 1e-4, ..AdamConfig::default() };
                let mut adam = Adam::named(parallel.named_vars(), config).unwrap();
                let (tokens, next) = batch(&sizes(), 0, 0);
                let mut losses = vec![];
                for _ in 0..10 {
                    let loss = parallel.model()?.loss(&tokens, &next)?;
                    losses.push(loss.to_dtype(DType::F64)?.to_scalar::<f64>()?);
                    adam.step(&parallel.backward(&loss)?)?;
                }
                Ok((losses, values(&parallel)))
            });
            let (losses, values): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
            assert_eq!(losses[0], losses[1]);
            assert!(losses[0][9] < losses[0][0] - 0.5, "{dtype:?}: {:?}", losses[0]);
            whole(&values);
        }
    }
}

/// A weight that two layers and an operation of candle use: its gradient is the sum of all, averaged once.
#[test]
fn a_shared_weight_is_averaged_once() {
    let gradients = |dp: usize| {
        on_mesh(dp, 1, |mesh| {
            let (layer, weight, parallel) = {
                let parallel = TensorParallel::new(mesh, &config(), &Weights::seed(3), |builder| {
                    let no_bias = ColumnConfig { bias: false, ..ColumnConfig::default() };
                    let layer = ColumnParallelLinear::new(600, 600, &no_bias, &builder)?;
                    let init = candle_nn::Init::Const(0.0);
                    Ok((layer, builder.get((600, 600), "weight", init, Split::ROWS)?))
                })?;
                (parallel.model()?.0.clone(), parallel.model()?.1.clone(), parallel)
            };
            let of = |rank: usize| random(&[2, 600], rank as u64);
            let mut sums = vec![];
            // A single process has the inputs of both ranks.
            let ranks: Vec<usize> = if dp == 1 { vec![0, 1] } else { vec![mesh.world().rank()] };
            for rank in ranks {
                let x = of(rank);
                let y = (layer.forward(&layer.forward(&x)?)? + x.matmul(&weight.t()?)?)?;
                sums.push(y.sqr()?.sum_all()?);
            }
            let loss = Tensor::stack(&sums, 0)?.mean_all()?;
            let grads = parallel.backward(&loss)?;
            Ok(copied(grads.get(&parallel.vars()[0]).unwrap()))
        })
    };
    let (alone, both) = (gradients(1), gradients(2));
    assert!(bits(&both[0]) == bits(&both[1]));
    assert!(gap(&both[0], &alone[0]) < 1e-12, "{}", gap(&both[0], &alone[0]));
}
