//! Memory accounting: a rank holds a shard of everything, and two whole units.
#![allow(clippy::expect_used)]

mod common;

use candle_core::{DType, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, linear};
use common::{Comm, on_all_ranks, values};
use fsdp::{Fsdp, FsdpConfig, Memory, MixedPrecision, Result, ShardingStrategy, Unit};
use training::{Adam, AdamConfig};

const LAYERS: usize = 8;
const WIDTH: usize = 64;
/// Elements of a layer, each of which is a unit.
const UNIT: usize = (WIDTH + 1) * WIDTH;
const F32: usize = 4;

struct Deep(Vec<Unit<Linear>>);

impl Module for Deep {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(input.clone(), |x, layer| layer.forward(&x)?.tanh())
    }
}

fn train(comm: Comm, config: &FsdpConfig) -> Result<(Memory, Memory)> {
    let start = (0..LAYERS as u64).flat_map(|index| {
        let weight = (values(index, &[WIDTH, WIDTH], DType::F32) * 0.1).expect("on the CPU");
        [(format!("{index}.weight"), weight), (format!("{index}.bias"), values(index, &[WIDTH], DType::F32))]
    });
    let vb = VarBuilder::from_tensors(start.collect(), DType::F32, &candle_core::Device::Cpu);
    let fsdp = Fsdp::new(comm, vb, config, |units| {
        let layer = |index| units.pp(index).unit(|vb| linear(WIDTH, WIDTH, vb));
        Ok(Deep((0..LAYERS).map(layer).collect::<candle_core::Result<_>>()?))
    })?;
    let built = fsdp.memory();
    let mut optimizer = Adam::new(fsdp.vars(), AdamConfig::default())?;
    for step in 0..3 {
        let x = values(step, &[2, WIDTH], DType::F32);
        let grads = fsdp.backward(&fsdp.forward(&x)?.sqr()?.mean_all()?)?;
        optimizer.step(&grads)?;
    }
    Ok((built, fsdp.memory()))
}

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig { strategy, pack_elements: 100, ..FsdpConfig::default() }
}

/// Allows for padding of a few elements per part, and copies of small parameters.
fn close(bytes: usize, elements: usize) -> bool {
    bytes >= elements * F32 && bytes < (elements + LAYERS * 2 * 4 + 2 * WIDTH) * F32
}

#[test]
fn full_sharding_holds_its_part_and_two_units() {
    for world_size in 1..=4 {
        for (built, memory) in
            on_all_ranks(world_size, |comm| train(comm, &config(ShardingStrategy::FullShard)))
        {
            let shard = LAYERS * UNIT / world_size;
            assert!(close(built.parameters.peak, shard), "{world_size} ranks: {built:?}");
            assert!(close(memory.parameters.peak - 2 * UNIT * F32, shard), "{world_size} ranks: {memory:?}");
            // The next unit's gradients are computed before the averages of the previous unit are complete.
            assert!(
                memory.gradients.peak <= (shard + 2 * UNIT + 100) * F32,
                "{world_size} ranks: {memory:?}"
            );
            assert!(close(memory.gradients.live, shard), "{world_size} ranks: {memory:?}");
        }
    }
}

#[test]
fn other_strategies_hold_more() {
    for (_, memory) in on_all_ranks(2, |comm| train(comm, &config(ShardingStrategy::ShardGradOp))) {
        let elements = LAYERS * UNIT / 2 + LAYERS * UNIT;
        assert!(close(memory.parameters.peak, elements), "{memory:?}");
        assert!(memory.gradients.peak <= (LAYERS * UNIT / 2 + 2 * UNIT + 100) * F32, "{memory:?}");
    }
    for (_, memory) in on_all_ranks(2, |comm| train(comm, &config(ShardingStrategy::NoShard))) {
        assert!(close(memory.parameters.peak, 2 * LAYERS * UNIT), "{memory:?}");
    }
}

#[test]
fn half_precision_halves_what_is_gathered() {
    let mixed_precision = MixedPrecision { param_dtype: Some(DType::BF16), ..MixedPrecision::default() };
    let config = FsdpConfig { mixed_precision, ..config(ShardingStrategy::FullShard) };
    for (_, memory) in on_all_ranks(2, |comm| train(comm, &config)) {
        let shard = LAYERS * UNIT / 2;
        assert!(close(memory.parameters.peak - UNIT * F32, shard), "{memory:?}");
        assert!(memory.gradients.peak <= (shard + UNIT + 100) * F32, "{memory:?}");
    }
}
