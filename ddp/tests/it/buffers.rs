//! Running statistics are equal on all ranks after each step.

use crate::common::{Comm, assert_close, numbers, on_all_ranks, parameters_of, values};
use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, Init, ModuleT, Optimizer, SGD, VarBuilder, VarMap, batch_norm};
use ddp::{Ddp, DdpConfig, Result};

const FEATURES: usize = 3;

fn norm(comm: Comm, config: &DdpConfig) -> Result<Ddp<BatchNorm>> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F64, &Device::Cpu);
    // Different from the defaults 0 and 1, and different on each rank.
    let init = Init::Const(2.0 + comm.rank() as f64);
    variables.get(FEATURES, "running_mean", init, DType::F64, &Device::Cpu)?;
    Ddp::new(comm, vb, config, |vb| batch_norm(FEATURES, 1e-5, vb))
}

fn statistics(ddp: &Ddp<BatchNorm>) -> Result<Vec<f64>> {
    let model = ddp.model()?;
    Ok(numbers([model.running_mean(), model.running_var()]))
}

fn batch(step: usize, rank: usize) -> Tensor {
    values((step * 10 + rank) as u64, &[4, FEATURES, 2], DType::F64)
}

/// Returns the statistics of a single process that sees, in each step, the batch of the given rank.
fn alone(ranks: impl Iterator<Item = usize>) -> candle_core::Result<Vec<f64>> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Device::Cpu);
    let start = (Tensor::zeros(FEATURES, DType::F64, &Device::Cpu)? + 2.0)?;
    let one = vb.get_with_hints(FEATURES, "var", Init::Const(1.0))?;
    let model = BatchNorm::new_no_bias(FEATURES, start, one, 1e-5)?;
    for (step, rank) in ranks.enumerate() {
        model.forward_t(&batch(step, rank), true)?;
    }
    Ok(numbers([model.running_mean(), model.running_var()]))
}

#[test]
fn rank_0s_statistics_are_everybodys_after_each_step() {
    for world_size in 1..=4 {
        let ranks = on_all_ranks(world_size, |comm| {
            let rank = comm.rank();
            let ddp = norm(comm.clone(), &DdpConfig::default())?;
            let mut after = vec![];
            for step in 0..4 {
                let loss = ddp.forward_t(&batch(step, rank), true)?.powf(3.0)?.mean_all()?;
                let before = comm.stats().operations;
                // Evaluation and forward passes communicate nothing, so a single rank can run them.
                if rank == 0 {
                    ddp.forward_t(&batch(step, rank), false)?;
                }
                assert_eq!(comm.stats().operations, before);
                ddp.backward(&loss)?;
                after.push(statistics(&ddp)?);
            }
            Ok(after)
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]));
        let alone = alone((0..4).map(|_| 0)).expect("one process");
        assert_close(&ranks[0][3], &alone, 1e-12);
    }
}

#[test]
fn left_as_they_are_they_are_each_ranks_own() {
    let config = DdpConfig { broadcast_buffers: false, ..DdpConfig::default() };
    let ranks = on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let ddp = norm(comm, &config)?;
        for step in 0..4 {
            ddp.backward(&ddp.forward_t(&batch(step, rank), true)?.powf(3.0)?.mean_all()?)?;
        }
        statistics(&ddp)
    });
    for (rank, statistics) in ranks.iter().enumerate() {
        // All ranks start from rank 0's statistics.
        assert_close(statistics, &alone((0..4).map(|_| rank)).expect("one process"), 1e-12);
    }
}

#[test]
fn accumulation_leaves_them_until_its_last_step() {
    let ranks = on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let ddp = norm(comm, &DdpConfig::default())?;
        let loss = |step| ddp.forward_t(&batch(step, rank), true)?.powf(3.0)?.mean_all();
        ddp.backward_no_sync(&loss(0)?)?;
        let between = statistics(&ddp)?;
        ddp.backward(&loss(1)?)?;
        Ok((between, statistics(&ddp)?))
    });
    assert_ne!(ranks[0].0, ranks[1].0);
    assert_eq!(ranks[0].1, ranks[1].1);
    assert_close(&ranks[0].1, &alone([0, 0].into_iter()).expect("one process"), 1e-12);
}

#[test]
fn after_rank_0_has_joined_the_first_that_has_data_counts() {
    let steps = [1, 2, 4];
    let ranks = on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let ddp = norm(comm, &DdpConfig::default())?;
        let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
        for step in 0..steps[rank] {
            let loss = ddp.forward_t(&batch(step, rank), true)?.powf(3.0)?.mean_all()?;
            optimizer.step(&ddp.backward_weighted(&loss, 4.0)?)?;
        }
        while let Some(grads) = ddp.join()? {
            optimizer.step(&grads)?;
        }
        Ok((statistics(&ddp)?, parameters_of(&ddp)))
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    assert_close(&ranks[0].0, &alone([0, 1, 2, 2].into_iter()).expect("one process"), 1e-12);
}

/// Tables of integers are no parameters, and yet part of the model.
#[test]
fn integers_are_rank_0s() {
    let found = on_all_ranks(3, |comm| {
        let rank = comm.rank() as u32;
        let table = Tensor::new(&[rank, 7 + rank], &Device::Cpu)?;
        let vb = VarBuilder::from_tensors([("table".to_string(), table)].into(), DType::F64, &Device::Cpu);
        let read = |vb: VarBuilder<'_>| vb.get_with_hints_dtype(2, "table", Init::Const(0.0), DType::U32);
        let ddp = Ddp::new(comm, vb, &DdpConfig::default(), read)?;
        assert!(ddp.parameters().is_empty());
        Ok(ddp.model()?.to_vec1::<u32>()?)
    });
    assert_eq!(found, vec![vec![0, 7]; 3]);
}
