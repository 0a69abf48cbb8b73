//! Errors for wrong input: one clear error on every rank.

use crate::common::sizes;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, Optimizer, SGD};
use comm::{Local, LocalConfig, Mesh};
use ops::{Linear, RmsNorm};
use std::sync::Arc;
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, LanguageModel, LanguageModelConfig, ParallelMlp, Result, RowConfig,
    RowParallelLinear, ShardBuilder, Split, TensorParallel, TensorParallelConfig, VocabParallelEmbedding,
    Weights, norm, vocab_parallel_cross_entropy,
};
use training::build::{Builder, Division, LinearConfig};
use training::{AuditConfig, OnMissingGradient};

/// Returns the error messages of all ranks, each of which must fail.
fn messages(ranks: usize, body: impl Fn(Mesh, usize) -> Result<()> + Sync) -> Vec<String> {
    let group = Local::group(ranks, &LocalConfig::default()).unwrap();
    let one = |comm: Local| {
        let mesh = Mesh::new(Arc::new(comm), &[("tp", ranks)]).unwrap();
        let rank = mesh.world().rank();
        body(mesh, rank).unwrap_err().to_string()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| one(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn build(mesh: &Mesh, sizes: &LanguageModelConfig, seed: u64) -> Result<TensorParallel<LanguageModel>> {
    let model = |builder: ShardBuilder| LanguageModel::new(builder, sizes);
    TensorParallel::new(mesh, &TensorParallelConfig::default(), &Weights::seed(seed), model)
}

#[test]
fn sizes_that_the_ranks_do_not_divide() {
    let cases: [(LanguageModelConfig, usize, &str); 5] = [
        (
            LanguageModelConfig { num_heads: 2, ..sizes() },
            4,
            "the heads of attention: 2 cannot be divided into 4 equal",
        ),
        (LanguageModelConfig { num_heads: 3, d_model: 15, ..sizes() }, 2, "the heads of attention: 3 cannot"),
        (
            LanguageModelConfig { d_model: 18, ..sizes() },
            2,
            "d_model: got 18; give a multiple of the 4 heads",
        ),
        (
            LanguageModelConfig { vocab_size: 3, ..sizes() },
            4,
            "the rows of embedding.weight: got 3; give one at least for each of the 4 tensor-parallel ranks",
        ),
        (
            LanguageModelConfig { d_ff: 42, ..sizes() },
            4,
            "the rows of layers.0.feed_forward.fc1.weight: 42 cannot",
        ),
    ];
    for (sizes, ranks, part) in &cases {
        for message in messages(*ranks, |mesh, _| build(&mesh, sizes, 1).map(drop)) {
            assert!(message.starts_with(part), "{message}");
        }
    }
}

#[test]
fn ranks_that_build_different_models() {
    let other = LanguageModelConfig { d_ff: 48, ..sizes() };
    let found = messages(3, |mesh, rank| {
        let sizes = LanguageModelConfig { num_heads: 3, d_model: 12, vocab_size: 24, d_ff: 36, ..sizes() };
        let other = LanguageModelConfig { d_ff: 48, ..sizes.clone() };
        build(&mesh, if rank == 1 { &other } else { &sizes }, 1).map(drop)
    });
    for message in &found {
        assert!(
            message.contains("rank 1 has parameter layers.0.feed_forward.fc1.weight [48, 12]"),
            "{message}"
        );
        assert!(
            message.contains("rank 0 has parameter layers.0.feed_forward.fc1.weight [36, 12]"),
            "{message}"
        );
    }
    let found = messages(2, |mesh, rank| {
        let sequence_parallel = rank == 0;
        let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
        let model = |builder: ShardBuilder| LanguageModel::new(builder, &other);
        TensorParallel::new(&mesh, &config, &Weights::seed(1), model).map(drop)
    });
    assert!(found.iter().all(|message| message.contains("sequence_parallel: false")), "{found:?}");
    // The same shapes, but different weights.
    for message in messages(2, |mesh, rank| build(&mesh, &sizes(), rank as u64).map(drop)) {
        assert!(message.contains("rank 1 has other values of parameter position.weight"), "{message}");
        assert!(message.contains("the same weights (seed or file)"), "{message}");
    }
}

#[test]
fn a_rank_that_cannot_build_its_part() {
    let found = messages(3, |mesh, rank| {
        let sizes = LanguageModelConfig {
            num_heads: 3,
            d_model: 12,
            d_ff: if rank == 2 { 37 } else { 36 },
            ..sizes()
        };
        build(&mesh, &sizes, 1).map(drop)
    });
    assert!(found[2].starts_with("the rows of layers.0.feed_forward.fc1.weight: 37"), "{found:?}");
    let others =
        "rank 2 could not build its part of the model: the rows of layers.0.feed_forward.fc1.weight: 37";
    assert!(found[..2].iter().all(|message| message.starts_with(others)), "{found:?}");
}

#[test]
fn tokens_and_targets_that_there_are_not() {
    let zeros = || Tensor::zeros((1, 4), DType::I64, &Device::Cpu).unwrap();
    let other = |token: i64| Tensor::new(&[[0, token, 0, 0]], &Device::Cpu).unwrap();
    let long = || Tensor::zeros((1, 14), DType::I64, &Device::Cpu).unwrap();
    let cases = [
        (other(24), zeros(), "tokens: got 24 at place 1; the vocabulary has the tokens 0 to 23"),
        (other(-1), zeros(), "tokens: got -1 at place 1"),
        (zeros(), other(24), "targets: got 24 in row 1; there are 24 classes"),
        (zeros(), long(), "targets: got the shape [1, 14]; the logits need [1, 4]"),
        (long(), long(), "tokens: got rows of 14; give at most 13"),
    ];
    for (tokens, next, part) in &cases {
        for message in messages(2, |mesh, _| build(&mesh, &sizes(), 1)?.model()?.loss(tokens, next).map(drop))
        {
            assert!(message.starts_with(part), "{message}");
        }
    }
    let found = messages(2, |mesh, _| {
        let config = TensorParallelConfig { sequence_parallel: true, ..TensorParallelConfig::default() };
        let model = |builder: ShardBuilder| LanguageModel::new(builder, &sizes());
        let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), model)?;
        let tokens = Tensor::zeros((1, 5), DType::I64, &Device::Cpu)?;
        parallel.model()?.loss(&tokens, &tokens).map(drop)
    });
    let part = "with sequence parallelism, the length of a sequence: 5 cannot be divided into 2";
    assert!(found.iter().all(|message| message.starts_with(part)), "{found:?}");
}

/// Candle's backward instead of the model's own: refused if ranks would have to combine gradients, otherwise accepted.
#[test]
fn backward_on_the_loss_itself_says_what_to_call() {
    for (dp, tp, sequence_parallel, is_refused) in [
        (2, 1, false, true),
        (2, 2, false, true),
        (2, 2, true, true),
        (1, 2, true, true),
        (1, 2, false, false),
        (1, 1, true, false),
    ] {
        let found = crate::common::on_mesh(dp, tp, |mesh| {
            let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
            let model = |builder: ShardBuilder| LanguageModel::new(builder, &sizes());
            let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), model)?;
            let (tokens, next) = crate::common::batch(&sizes(), 0, mesh.axis("dp")?.rank());
            let loss = parallel.model()?.loss(&tokens, &next)?;
            let line = |error: candle_core::Error| tensor_parallel::Error::from(error).to_string();
            let before = crate::common::values(&parallel);
            let mut sgd = SGD::new(parallel.vars(), 0.1)?;
            let refused = [loss.backward().map(drop).map_err(line), sgd.backward_step(&loss).map_err(line)];
            if is_refused {
                for ((name, before, _), (_, after, _)) in before.iter().zip(crate::common::values(&parallel))
                {
                    assert_eq!(crate::common::bits(before), crate::common::bits(&after), "{name}");
                }
            }
            // The model's own backward still works, even of the same loss.
            parallel.backward(&loss)?;
            Ok(refused)
        });
        for line in found.into_iter().flatten() {
            match line {
                Ok(()) => assert!(!is_refused),
                Err(line) => {
                    assert!(is_refused && line.contains("call `parallel.backward(&loss)`"), "{line}")
                }
            }
        }
    }
}

