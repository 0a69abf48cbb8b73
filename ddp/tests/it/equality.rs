//! Training on several ranks equals training in a single process, and all ranks stay bitwise equal.

use crate::common::training::{self, AnyOptimizer};
use crate::common::{
    INPUTS, Mlp, OUTPUTS, assert_close, builder, numbers, on_all_ranks, parameters_of, values,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
use ddp::{Ddp, DdpConfig};
use proptest::prelude::*;

const STEPS: usize = 20;

/// Returns a rank's inputs and targets of a step. Every fifth step is the last of an epoch, with batches of different sizes.
fn batch(draw: u64, step: usize, rank: usize, dtype: DType) -> (Tensor, Tensor) {
    let len = if step % 5 == 4 { 1 + 2 * rank } else { 4 };
    let seed = draw * 10_000 + (step * 100 + rank) as u64;
    (values(seed, &[len, INPUTS], dtype), values(seed + 50, &[len, OUTPUTS], dtype))
}

/// Parameters of one training run.
#[derive(Clone, Copy)]
struct Run {
    world_size: usize,
    adam: bool,
    dtype: DType,
    /// Seed of the data.
    draw: u64,
}

/// Returns every rank's parameters after each step.
fn distributed(run: Run, config: &DdpConfig) -> Vec<Vec<Vec<f64>>> {
    on_all_ranks(run.world_size, |comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, run.dtype, config)?;
        let mut optimizer = AnyOptimizer::new(run.adam, ddp.vars())?;
        let mut after = vec![];
        for step in 0..STEPS {
            let (x, y) = batch(run.draw, step, rank, run.dtype);
            let loss = loss::mse(&ddp.model()?.forward(&x)?, &y)?;
            optimizer.step(&ddp.backward(&loss)?)?;
            after.push(parameters_of(&ddp));
        }
        Ok(after)
    })
}

/// Trains in a single process on all ranks' batches: the mean of the ranks' means.
fn alone(run: Run) -> candle_core::Result<Vec<Vec<f64>>> {
    let (model, vars) = training::alone(run.dtype)?;
    let mut optimizer = AnyOptimizer::new(run.adam, vars.clone())?;
    let mut after = vec![];
    for step in 0..STEPS {
        let one = |rank| {
            let (x, y) = batch(run.draw, step, rank, run.dtype);
            loss::mse(&model.forward(&x)?, &y)
        };
        let losses: Vec<Tensor> = (0..run.world_size).map(one).collect::<candle_core::Result<_>>()?;
        let loss = Tensor::stack(&losses, 0)?.mean_all()?;
        optimizer.step(&loss.backward()?)?;
        after.push(numbers(vars.iter().map(Var::as_tensor)));
    }
    Ok(after)
}

fn check(run: Run, config: &DdpConfig, tolerance: f64) {
    let ranks = distributed(run, config);
    for rank in &ranks[1..] {
        assert!(*rank == ranks[0], "the ranks' parameters differ");
    }
    let alone = alone(run).expect("one process trains");
    for (distributed, alone) in ranks[0].iter().zip(&alone) {
        assert_close(distributed, alone, tolerance);
    }
}

#[test]
fn equal_to_one_process_in_f64() {
    for world_size in 1..=4 {
        for adam in [false, true] {
            check(Run { world_size, adam, dtype: DType::F64, draw: 0 }, &DdpConfig::default(), 1e-9);
        }
    }
}

#[test]
fn equal_to_one_process_in_f32() {
    for world_size in 1..=4 {
        check(Run { world_size, adam: false, dtype: DType::F32, draw: 0 }, &DdpConfig::default(), 1e-5);
    }
}

#[test]
fn half_precision_stays_equal_on_all_ranks() {
    for dtype in [DType::BF16, DType::F16] {
        let config = &DdpConfig { first_bucket_bytes: 40, bucket_bytes: 64, ..Default::default() };
        check(Run { world_size: 2, adam: false, dtype, draw: 0 }, config, 0.1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn equal_with_buckets_of_any_size(
        world_size in 2usize..=4,
        adam in any::<bool>(),
        draw in 0u64..1000,
        first_bucket_bytes in prop_oneof![Just(0), Just(1), 8usize..2000, Just(usize::MAX)],
        bucket_bytes in prop_oneof![Just(0), Just(1), 8usize..2000, Just(usize::MAX)],
    ) {
        let config = DdpConfig { bucket_bytes, first_bucket_bytes, ..Default::default() };
        check(Run { world_size, adam, dtype: DType::F64, draw }, &config, 1e-9);
    }
}

#[test]
fn variables_of_a_var_map_are_shared_and_loading_them_is_seen() {
    let outputs = on_all_ranks(2, |comm| {
        let mut variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let ddp: Ddp<Linear> = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(2, 1, vb))?;
        let ids: Vec<_> = variables.all_vars().iter().map(|var| var.as_tensor().id()).collect();
        assert!(ddp.vars().iter().all(|var| ids.contains(&var.as_tensor().id())));
        variables.set_one("weight", Tensor::new(&[[2f32, 3.0]], &Device::Cpu)?)?;
        variables.set_one("bias", Tensor::new(&[1f32], &Device::Cpu)?)?;
        let x = Tensor::new(&[[10f32, 100.0]], &Device::Cpu)?;
        Ok(numbers([&ddp.forward(&x)?]))
    });
    assert_eq!(outputs, [[321.0], [321.0]]);
}

/// Enough steps to try every size.
const SEARCH_STEPS: usize = 40;

#[test]
fn measured_bucket_sizes_are_the_same_on_all_ranks_and_change_no_result() {
    for world_size in 1..=3 {
        let train = |tune_bucket_bytes: bool, bucket_bytes: usize| {
            on_all_ranks(world_size, |comm| {
                let rank = comm.rank();
                let config = DdpConfig { bucket_bytes, tune_bucket_bytes, ..Default::default() };
                let wide: [(&str, &[usize]); 3] =
                    [("a", &[300, 100]), ("b", &[200, 100]), ("c", &[100, 100])];
                let ddp = Ddp::new(comm, builder(1, &wide, DType::F64), &config, |vb| {
                    Ok([vb.get((300, 100), "a")?, vb.get((200, 100), "b")?, vb.get((100, 100), "c")?])
                })?;
                let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
                for step in 0..SEARCH_STEPS {
                    let x = values((step * 10 + rank) as u64, &[2, 100], DType::F64);
                    let model = ddp.model()?;
                    let one = |weight: &Tensor| x.matmul(&weight.t()?)?.tanh()?.mean_all();
                    let loss = ((one(&model[0])? + one(&model[1])?)? + one(&model[2])?)?;
                    optimizer.step(&ddp.backward(&loss)?)?;
                }
                Ok((ddp.bucket_bytes(), parameters_of(&ddp)))
            })
        };
        let measured = train(true, 12345);
        assert!(measured.iter().all(|rank| *rank == measured[0]), "the ranks differ");
        let bytes = measured[0].0;
        assert!(bytes == 12345 || bytes.is_power_of_two(), "{bytes}");
        let fixed = train(false, 12345);
        assert_eq!(fixed[0].0, 12345);
        assert_close(&measured[0].1, &fixed[0].1, 1e-12);
    }
}
