//! Reference results, computed by plain loops in f64.

use candle_core::{DType, Device, Tensor};
use comm::ReduceOp;

pub(crate) const DTYPES: [DType; 7] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];
pub(crate) const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

/// Returns a small integer that depends on rank and index; sums and products are exact in every dtype.
pub(crate) fn value(rank: usize, index: usize, op: ReduceOp) -> f64 {
    match op {
        ReduceOp::Product => [1.0, 2.0, 1.0, 1.0][(rank + index) % 4],
        _ => ((7 * rank + 3 * index) % 11) as f64,
    }
}

pub(crate) fn input(rank: usize, len: usize, op: ReduceOp, dtype: DType) -> Tensor {
    let values: Vec<f64> = (0..len).map(|index| value(rank, index, op)).collect();
    on_device(Tensor::from_vec(values, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

pub(crate) fn reduced(world_size: usize, index: usize, op: ReduceOp) -> f64 {
    let values = (0..world_size).map(|rank| value(rank, index, op));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Avg => values.sum::<f64>() / world_size as f64,
        ReduceOp::Product => values.product(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
    }
}

/// Checks that the tensor equals the expected values rounded to its dtype.
pub(crate) fn assert_equal(tensor: &Tensor, expected: impl Iterator<Item = f64>, what: &str) {
    let expected: Vec<f64> = expected.collect();
    let rounded = Tensor::from_vec(expected.clone(), expected.len(), &Device::Cpu).unwrap();
    // f16 and bf16 are reduced in f32, so the expected values are rounded to f32 first.
    let through = if tensor.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let through = if tensor.dtype().is_float() { through } else { DType::F64 };
    let rounded = rounded.to_dtype(through).unwrap().to_dtype(tensor.dtype()).unwrap();
    assert_eq!(values(tensor), values(&rounded), "{what}");
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Conversions are made on the CPU, since CUDA cannot convert empty tensors.
pub(crate) fn on_device(tensor: Tensor) -> Tensor {
    tensor.to_device(&crate::device()).unwrap()
}
