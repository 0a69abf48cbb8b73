//! Benchmarks of matrix products: those of a Transformer of 27 million parameters on 1,024 tokens, in each precision.

use candle_core::{Device, Tensor};
use criterion::{BenchmarkId, Throughput};
use ops::Precision;

use crate::group::Group;

const TOKENS: usize = 1024;

pub(crate) fn bench(group: &mut Group<'_>) {
    for (inputs, outputs) in [(512, 512), (512, 2048), (2048, 512), (512, 8192)] {
        let random = |dims: (usize, usize)| Tensor::randn(0f32, 1.0, dims, &Device::Cpu).expect("it fits");
        let (x, weight) = (random((TOKENS, inputs)), random((outputs, inputs)));
        let transposed = weight.t().expect("a matrix");
        group.throughput(Throughput::Elements(2 * (TOKENS * inputs * outputs) as u64));
        for precision in [Precision::F32, Precision::F32High, Precision::Bf16] {
            let name = BenchmarkId::new(format!("{precision:?}"), format!("{inputs} to {outputs}"));
            group.bench_function(name, |bencher| {
                bencher.iter(|| precision.matmul(&x, &transposed).expect("they fit"))
            });
        }
    }
}