/// Each parallel layer alone, with an ordinary loss.
#[test]
fn every_layer_refuses_a_backward_that_is_not_the_models() {
    let refused = |layer: &(dyn Fn(&ShardBuilder, &Tensor) -> Result<Tensor> + Sync)| {
        let lines = crate::common::on_mesh(2, 2, |mesh| {
            let config = TensorParallelConfig::default();
            let x = Tensor::ones((1, 4), DType::F32, &Device::Cpu)?;
            let output = |builder: ShardBuilder| layer(&builder, &x);
            let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), output)?;
            Ok(parallel.model()?.sum_all()?.backward().map(drop).unwrap_err().to_string())
        });
        assert!(lines.iter().all(|line| line.contains("outside of TensorParallel::backward")), "{lines:?}");
    };
    refused(&|builder, x| ColumnParallelLinear::new(4, 6, &ColumnConfig::default(), builder)?.forward(x));
    let whole = RowConfig { input_is_divided: false, ..RowConfig::default() };
    refused(&|builder, x| RowParallelLinear::new(4, 6, &whole, builder)?.forward(x));
    refused(&|builder, x| VocabParallelEmbedding::new(6, 4, builder)?.forward(&x.to_dtype(DType::U32)?));
    refused(&|builder, x| {
        let logits = candle_core::Var::from_tensor(x)?;
        vocab_parallel_cross_entropy(&logits, &Tensor::zeros(1, DType::U32, &Device::Cpu)?, builder.context())
    });
}

