//! Clipping by global norm: averaged gradients are equal on all ranks, so that clipping them needs no communication.

use crate::common::training::alone as model_alone;
use crate::common::{INPUTS, Mlp, OUTPUTS, assert_close, numbers, on_all_ranks, parameters_of, values};
use candle_core::{DType, Tensor, Var};
use candle_nn::{Module, Optimizer, SGD, loss};
use ddp::{CommHook, DdpConfig, DistributedModel, PowerSgdConfig};
use training::clip_grad_norm;

const MAX_NORM: f64 = 0.1;
const STEPS: usize = 6;

fn batch(step: usize, rank: usize) -> [Tensor; 2] {
    let (seed, len) = ((step * 10 + rank) as u64, 1 + (step + 2 * rank) % 4);
    [values(seed, &[len, INPUTS], DType::F64), values(seed + 5, &[len, OUTPUTS], DType::F64)]
}

/// Returns the norm before clipping and the parameters after it, by step.
fn distributed(world_size: usize, hook: &CommHook) -> Vec<(Vec<f64>, Vec<Vec<f64>>)> {
    on_all_ranks(world_size, |comm| {
        let rank = comm.rank();
        let config =
            DdpConfig { hook: hook.clone(), bucket_bytes: 300, first_bucket_bytes: 0, ..Default::default() };
        let ddp = Mlp::ddp(comm, DType::F64, &config)?;
        let mut optimizer = SGD::new(ddp.vars(), 0.5)?;
        let (mut norms, mut after) = (vec![], vec![]);
        for step in 0..STEPS {
            let [x, y] = batch(step, rank);
            let loss = loss::mse(&ddp.forward(&x)?, &y)?;
            let mut grads = ddp.backward_weighted(&loss, x.dim(0)? as f64)?;
            norms.push(ddp.clip_grad_norm(&mut grads, MAX_NORM)?);
            optimizer.step(&grads)?;
            after.push(parameters_of(&ddp));
        }
        Ok((norms, after))
    })
}

fn alone(world_size: usize) -> candle_core::Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let (model, vars) = model_alone(DType::F64)?;
    let mut optimizer = SGD::new(vars.clone(), 0.5)?;
    let (mut norms, mut after) = (vec![], vec![]);
    for step in 0..STEPS {
        let parts: Vec<[Tensor; 2]> = (0..world_size).map(|rank| batch(step, rank)).collect();
        let joint = |which: usize| Tensor::cat(&parts.iter().map(|part| &part[which]).collect::<Vec<_>>(), 0);
        let mut grads = loss::mse(&model.forward(&joint(0)?)?, &joint(1)?)?.backward()?;
        norms.push(clip_grad_norm(&mut grads, &vars, MAX_NORM).expect("finite"));
        optimizer.step(&grads)?;
        after.push(numbers(vars.iter().map(Var::as_tensor)));
    }
    Ok((norms, after))
}

#[test]
fn clipping_on_each_rank_is_clipping_by_the_global_norm() {
    for world_size in 1..=4 {
        let ranks = distributed(world_size, &CommHook::AllReduce);
        assert!(ranks.iter().all(|rank| *rank == ranks[0]));
        let (norms, after) = alone(world_size).expect("one process");
        // Otherwise nothing would be clipped.
        assert!(norms.iter().all(|norm| *norm > 2.0 * MAX_NORM), "{norms:?}");
        assert_close(&ranks[0].0, &norms, 1e-9);
        for (distributed, alone) in ranks[0].1.iter().zip(&after) {
            assert_close(distributed, alone, 1e-9);
        }
    }
}

#[test]
fn ranks_stay_equal_when_compressed_gradients_are_clipped() {
    let low_rank = PowerSgdConfig { warm_up_steps: 1, min_compression: 1, ..Default::default() };
    for hook in [CommHook::F16, CommHook::Bf16, CommHook::PowerSgd(low_rank)] {
        for world_size in 2..=4 {
            let ranks = distributed(world_size, &hook);
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{hook:?}");
            // The averaged gradients are clipped, so the length of a step is bounded.
            for pair in ranks[0].1.windows(2) {
                let moved: f64 = pair[0].iter().zip(&pair[1]).map(|(from, to)| (from - to).powi(2)).sum();
                assert!(moved.sqrt() <= 0.5 * MAX_NORM * (1.0 + 1e-9), "{hook:?}");
            }
        }
    }
}
