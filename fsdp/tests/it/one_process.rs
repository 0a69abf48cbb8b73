//! Sharded training equals training in a single process.

use crate::common::{
    Alone, AnyOptimizer, Comm, INPUTS, Mlp, OPTIMIZERS, OUTPUTS, assert_close, numbers, on_all_ranks,
    over_tcp, parameters, values,
};
use candle_core::{DType, Tensor};
use candle_nn::{Module, loss};
use comm::Mesh;
use fsdp::{DistributedModel, Fsdp, FsdpConfig, Result, ShardingStrategy};
use proptest::prelude::*;
use training::clip_grad_norm;

const STEPS: usize = 10;
const STRATEGIES: [ShardingStrategy; 3] =
    [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];
/// Small enough that the model's larger parameters are separate parts.
const PACK: usize = 20;

/// Parameters of one training run.
#[derive(Clone, Copy, Debug)]
struct Run {
    world_size: usize,
    optimizer: usize,
    dtype: DType,
    seed: u64,
    micro_batches: usize,
    max_norm: Option<f64>,
}

impl Run {
    fn new(world_size: usize) -> Self {
        Self { world_size, optimizer: 0, dtype: DType::F64, seed: 1, micro_batches: 1, max_norm: None }
    }

    fn batch(&self, step: usize, rank: usize, micro_batch: usize) -> (Tensor, Tensor) {
        let seed = self.seed * 10_000 + (step * 100 + rank * 10 + micro_batch) as u64;
        (values(seed, &[4, INPUTS], self.dtype), values(seed + 5_000, &[4, OUTPUTS], self.dtype))
    }

    /// Returns the losses of a rank and, on rank 0, the final parameters.
    fn sharded(&self, comm: Comm, config: &FsdpConfig) -> Result<(Vec<f64>, Vec<f64>)> {
        let rank = comm.rank();
        let fsdp = Mlp::fsdp(comm, self.seed, self.dtype, config)?;
        self.train(&fsdp, rank)
    }

    fn train(&self, fsdp: &Fsdp<Mlp>, rank: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut optimizer = AnyOptimizer::new(self.optimizer, fsdp.vars())?;
        let mut losses = vec![];
        for step in 0..STEPS {
            let mut last = None;
            for micro_batch in 0..self.micro_batches {
                let (x, y) = self.batch(step, rank, micro_batch);
                let loss = (loss::mse(&fsdp.forward(&x)?, &y)? / self.micro_batches as f64)?;
                losses.extend(numbers([&loss]));
                if micro_batch + 1 < self.micro_batches {
                    fsdp.backward_no_sync(&loss)?;
                } else {
                    last = Some(fsdp.backward(&loss)?);
                }
            }
            let mut grads = last.expect("a micro-batch");
            if let Some(max_norm) = self.max_norm {
                fsdp.clip_grad_norm(&mut grads, max_norm)?;
            }
            optimizer.step(&grads)?;
        }
        Ok((losses, parameters(fsdp)?))
    }

    /// Trains in a single process on all ranks' batches.
    fn alone(&self) -> candle_core::Result<(Vec<Vec<f64>>, Vec<f64>)> {
        let model = Alone::new(self.seed, self.dtype)?;
        let mut optimizer = AnyOptimizer::new(self.optimizer, model.list())?;
        let mut losses = vec![vec![]; self.world_size];
        for step in 0..STEPS {
            let mut all = vec![];
            for (rank, losses) in losses.iter_mut().enumerate() {
                for micro_batch in 0..self.micro_batches {
                    let (x, y) = self.batch(step, rank, micro_batch);
                    let loss = (loss::mse(&model.forward(&x)?, &y)? / self.micro_batches as f64)?;
                    losses.extend(numbers([&loss]));
                    all.push(loss);
                }
            }
            let loss = (Tensor::stack(&all, 0)?.sum_all()? / self.world_size as f64)?;
            let mut grads = loss.backward()?;
            if let Some(max_norm) = self.max_norm {
                clip_grad_norm(&mut grads, &model.list(), max_norm).expect("finite");
            }
            optimizer.step(&grads)?;
        }
        Ok((losses, model.values()))
    }

    #[track_caller]
    fn compare(&self, ranks: Vec<(Vec<f64>, Vec<f64>)>, tolerance: f64) {
        let (losses, parameters) = self.alone().expect("one process trains");
        for ((got, _), expected) in ranks.iter().zip(&losses) {
            assert_close(got, expected, tolerance);
        }
        assert_close(&ranks[0].1, &parameters, tolerance);
    }
}

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig { strategy, pack_elements: PACK, ..FsdpConfig::default() }
}

