//! Test helpers: ranks as threads, and small models with known values.
#![allow(dead_code)]

pub(crate) mod layers;
pub(crate) mod training;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use comm::{Communicator, Local, LocalConfig};
use ddp::{Ddp, DdpConfig, Result};

pub(crate) type Comm = Arc<dyn Communicator>;

/// Runs `body` on each rank of a new group of threads, and returns the results; `None` for a rank that panicked.
pub(crate) fn on_ranks<T: Send>(
    world_size: usize,
    body: impl Fn(Comm) -> Result<T> + Sync,
) -> Vec<Option<Result<T>>> {
    let group = Local::group(world_size, &LocalConfig::default()).expect("a group of threads");
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group.into_iter().map(|comm| scope.spawn(move || body(Arc::new(comm)))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

/// Does the same, and panics if a rank fails.
pub(crate) fn on_all_ranks<T: Send>(world_size: usize, body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<T> {
    let results = on_ranks(world_size, body).into_iter().enumerate();
    results
        .map(|(rank, result)| result.expect("no panic").unwrap_or_else(|e| panic!("rank {rank}: {e}")))
        .collect()
}

/// Returns deterministic pseudo-random numbers between -1 and 1.
pub(crate) fn values(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let len = shape.iter().product::<usize>();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    };
    let values: Vec<f64> = (0..len).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("on the CPU")
}

/// Returns a builder over these parameters, with values derived from the seed.
pub(crate) fn builder(seed: u64, parameters: &[(&str, &[usize])], dtype: DType) -> VarBuilder<'static> {
    let draw = |(index, (name, shape)): (usize, &(&str, &[usize]))| {
        (name.to_string(), values(seed * 1000 + index as u64, shape, dtype))
    };
    let tensors: HashMap<String, Tensor> = parameters.iter().enumerate().map(draw).collect();
    VarBuilder::from_tensors(tensors, dtype, &Device::Cpu)
}

pub(crate) const INPUTS: usize = 5;
pub(crate) const OUTPUTS: usize = 3;

/// Linear layers with tanh between them.
pub(crate) struct Mlp(Vec<Linear>);

impl Mlp {
    const WIDTHS: [usize; 5] = [INPUTS, 8, 7, 6, OUTPUTS];

    pub(crate) fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let layer =
            |(index, widths): (usize, &[usize])| linear(widths[0], widths[1], vb.pp(format!("l{index}")));
        Ok(Self(Self::WIDTHS.windows(2).enumerate().map(layer).collect::<candle_core::Result<_>>()?))
    }

    pub(crate) fn builder(seed: u64, dtype: DType) -> VarBuilder<'static> {
        let shapes: [(&str, &[usize]); 8] = [
            ("l0.weight", &[8, 5]),
            ("l0.bias", &[8]),
            ("l1.weight", &[7, 8]),
            ("l1.bias", &[7]),
            ("l2.weight", &[6, 7]),
            ("l2.bias", &[6]),
            ("l3.weight", &[3, 6]),
            ("l3.bias", &[3]),
        ];
        builder(seed, &shapes, dtype)
    }

    /// Rank 0's seed is 1. The other ranks start with different values, and must get rank 0's.
    pub(crate) fn ddp(comm: Comm, dtype: DType, config: &DdpConfig) -> Result<Ddp<Self>> {
        let vb = Self::builder(1 + comm.rank() as u64, dtype);
        Ddp::new(comm, vb, config, Self::new)
    }
}

impl Module for Mlp {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let last = self.0.len() - 1;
        let layer = |input: Tensor, (index, layer): (usize, &Linear)| {
            let output = layer.forward(&input)?;
            if index == last { Ok(output) } else { output.tanh() }
        };
        self.0.iter().enumerate().try_fold(input.clone(), layer)
    }
}

/// Returns all elements of some tensors, exactly.
pub(crate) fn numbers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<f64> {
    let one = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    tensors.into_iter().flat_map(|tensor| one(tensor).expect("on the CPU")).collect()
}

pub(crate) fn parameters_of<M>(ddp: &Ddp<M>) -> Vec<f64> {
    numbers(ddp.parameters().iter().map(|parameter| parameter.var().as_tensor()))
}

#[track_caller]
pub(crate) fn assert_close(left: &[f64], right: &[f64], tolerance: f64) {
    assert_eq!(left.len(), right.len());
    for (index, (left, right)) in left.iter().zip(right).enumerate() {
        let scale = left.abs().max(right.abs()).max(1.0);
        assert!((left - right).abs() <= tolerance * scale, "at {index}: {left} and {right}");
    }
}

/// A model that consists of the parameters `a` = [1, 2], `b` = [3, 4] and `c` = [5, 6].
pub(crate) struct Abc {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) c: Tensor,
}

pub(crate) fn abc(comm: Comm, dtype: DType, config: &DdpConfig) -> Result<Ddp<Abc>> {
    let pair = |x: f64| Tensor::new(&[x, x + 1.0], &Device::Cpu);
    let tensors: HashMap<String, Tensor> =
        HashMap::from([("a".into(), pair(1.0)?), ("b".into(), pair(3.0)?), ("c".into(), pair(5.0)?)]);
    let vb = VarBuilder::from_tensors(tensors, dtype, &Device::Cpu);
    Ddp::new(comm, vb, config, |vb| Ok(Abc { a: vb.get(2, "a")?, b: vb.get(2, "b")?, c: vb.get(2, "c")? }))
}

/// Returns the elements of each parameter's gradient.
pub(crate) fn gradients<M>(ddp: &Ddp<M>, grads: &GradStore) -> Vec<Option<Vec<f64>>> {
    ddp.vars().iter().map(|var| grads.get(var).map(|grad| numbers([grad]))).collect()
}
