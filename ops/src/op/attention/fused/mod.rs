//! Fused attention on a CPU: blocks of queries and keys, products through `gemm`, heads in parallel, no full score
//! matrix.

mod block;
mod heads;

use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor, bail};

use super::{AttentionCall, NAME};
use crate::SavedBytes;
use crate::dense::{dense, with_numbers};
use crate::lock::lock;
use crate::product::Accumulator;
use crate::recompute::copied;

pub(super) struct Fused {
    call: AttentionCall,
    /// Whether backward will follow, or results are recorded for recomputation.
    tracked: bool,
    /// Logarithm of each query's sum of exponentials, head by head, for backward.
    log_sums: LogSums,
    /// Output and log-sums of an earlier run, where the operation is recomputed.
    known: Option<Vec<Tensor>>,
    #[expect(dead_code, reason = "releases its count when dropped")]
    kept: SavedBytes,
}

/// Queries, keys and values; in backward also the output and its gradient.
type Inputs<'a, T, const N: usize> = [&'a [T]; N];

/// Logarithms of the queries' sums of exponentials; `None` until forward has computed them.
#[derive(Clone, Default)]
pub(super) struct LogSums(Arc<Mutex<Option<CpuStorage>>>);

impl LogSums {
    /// Copies them to a tensor.
    pub(super) fn to_tensor(&self) -> candle_core::Result<Tensor> {
        match &*lock(&self.0) {
            Some(CpuStorage::F32(sums)) => Tensor::new(&sums[..], &Device::Cpu),
            Some(CpuStorage::F64(sums)) => Tensor::new(&sums[..], &Device::Cpu),
            _ => bail!("{NAME}: backward before forward"),
        }
    }
}

impl Fused {
    pub(super) fn new(
        call: AttentionCall,
        tracked: bool,
        kept: SavedBytes,
        known: Option<Vec<Tensor>>,
    ) -> Self {
        Self { call, tracked, log_sums: LogSums::default(), known, kept }
    }

    pub(super) fn log_sums(&self) -> LogSums {
        self.log_sums.clone()
    }

    fn mixed<T: Accumulator>(&self, parts: [(&CpuStorage, &Layout); 3]) -> candle_core::Result<CpuStorage> {
        if let Some([mixed, sums]) = self.known.as_deref()
            && mixed.shape() == parts[0].1.shape()
        {
            *lock(&self.log_sums.0) = Some(copied(sums)?.0);
            return Ok(copied(mixed)?.0);
        }
        let [q, k, v] = parts.map(|(storage, layout)| dense::<T>(storage, layout));
        let (mixed, log_sums) = self.call.forward([q?, k?, v?])?;
        let log_sums = self.tracked.then(|| T::to_cpu_storage_owned(log_sums));
        *lock(&self.log_sums.0) = log_sums;
        Ok(T::to_cpu_storage_owned(mixed))
    }

    fn gradients<T: Accumulator>(&self, tensors: [&Tensor; 5]) -> candle_core::Result<[Option<Tensor>; 3]> {
        let saved = lock(&self.log_sums.0);
        let Some(log_sums) = &*saved else { bail!("{NAME}: backward before forward") };
        let log_sums = T::cpu_storage_as_slice(log_sums)?;
        let found = self.call.gradients(tensors, log_sums)?;
        let [q, k, v, _, _] = tensors;
        let of = |numbers, like: &Tensor| Tensor::from_vec(numbers, like.shape(), like.device()).map(Some);
        let [of_q, of_k, of_v] = found;
        Ok([of(of_q, q)?, of(of_k, k)?, of(of_v, v)?])
    }
}

impl AttentionCall {
    /// Returns the gradients of queries, keys and values; the tensors are these, the result and its gradient.
    pub(super) fn gradients<T: Accumulator>(
        &self,
        [q, k, v, mixed, gradient]: [&Tensor; 5],
        log_sums: &[T],
    ) -> candle_core::Result<[Vec<T>; 3]> {
        with_numbers(q, |q| {
            with_numbers(k, |k| {
                with_numbers(v, |v| {
                    with_numbers(mixed, |mixed| {
                        with_numbers(gradient, |g| self.backward([q, k, v, mixed, g], log_sums))
                    })
                })
            })
        })
    }
}

impl CustomOp3 for Fused {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let parts = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let mixed = match q {
            CpuStorage::F32(_) => self.mixed::<f32>(parts)?,
            CpuStorage::F64(_) => self.mixed::<f64>(parts)?,
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((mixed, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mixed: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let [of_q, of_k, of_v] = match q.dtype() {
            DType::F32 => self.gradients::<f32>([q, k, v, mixed, &gradient])?,
            _ => self.gradients::<f64>([q, k, v, mixed, &gradient])?,
        };
        Ok((of_q, of_k, of_v))
    }
}