#[test]
fn equal_to_one_process_with_each_strategy_and_optimizer() {
    for world_size in 1..=4 {
        for strategy in STRATEGIES {
            for optimizer in 0..OPTIMIZERS {
                let run = Run { optimizer, ..Run::new(world_size) };
                run.compare(on_all_ranks(world_size, |comm| run.sharded(comm, &config(strategy))), 1e-9);
            }
        }
    }
}

#[test]
fn equal_in_f32_over_tcp() {
    for world_size in 1..=4 {
        let run = Run { dtype: DType::F32, seed: 5, ..Run::new(world_size) };
        run.compare(
            over_tcp(world_size, |comm| run.sharded(comm, &config(ShardingStrategy::FullShard))),
            1e-5,
        );
    }
}

#[test]
fn accumulation_and_clipping_equal_one_process() {
    for strategy in STRATEGIES {
        let run = Run { micro_batches: 3, max_norm: Some(0.05), optimizer: 2, ..Run::new(3) };
        run.compare(on_all_ranks(3, |comm| run.sharded(comm, &config(strategy))), 1e-9);
    }
}

#[test]
fn hybrid_sharding_equals_one_process() {
    for axes in [[("dp", 2), ("shard", 2)], [("dp", 1), ("shard", 4)], [("dp", 4), ("shard", 1)]] {
        for micro_batches in [1, 2] {
            let run = Run { micro_batches, max_norm: Some(0.1), ..Run::new(4) };
            let ranks = on_all_ranks(4, |comm| {
                let rank = comm.rank();
                let mesh = Mesh::new(comm, &axes)?;
                let vb = crate::common::builder(run.seed, run.dtype);
                let config = config(ShardingStrategy::FullShard);
                let fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &config, Mlp::new)?;
                run.train(&fsdp, rank)
            });
            run.compare(ranks, 1e-9);
        }
    }
}

#[test]
fn a_hybrid_of_other_axes_or_of_no_shards_is_refused() {
    let refused = |axes, strategy| {
        let lines = on_all_ranks(2, |comm| {
            let mesh = Mesh::new(comm, &[("dp", 2)])?;
            let vb = crate::common::builder(1, DType::F32);
            let config = config(strategy);
            Ok(Fsdp::hybrid(&mesh, axes, vb, &config, Mlp::new).map(drop).unwrap_err().to_string())
        });
        assert_eq!(lines[0], lines[1]);
        lines[0].clone()
    };
    let line = refused(("dp", "tp"), ShardingStrategy::FullShard);
    assert!(line.contains("tp") && line.contains("give one of dp"), "{line}");
    // The same axis for both: ranks that would count as replicas hold different shards.
    let line = refused(("dp", "dp"), ShardingStrategy::FullShard);
    assert!(line.contains("dp twice"), "{line}");
    let line = refused(("dp", "dp"), ShardingStrategy::NoShard);
    assert!(line.contains("the strategy is NoShard") && line.contains("the axis dp"), "{line}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn equal_however_it_is_cut(
        world_size in 1usize..=7,
        strategy in 0usize..3,
        optimizer in 0..OPTIMIZERS,
        seed in 0u64..1000,
        micro_batches in 1usize..4,
        pack_elements in prop_oneof![Just(0), Just(usize::MAX), 1usize..80],
    ) {
        let run = Run { optimizer, seed, micro_batches, ..Run::new(world_size) };
        let config = FsdpConfig { pack_elements, ..config(STRATEGIES[strategy]) };
        run.compare(on_all_ranks(world_size, |comm| run.sharded(comm, &config)), 1e-9);
    }
}

#[test]
fn accumulation_communicates_no_gradient_and_kept_units_nothing() {
    let sent = |strategy, backwards| {
        on_all_ranks(2, |comm| -> Result<(u64, u64)> {
            let fsdp = Mlp::fsdp(comm.clone(), 1, DType::F32, &config(strategy))?;
            let x = values(1, &[2, INPUTS], DType::F32);
            fsdp.backward_no_sync(&fsdp.forward(&x)?.sqr()?.sum_all()?)?;
            let before = comm.stats();
            for _ in 0..backwards {
                fsdp.backward_no_sync(&fsdp.forward(&x)?.sqr()?.sum_all()?)?;
            }
            let after = comm.stats();
            Ok((after.operations - before.operations, after.bytes_sent - before.bytes_sent))
        })[0]
    };
    assert_eq!(sent(ShardingStrategy::ShardGradOp, 3), (0, 0));
    assert_eq!(sent(ShardingStrategy::NoShard, 3), (0, 0));
    let (operations, _) = sent(ShardingStrategy::FullShard, 1);
    // Parts of the three units, gathered in forward and in backward.
    assert_eq!(operations, 2 * (2 + 3 + 1));
}
