//! Averages weighted by samples: training on unequal parts of a batch equals training in a single process on all of it.

use crate::common::training::{self, AnyOptimizer};
use crate::common::{
    Abc, Comm, INPUTS, Mlp, OUTPUTS, abc, assert_close, gradients, numbers, on_all_ranks, on_ranks,
    parameters_of, values,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, loss};
use ddp::{Ddp, DdpConfig, Error};
use proptest::prelude::*;

/// Numbers of samples of a rank, by step and micro-batch; a rank with a shorter list than others runs out of data.
type Samples = Vec<Vec<usize>>;

fn data(draw: u64, step: usize, rank: usize, micro_batch: usize, len: usize, dtype: DType) -> [Tensor; 2] {
    let seed = draw * 100_000 + (step * 1000 + rank * 100 + micro_batch) as u64;
    [values(seed, &[len, INPUTS], dtype), values(seed + 50, &[len, OUTPUTS], dtype)]
}

/// Returns the mean over a micro-batch; NaN for an empty one.
fn mean(model: &Mlp, [x, y]: &[Tensor; 2]) -> Result<Tensor> {
    if x.dim(0)? > 0 {
        return loss::mse(&model.forward(x)?, y);
    }
    let x = Tensor::zeros((1, INPUTS), x.dtype(), &Device::Cpu)?;
    model.forward(&x)?.mean_all()?.affine(f64::NAN, 0.0)
}

#[derive(Debug, Clone, Copy)]
struct Run {
    adam: bool,
    dtype: DType,
    draw: u64,
}

/// Returns every rank's parameters after each step.
fn distributed(run: Run, samples: &[Samples], config: &DdpConfig) -> Vec<Vec<Vec<f64>>> {
    on_all_ranks(samples.len(), |comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, run.dtype, config)?;
        let mut optimizer = AnyOptimizer::new(run.adam, ddp.vars())?;
        let mut after = vec![];
        for (step, micro_batches) in samples[rank].iter().enumerate() {
            let last = micro_batches.len() - 1;
            for (index, len) in micro_batches.iter().copied().enumerate() {
                let loss = mean(ddp.model()?, &data(run.draw, step, rank, index, len, run.dtype))?;
                if index < last {
                    ddp.backward_weighted_no_sync(&loss, len as f64)?;
                } else {
                    optimizer.step(&ddp.backward_weighted(&loss, len as f64)?)?;
                }
            }
            after.push(parameters_of(&ddp));
        }
        while let Some(grads) = ddp.join()? {
            optimizer.step(&grads)?;
            after.push(parameters_of(&ddp));
        }
        Ok(after)
    })
}

/// Trains in a single process, with all samples of each step as one batch.
fn alone(run: Run, samples: &[Samples]) -> Result<Vec<Vec<f64>>> {
    let (model, vars) = training::alone(run.dtype)?;
    let mut optimizer = AnyOptimizer::new(run.adam, vars.clone())?;
    let steps = samples.iter().map(Vec::len).max().unwrap_or(0);
    let mut after = vec![];
    for step in 0..steps {
        let mut parts = vec![];
        for (rank, samples) in samples.iter().enumerate() {
            for (index, &len) in samples.get(step).into_iter().flatten().enumerate() {
                parts.push(data(run.draw, step, rank, index, len, run.dtype));
            }
        }
        parts.retain(|[x, _]| x.dims()[0] > 0);
        let loss = if parts.is_empty() {
            Tensor::zeros((), run.dtype, &Device::Cpu)?
        } else {
            let joint =
                |which: usize| Tensor::cat(&parts.iter().map(|part| &part[which]).collect::<Vec<_>>(), 0);
            mean(&model, &[joint(0)?, joint(1)?])?
        };
        optimizer.step(&loss.backward()?)?;
        after.push(numbers(vars.iter().map(Var::as_tensor)));
    }
    Ok(after)
}