/// Parameters that every rank holds whole, in a model without a divided layer: returns whether each backward is refused.
#[test]
fn whole_parameters_refuse_a_backward_that_is_not_the_models() {
    type Layer = Box<dyn Module>;
    type Build = dyn Fn(&ShardBuilder) -> Result<Layer> + Sync;
    fn get(builder: &ShardBuilder, dims: &[usize]) -> Result<Tensor> {
        builder.get(dims, "weight", Init::Const(0.5), Split::Whole)
    }
    let refused = |(dp, tp, sequence_parallel): (usize, usize, bool), build: &Build| {
        let found = crate::common::on_mesh(dp, tp, |mesh| {
            let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
            let x = Tensor::new(&[[[1f32 + mesh.world().rank() as f32, 2.0, 4.0, 3.0]]], &Device::Cpu)?;
            let model = |builder: ShardBuilder| build(&builder);
            let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), model)?;
            let loss = || -> Result<Tensor> { Ok(parallel.model()?.forward(&x)?.sqr()?.sum_all()?) };
            let line = |error: candle_core::Error| tensor_parallel::Error::from(error).to_string();
            let lines = [loss()?.backward(), ops::backward(&loss()?)].map(|ended| ended.map_err(line));
            let own = parallel.backward(&loss()?)?;
            assert!(parallel.vars().iter().all(|var| own.get(var).is_some()));
            // After the model is dropped they are ordinary variables.
            let loss = loss()?;
            drop(parallel);
            loss.backward()?;
            Ok(lines.map(|ended| {
                ended.err().is_some_and(|line| line.contains("call `parallel.backward(&loss)`"))
            }))
        });
        assert!(found.iter().flatten().all(|refused| *refused == found[0][0]), "{found:?}");
        found[0][0]
    };
    let norm: &Build = &|builder| Ok(Box::new(norm(4, builder)?));
    let linear: &Build = &|builder| Ok(Box::new(Linear::new(get(builder, &[3, 4])?, None)));
    let rms: &Build = &|builder| Ok(Box::new(RmsNorm::new(get(builder, &[4])?, 1e-5)));
    // A model built with `training::build`, whose layers are whole on a single rank.
    let built: &Build = &|builder| {
        let builder = Builder::from(builder.clone());
        let config = LinearConfig::new(4, 6, Division::Outputs);
        Ok(Box::new(builder.unit("fc", |part| part.linear(&config))?))
    };
    for build in [norm, linear, rms, built] {
        assert!(refused((2, 1, false), build));
        assert!(!refused((1, 1, false), build));
    }
    for build in [norm, linear, rms] {
        assert!(refused((2, 2, false), build));
    }
    // Each rank computes a part of a norm's gradient, and the whole gradient of the others.
    assert!(refused((1, 2, true), norm));
    assert!(!refused((1, 2, true), linear));
    assert!(!refused((1, 2, false), norm));
    // A norm per attention head; each rank has some of the heads.
    let of_heads: &Build = &|builder| {
        let builder = Builder::from(builder.clone());
        Ok(Box::new(builder.unit("norm", |part| ops::rms_norm(4, 1e-5, part.of_heads()))?))
    };
    assert!(refused((1, 2, false), of_heads));
}

