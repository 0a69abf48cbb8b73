//! Communication hooks: bytes saved, precision lost, and that ranks stay equal.

use crate::common::{
    Comm, INPUTS, Mlp, OUTPUTS, assert_close, builder, gradients, numbers, on_all_ranks, on_ranks,
    parameters_of, values,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, SGD, loss};
use ddp::{CommHook, Ddp, DdpConfig, Error, PowerSgdConfig, Result};

fn with(hook: CommHook) -> DdpConfig {
    DdpConfig { hook, ..DdpConfig::default() }
}

/// Returns a configuration that compresses from the first step on, wherever it saves anything.
fn power_sgd(rank: usize) -> PowerSgdConfig {
    PowerSgdConfig { rank, warm_up_steps: 0, min_compression: 1, ..Default::default() }
}

fn all_hooks() -> [CommHook; 6] {
    let of = |config| CommHook::PowerSgd(config);
    [
        CommHook::AllReduce,
        CommHook::F16,
        CommHook::Bf16,
        of(power_sgd(1)),
        of(PowerSgdConfig { warm_up_steps: 3, ..power_sgd(2) }),
        of(PowerSgdConfig { error_feedback: false, warm_start: false, ..power_sgd(2) }),
    ]
}

const N: usize = 24;
const M: usize = 16;

/// A model of one matrix and one vector.
fn weights(comm: Comm, dtype: DType, hook: CommHook) -> Result<Ddp<[Tensor; 2]>> {
    let vb = builder(1, &[("matrix", &[N, 4, M / 4]), ("vector", &[N])], dtype);
    Ddp::new(comm, vb, &with(hook), |vb| Ok([vb.get((N, 4, M / 4), "matrix")?, vb.get(N, "vector")?]))
}

/// Runs backward of a loss that has these gradients.
fn backward(ddp: &Ddp<[Tensor; 2]>, matrix: &Tensor, vector: &Tensor) -> Result<GradStore> {
    let [own_matrix, own_vector] = ddp.model()?;
    let matrix = matrix.to_dtype(own_matrix.dtype())?.reshape(own_matrix.shape())?;
    let vector = vector.to_dtype(own_vector.dtype())?;
    ddp.backward(&((own_matrix * matrix)?.sum_all()? + (own_vector * vector)?.sum_all()?)?)
}

/// Returns the bytes that rank 0 sends in one step.
fn bytes_sent(hook: CommHook) -> u64 {
    let bytes = on_all_ranks(2, |comm| {
        let ddp = weights(comm.clone(), DType::F32, hook.clone())?;
        let before = comm.stats().bytes_sent;
        backward(&ddp, &values(1, &[N, M], DType::F32), &values(2, &[N], DType::F32))?;
        Ok(comm.stats().bytes_sent - before)
    });
    bytes[0]
}

#[test]
fn hooks_send_fewer_bytes() {
    let whole = bytes_sent(CommHook::AllReduce);
    let elements = (N * M + N + 2) as u64;
    assert_eq!(whole, 4 * elements);
    assert_eq!((bytes_sent(CommHook::F16), bytes_sent(CommHook::Bf16)), (whole / 2, whole / 2));
    let factors = ((N + M) * 2 + N + 2) as u64;
    assert_eq!(bytes_sent(CommHook::PowerSgd(power_sgd(2))), 4 * factors);
}

