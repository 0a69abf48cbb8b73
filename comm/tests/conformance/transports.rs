//! Sums are bitwise equal over all transports.

use std::sync::Mutex;

use candle_core::{Device, Tensor};
use comm::ReduceOp;

use super::Backend;

/// Returns the bits of an all-reduce and a reduce-scatter on each rank, for numbers whose sums are not exact.
fn bits(backend: &dyn Backend, world_size: usize, len: usize) -> Vec<Vec<u32>> {
    let found = Mutex::new(vec![Vec::new(); world_size]);
    backend.run(world_size, &|comm| {
        let own: Vec<f32> = (0..len * world_size)
            .map(|index| ((index * 7919 + comm.rank() * 104_729) % 10_007) as f32 / 977.0 - 5.0)
            .collect();
        let (sum, input) = (Tensor::new(&own[..], &Device::Cpu)?, Tensor::new(&own[..], &Device::Cpu)?);
        comm.all_reduce(&sum, ReduceOp::Sum)?.wait()?;
        let output = Tensor::new(&own[..len], &Device::Cpu)?;
        comm.reduce_scatter(&output, &input, ReduceOp::Avg)?.wait()?;
        let values = [sum.to_vec1::<f32>()?, output.to_vec1::<f32>()?].concat();
        found.lock().unwrap()[comm.rank()] = values.iter().map(|value| value.to_bits()).collect();
        Ok(())
    });
    found.into_inner().unwrap()
}

/// Lengths from few elements to several segments.
pub(crate) fn compare(backends: &[&dyn Backend]) {
    for world_size in [2, 3, 5] {
        for len in [7, 5_000, 300_000] {
            let [first, others @ ..] = backends else { return };
            let expected = bits(*first, world_size, len);
            for other in others {
                assert!(bits(*other, world_size, len) == expected, "{world_size} ranks, {len} elements each");
            }
        }
    }
}