fn check(run: Run, samples: &[Samples], config: &DdpConfig, tolerance: f64) {
    let ranks = distributed(run, samples, config);
    for rank in &ranks[1..] {
        assert!(*rank == ranks[0], "the ranks' parameters differ");
    }
    let alone = alone(run, samples).expect("one process trains");
    assert_eq!(ranks[0].len(), alone.len());
    for (distributed, alone) in ranks[0].iter().zip(&alone) {
        assert_close(distributed, alone, tolerance);
    }
}

/// Returns samples with one micro-batch per step.
fn single(lens: &[&[usize]]) -> Vec<Samples> {
    lens.iter().map(|lens| lens.iter().map(|&len| vec![len]).collect()).collect()
}

#[test]
fn unequal_batches_equal_one_process() {
    let all: [&[usize]; 4] =
        [&[4, 1, 7, 2, 3, 9], &[1, 5, 0, 2, 8, 1], &[2, 0, 3, 0, 1, 6], &[6, 6, 1, 0, 0, 2]];
    for world_size in 1..=4 {
        for adam in [false, true] {
            let run = Run { adam, dtype: DType::F64, draw: 1 };
            check(run, &single(&all[..world_size]), &DdpConfig::default(), 1e-9);
        }
        let run = Run { adam: false, dtype: DType::F32, draw: 2 };
        check(run, &single(&all[..world_size]), &DdpConfig::default(), 1e-5);
    }
}

#[test]
fn half_precision_holds_large_weights() {
    on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let ddp = abc(comm, DType::F16, &DdpConfig::default())?;
        for _ in 0..2 {
            let loss = (ddp.model()?.a.sum_all()? * (1.0 + rank as f64))?;
            // Larger than f16 can represent.
            let weight = [300_000.0, 100_000.0][rank];
            ddp.backward_weighted_no_sync(&loss, weight)?;
            let grads = ddp.backward_weighted(&loss, weight)?;
            assert_eq!(gradients(&ddp, &grads)[0], Some(vec![1.25; 2]));
        }
        Ok(())
    });
}

fn sizes() -> impl Strategy<Value = Vec<Samples>> {
    let micro_batches = proptest::collection::vec(0usize..6, 1..4);
    let rank = proptest::collection::vec(micro_batches, 0..6);
    proptest::collection::vec(rank, 1..=4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    /// Micro-batches of different sizes and numbers, and ranks that run out of data earlier or have none at all.
    #[test]
    fn any_share_of_the_data_equals_one_process(
        samples in sizes(),
        adam in any::<bool>(),
        draw in 0u64..1000,
        bucket_bytes in prop_oneof![Just(0), 8usize..2000, Just(usize::MAX)],
    ) {
        let config = DdpConfig { bucket_bytes, first_bucket_bytes: bucket_bytes, ..Default::default() };
        check(Run { adam, dtype: DType::F64, draw }, &samples, &config, 1e-9);
    }
}

#[test]
fn equal_weights_give_the_bits_of_the_plain_average() {
    on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, DType::F32, &DdpConfig::default())?;
        for step in 0..3 {
            let loss = mean(ddp.model()?, &data(7, step, rank, 0, 5, DType::F32))?;
            let (plain, weighted) = (ddp.backward(&loss)?, ddp.backward_weighted(&loss, 5.0)?);
            assert_eq!(gradients(&ddp, &plain), gradients(&ddp, &weighted));
        }
        Ok(())
    });
}

#[test]
fn where_nothing_is_weighed_nothing_has_a_gradient() {
    for world_size in 1..=3 {
        on_all_ranks(world_size, |comm| {
            let ddp = abc(comm, DType::F64, &DdpConfig::default())?;
            for _ in 0..2 {
                let grads = ddp.backward_weighted(&(ddp.model()?.a.sum_all()? * f64::NAN)?, 0.0)?;
                assert_eq!(gradients(&ddp, &grads), [None, None, None]);
            }
            Ok(())
        });
    }
}