#[test]
fn halves_are_means_of_rounded_gradients() {
    for (hook, half) in [(CommHook::F16, DType::F16), (CommHook::Bf16, DType::BF16)] {
        for dtype in [DType::F32, DType::F64] {
            for world_size in [2, 4] {
                on_all_ranks(world_size, |comm| {
                    let ddp = weights(comm.clone(), dtype, hook.clone())?;
                    let own = |rank| values(10 + rank as u64, &[N, M], dtype);
                    let grads = backward(&ddp, &own(comm.rank()), &values(2, &[N], dtype))?;
                    let rounded = (0..world_size).map(|rank| own(rank).to_dtype(half)?.to_dtype(DType::F64));
                    let rounded = rounded.collect::<candle_core::Result<Vec<_>>>()?;
                    // Sums of few 16-bit numbers are exact in f64.
                    let mean = Tensor::stack(&rounded, 0)?.mean(0)?.to_dtype(DType::F32)?.to_dtype(half)?;
                    assert_eq!(numbers(grads.get(&ddp.vars()[0])), numbers([&mean]));
                    assert_eq!(grads.get(&ddp.vars()[0]).map(Tensor::dtype), Some(dtype));
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn halves_of_halves_are_as_without() {
    on_all_ranks(2, |comm| {
        let own = values(comm.rank() as u64, &[N, M], DType::F16);
        let of = |hook| -> Result<_> {
            let ddp = weights(comm.clone(), DType::F16, hook)?;
            Ok(gradients(&ddp, &backward(&ddp, &own, &values(2, &[N], DType::F16))?))
        };
        assert_eq!(of(CommHook::AllReduce)?, of(CommHook::Bf16)?);
        Ok(())
    });
}

#[test]
fn a_mean_of_low_rank_arrives_as_it_is() {
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-11)] {
        for world_size in 2..=4 {
            on_all_ranks(world_size, |comm| {
                // Each rank's gradient has rank 1, so the mean has at most rank `world_size`.
                let ddp = weights(comm.clone(), dtype, CommHook::PowerSgd(power_sgd(world_size)))?;
                for step in 0..3 {
                    let own = |rank: usize| -> candle_core::Result<Tensor> {
                        let seed = (step * 10 + rank) as u64;
                        let (left, right) = (values(seed, &[N, 1], dtype), values(seed + 5, &[1, M], dtype));
                        left.matmul(&right)
                    };
                    let grads = backward(&ddp, &own(comm.rank())?, &values(2, &[N], dtype))?;
                    let all = (0..world_size).map(own).collect::<candle_core::Result<Vec<_>>>()?;
                    let mean = numbers([&Tensor::stack(&all, 0)?.mean(0)?]);
                    assert_close(&numbers(grads.get(&ddp.vars()[0])), &mean, tolerance);
                    assert_close(
                        &numbers(grads.get(&ddp.vars()[1])),
                        &numbers([&values(2, &[N], dtype)]),
                        1e-6,
                    );
                }
                Ok(())
            });
        }
    }
}

/// Returns the distance between the mean result over many steps and the mean gradient, relative to the norm of the latter.
fn left_out(error_feedback: bool) -> f64 {
    const STEPS: usize = 200;
    let distances = on_all_ranks(3, |comm| {
        let hook = CommHook::PowerSgd(PowerSgdConfig { error_feedback, ..power_sgd(1) });
        let ddp = weights(comm.clone(), DType::F64, hook)?;
        let own = |rank: usize| values(rank as u64, &[N, M], DType::F64);
        let mut sum = Tensor::zeros((N, 4, M / 4), DType::F64, &Device::Cpu)?;
        for _ in 0..STEPS {
            let grads = backward(&ddp, &own(comm.rank()), &values(2, &[N], DType::F64))?;
            sum = (sum + grads.get(&ddp.vars()[0]).expect("a gradient"))?;
        }
        let arrived = (sum / STEPS as f64)?.reshape((N, M))?;
        let mean = Tensor::stack(&[own(0), own(1), own(2)], 0)?.mean(0)?;
        let norm = |tensor: &Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt);
        Ok(norm(&(arrived - &mean)?)? / norm(&mean)?)
    });
    distances[0]
}

#[test]
fn what_one_step_leaves_out_comes_with_later_ones() {
    let (with, without) = (left_out(true), left_out(false));
    assert!(with < 0.2 && without > 0.6, "{with} {without}");
}

#[test]
fn training_with_hooks_learns_and_ranks_stay_equal() {
    let target = values(99, &[INPUTS, OUTPUTS], DType::F32);
    for hook in all_hooks() {
        for world_size in 1..=4 {
            for bucket_bytes in [0, 300, usize::MAX] {
                let config =
                    DdpConfig { bucket_bytes, first_bucket_bytes: bucket_bytes, ..with(hook.clone()) };
                let ranks = on_all_ranks(world_size, |comm| {
                    let rank = comm.rank();
                    let ddp = Mlp::ddp(comm, DType::F32, &config)?;
                    let mut optimizer = SGD::new(ddp.vars(), 0.2)?;
                    let mut losses = vec![];
                    // Different batch sizes, and different numbers of batches.
                    for step in 0..60 + rank * 2 {
                        let x = values((step * 10 + rank) as u64, &[8 + rank, INPUTS], DType::F32);
                        let loss = loss::mse(&ddp.model()?.forward(&x)?, &x.matmul(&target)?)?;
                        losses.push(loss.to_scalar::<f32>()?);
                        optimizer.step(&ddp.backward_weighted(&loss, (8 + rank) as f64)?)?;
                    }
                    while let Some(grads) = ddp.join()? {
                        optimizer.step(&grads)?;
                    }
                    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
                    assert!(mean(&losses[50..]) < 0.6 * mean(&losses[..10]), "{hook:?}: {losses:?}");
                    Ok(parameters_of(&ddp))
                });
                assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{hook:?}");
            }
        }
    }
}

#[test]
fn unused_parameters_have_no_gradient_with_hooks() {
    for hook in all_hooks() {
        on_all_ranks(3, |comm| {
            let ddp = weights(comm.clone(), DType::F32, hook.clone())?;
            for step in 0..5 {
                let [matrix, vector] = ddp.model()?;
                // No rank, one rank or all ranks use the matrix.
                let uses = step % 3 == 2 || (step % 3 == 1 && comm.rank() == 1);
                let loss = if uses { (matrix.sum_all()? + vector.sum_all()?)? } else { vector.sum_all()? };
                let grads = gradients(&ddp, &ddp.backward(&loss)?);
                assert_eq!(grads[0].is_some(), step % 3 != 0, "{hook:?} at step {step}");
                assert_close(grads[1].as_deref().unwrap_or_default(), &[1.0; N], 1e-6);
            }
            Ok(())
        });
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_seen_by_all_and_not_kept() {
    for hook in all_hooks() {
        on_all_ranks(2, |comm| {
            let ddp = weights(comm.clone(), DType::F32, hook.clone())?;
            let vector = values(2, &[N], DType::F32);
            for step in 0..6 {
                let mut own = values(step, &[N, M], DType::F32);
                let bad = step % 3 == 1;
                if bad && comm.rank() == 1 {
                    own = (own * if step == 1 { f64::NAN } else { f64::INFINITY })?;
                }
                let grads = backward(&ddp, &own, &vector)?;
                let finite = numbers(grads.get(&ddp.vars()[0])).iter().all(|element| element.is_finite());
                assert_eq!(finite, !bad, "{hook:?} at step {step}");
            }
            Ok(())
        });
    }
}

#[test]
fn different_hooks_are_refused() {
    let results = on_ranks(2, |comm| {
        let hook = if comm.rank() == 0 { CommHook::F16 } else { CommHook::PowerSgd(power_sgd(3)) };
        weights(comm, DType::F32, hook).map(drop)
    });
    for result in results {
        let error = result.expect("no panic").expect_err("they differ");
        let text = error.to_string();
        assert!(matches!(error, Error::ModelMismatch(difference) if difference.place == 0), "{text}");
        assert!(text.contains("averaged by F16") && text.contains("rank: 3"), "{text}");
    }
}