#[test]
fn a_mesh_without_the_axis() {
    let comm = Local::group(1, &LocalConfig::default()).unwrap().remove(0);
    let mesh = Mesh::new(Arc::new(comm), &[("dp", 1)]).unwrap();
    let message = build(&mesh, &sizes(), 1).unwrap_err().to_string();
    assert!(message.contains("give one of dp"), "{message}");
}

/// A mesh over some of the ranks, whose ranks in the whole job differ from those in the group.
#[test]
fn ranks_of_a_part_of_the_job_are_named_by_their_numbers_in_it() {
    let (plain, other) = (sizes(), LanguageModelConfig { d_ff: 48, ..sizes() });
    let failing = LanguageModelConfig { d_model: 18, ..sizes() };
    let found = Local::run_shared(4, |comm| {
        let Some(group) = comm.new_group(&[1, 3])? else { return Ok(None) };
        let mesh = Mesh::new(group, &[("tp", 2)])?;
        let odd = comm.rank() == 3;
        let differs = build(&mesh, if odd { &other } else { &plain }, 1).map(drop).unwrap_err();
        let fails = build(&mesh, if odd { &failing } else { &plain }, 1).map(drop).unwrap_err();
        Ok(Some((differs.to_string(), fails.to_string())))
    });
    let found = found.unwrap();
    assert!(found[0].is_none() && found[2].is_none());
    for found in [&found[1], &found[3]] {
        let (differs, _) = found.as_ref().unwrap();
        assert!(differs.contains("rank 3 has parameter") && differs.contains("rank 1 has"), "{differs}");
    }
    let (_, fails) = found[1].as_ref().unwrap();
    assert!(fails.starts_with("rank 3 could not build its part of the model: d_model"), "{fails}");
}

#[test]
fn parameters_without_a_gradient_are_named() {
    for (dp, tp) in [(1, 1), (1, 2), (2, 2)] {
        let strict = AuditConfig { on_missing: OnMissingGradient::Fail, ..AuditConfig::default() };
        let frozen = AuditConfig { frozen: vec!["unused".into()], ..strict.clone() };
        for (audit, is_refused) in [(strict, true), (frozen, false), (AuditConfig::default(), false)] {
            let config = TensorParallelConfig { audit, ..TensorParallelConfig::default() };
            let said = Local::run_shared(dp * tp, |comm| {
                let mesh = Mesh::new(comm, &[("dp", dp), ("tp", tp)])?;
                let build = |builder: ShardBuilder| {
                    ParallelMlp::new(4, 8, &builder.pp("unused"))?;
                    ParallelMlp::new(4, 8, &builder.pp("used"))
                };
                let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), build)?;
                let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
                // What is summed before the first backward counts.
                parallel.backward_no_sync(&parallel.model()?.forward(&x)?.sqr()?.mean_all()?)?;
                let last = parallel.backward(&parallel.model()?.forward(&x)?.sqr()?.mean_all()?);
                Ok(last.err().map(|error| error.to_string()))
            });
            for said in said.unwrap() {
                let says = |line: &String| line.contains("of 8 parameters have no gradient: unused.");
                assert!(said.is_none() != is_refused && said.iter().all(says), "{dp} {tp}: {said:?}");
            }
        }
    }
}