#[test]
fn a_joined_rank_hears_what_the_others_use() {
    on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let ddp = abc(
            comm,
            DType::F64,
            &DdpConfig { first_bucket_bytes: 0, bucket_bytes: 0, ..Default::default() },
        )?;
        // Twice: training continues after all ranks have joined.
        for epoch in 0..2 {
            if rank == 0 {
                // Accumulated gradients are included in the first step of `join`.
                ddp.backward_weighted_no_sync(&(ddp.model()?.c.sum_all()? * 8.0)?, 2.0)?;
            }
            for step in 0..(rank * 2) {
                let Abc { a, b, .. } = ddp.model()?;
                let used = if rank == 1 { a } else { b };
                let grads = ddp.backward_weighted(&(used.sum_all()? * 4.0)?, 1.0)?;
                let expected = match step {
                    0 => [Some(vec![1.0; 2]), Some(vec![1.0; 2]), Some(vec![4.0; 2])],
                    1 => [Some(vec![2.0; 2]), Some(vec![2.0; 2]), None],
                    _ => [None, Some(vec![4.0; 2]), None],
                };
                assert_eq!(gradients(&ddp, &grads), expected, "epoch {epoch}, step {step}");
            }
            let mut steps = 0;
            while let Some(grads) = ddp.join()? {
                steps += 1;
                assert!(grads.get(&ddp.vars()[1]).is_some());
            }
            assert_eq!(steps, 4 - rank * 2);
        }
        Ok(())
    });
}

#[test]
fn mistakes_with_weights_are_refused_and_change_nothing() {
    on_all_ranks(2, |comm| {
        let ddp = abc(comm, DType::F64, &DdpConfig::default())?;
        let loss = ddp.model()?.a.sum_all()?;
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let refused = ddp.backward_weighted(&loss, weight).expect_err("no weight");
            assert!(matches!(refused, Error::InvalidWeight { .. }), "{refused}");
        }
        ddp.backward_no_sync(&loss)?;
        assert!(matches!(ddp.backward_weighted(&loss, 1.0), Err(Error::MixedAverages)));
        assert!(matches!(ddp.join(), Err(Error::MixedAverages)));
        assert_eq!(gradients(&ddp, &ddp.backward(&loss)?)[0], Some(vec![2.0; 2]));
        ddp.backward_weighted_no_sync(&loss, 1.0)?;
        assert!(matches!(ddp.backward(&loss), Err(Error::MixedAverages)));
        assert_eq!(gradients(&ddp, &ddp.backward_weighted(&loss, 1.0)?)[0], Some(vec![1.0; 2]));
        Ok(())
    });
}

#[test]
fn ranks_that_average_differently_are_told() {
    type Call = fn(&Ddp<Abc>) -> ddp::Result<()>;
    let weighted: Call = |ddp| ddp.backward_weighted(&ddp.model()?.a.sum_all()?, 1.0).map(drop);
    let joined: Call = |ddp| ddp.join().map(drop);
    for call in [weighted, joined] {
        let results = on_ranks(3, |comm: Comm| {
            let rank = comm.rank();
            let ddp = abc(comm, DType::F32, &DdpConfig::default())?;
            if rank == 1 { call(&ddp) } else { ddp.backward(&ddp.model()?.a.sum_all()?).map(drop) }
        });
        let errors: Vec<Error> =
            results.into_iter().map(|result| result.expect("no panic").expect_err("they differ")).collect();
        for error in &errors {
            let text = error.to_string();
            assert!(matches!(error, Error::Comm(comm::Error::Mismatch { .. })), "{text}");
            assert!(
                text.contains("(avg, f32, 9 elements)") && text.contains("(sum, f64, 3 elements)"),
                "{text}"
            );
            assert_eq!(text, errors[0].to_string());
        }
    }
}
