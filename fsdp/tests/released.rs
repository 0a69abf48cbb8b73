//! Using a parameter outside of its unit's run is an error, whatever the operation.
#![allow(clippy::expect_used)]

mod common;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::Module;
use common::{Comm, INPUTS, Mlp, on_all_ranks, values};
use fsdp::{Fsdp, FsdpConfig, Result, ShardingStrategy};

type Operation = fn(&Tensor) -> candle_core::Result<Tensor>;

/// Operations of each kind that candle has.
const OPERATIONS: [Operation; 24] = [
    |w| w.matmul(&w.t()?),
    |w| w.t()?.matmul(w),
    |w| w + w,
    |w| w.broadcast_mul(&w.narrow(0, 0, 1)?),
    |w| w * 2.0,
    |w| w.exp(),
    |w| w.relu(),
    |w| w.powf(2.0),
    |w| w.elu(1.0),
    |w| w.sum_all(),
    |w| w.max(D::Minus1),
    |w| w.argmin(0),
    |w| w.t()?.contiguous()?.sqr(),
    |w| w.to_dtype(DType::F64),
    |w| Tensor::cat(&[w, w], 0),
    |w| Tensor::cat(&[w, w], 1),
    |w| w.index_select(&Tensor::new(&[0u32, 1], &Device::Cpu)?, 0),
    |w| w.gather(&Tensor::zeros((2, 2), DType::U32, &Device::Cpu)?, 1),
    |w| w.gt(w),
    |w| Tensor::zeros(w.dims(), DType::U8, &Device::Cpu)?.where_cond(w, w),
    |w| {
        w.unsqueeze(0)?.unsqueeze(0)?.conv2d(
            &w.narrow(0, 0, 2)?.narrow(1, 0, 2)?.unsqueeze(0)?.unsqueeze(0)?,
            0,
            1,
            1,
            1,
        )
    },
    |w| w.unsqueeze(0)?.unsqueeze(0)?.avg_pool2d(2),
    |w| w.arg_sort_last_dim(true),
    |w| candle_nn::ops::softmax_last_dim(w),
];

fn every_use_is_an_error(weight: &Tensor) {
    for (index, operation) in OPERATIONS.iter().enumerate() {
        for tensor in [
            weight.clone(),
            weight.detach(),
            weight.narrow(0, 1, 3).expect("a view"),
            weight.t().expect("a view"),
        ] {
            assert!(operation(&tensor).is_err(), "operation {index}");
        }
    }
    assert!(
        weight.to_vec2::<f32>().is_err() && weight.flatten_all().and_then(|w| w.to_vec1::<f32>()).is_err()
    );
    assert!(weight.get(0).and_then(|w| w.get(0)?.to_scalar::<f32>()).is_err());
    let other = Tensor::zeros(weight.dims(), DType::F32, &Device::Cpu).expect("on the CPU");
    assert!(other.slice_set(weight, 0, 0).is_err() && weight.slice_set(&other, 0, 0).is_err());
    assert!(weight.zero_set().is_err());
    // Operations that do not read elements still work.
    assert_eq!(weight.copy().expect("a copy").dims(), weight.dims());
    assert_eq!(weight.zeros_like().expect("zeros").to_vec2::<f32>().expect("defined")[0][0], 0.0);
}

fn weight(fsdp: &Fsdp<Mlp>) -> Result<Tensor> {
    Ok(fsdp.model()?.first.module().weight().clone())
}

fn step(fsdp: &Fsdp<Mlp>) -> Result<()> {
    let loss = fsdp.forward(&values(1, &[2, INPUTS], DType::F32))?.sqr()?.sum_all()?;
    fsdp.backward(&loss).map(drop)
}

fn fsdp(comm: Comm, strategy: ShardingStrategy) -> Result<Fsdp<Mlp>> {
    // As separate parts, or packed.
    let pack_elements = if comm.world_size() == 2 { 0 } else { usize::MAX };
    Mlp::fsdp(comm, 1, DType::F32, &FsdpConfig { strategy, pack_elements, ..FsdpConfig::default() })
}

#[test]
fn before_between_and_after_runs() {
    for world_size in 1..=2 {
        for strategy in
            [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard]
        {
            on_all_ranks(world_size, |comm| {
                let fsdp = fsdp(comm, strategy)?;
                let weight = weight(&fsdp)?;
                every_use_is_an_error(&weight);
                step(&fsdp)?;
                every_use_is_an_error(&weight);
                let inside = fsdp.model()?.first.run(|first| {
                    assert!(OPERATIONS[..20].iter().all(|operation| operation(first.weight()).is_ok()));
                    first.weight().sum_all()
                })?;
                assert!(inside.to_scalar::<f32>()?.is_finite());
                fsdp.model()?;
                every_use_is_an_error(&weight);
                drop(fsdp);
                every_use_is_an_error(&weight);
                Ok(())
            });
        }
    }
}

#[test]
fn what_is_computed_inside_a_run_stays() {
    on_all_ranks(2, |comm| {
        let fsdp = fsdp(comm, ShardingStrategy::FullShard)?;
        let doubled = fsdp.model()?.first.run(|first| first.weight() * 2.0)?;
        let copy = fsdp.model()?.first.run(|first| first.weight().detach() * 1.0)?;
        step(&fsdp)?;
        assert_eq!(doubled.to_vec2::<f32>()?, (copy * 2.0)?.to_vec2::<f32>()?);
        Ok(())
    });
}

#[test]
fn a_unit_that_returns_a_parameter_says_so() {
    let views: [Operation; 3] = [|w| Ok(w.clone()), |w| w.t(), |w| w.narrow(0, 1, 2)];
    let said = on_all_ranks(2, |comm| {
        let fsdp = fsdp(comm, ShardingStrategy::FullShard)?;
        let first = &fsdp.model()?.first;
        let lines = views.map(|view| first.run(|first| view(first.weight())).unwrap_err().to_string());
        assert!(first.run(|first| first.weight().copy())?.to_vec2::<f32>().is_ok());
        Ok(lines)
    });
    for line in said.concat() {
        assert!(line.contains("unit l0 returned one of its parameters"), "{line}");
    }
}

#[test]
fn a_loss_that_outlives_its_wrapper_gives_an_error() {
    let ends = on_all_ranks(2, |comm| {
        let fsdp = fsdp(comm, ShardingStrategy::FullShard)?;
        let loss = fsdp.forward(&values(1, &[2, INPUTS], DType::F32))?.sqr()?.sum_all()?;
        drop(fsdp);
        Ok(loss.backward().is_err())
    });
    assert_eq!(ends, [true, true]);
}

#[test]
fn a_run_that_fails_releases_its_parameters_and_the_next_one_works() {
    on_all_ranks(2, |comm| {
        let fsdp = fsdp(comm, ShardingStrategy::FullShard)?;
        let weight = weight(&fsdp)?;
        assert!(fsdp.forward(&values(1, &[2, INPUTS + 1], DType::F32)).is_err());
        every_use_is_an_error(&weight);
        step(&fsdp)
    });
}
