//! Communication hook that sends buckets of f32 and f64 as f16 or bf16.

use candle_core::{DType, Tensor};
use comm::Operation;

use super::all_reduce::SingleAllReduce;
use super::{BucketHook, GradBucket, Reduction};
use crate::Result;

/// An all-reduce would sum in f32 and send the sums in f32. Instead, an all-to-all gives each rank one part of the bucket
/// from all ranks, the rank averages it in f32, and an all-gather distributes the averages: everything is sent in 16 bits,
/// and is rounded twice, whatever the number of ranks.
#[derive(Debug)]
pub(super) struct Half {
    pub(super) dtype: DType,
    pub(super) world_size: usize,
}

impl BucketHook for Half {
    fn begin(&self, GradBucket { flat, .. }: GradBucket) -> Result<Box<dyn Reduction>> {
        if flat.dtype().size_in_bytes() <= self.dtype.size_in_bytes() {
            return Ok(Box::new(SingleAllReduce(Some(flat))));
        }
        let part = flat.elem_count().div_ceil(self.world_size);
        let padding = part * self.world_size - flat.elem_count();
        let half = flat.to_dtype(self.dtype)?.pad_with_zeros(0, 0, padding)?;
        Ok(Box::new(HalfReduction { flat, all: half, parts: self.world_size, sent: Sent::Nothing }))
    }
}

#[derive(Clone, Copy)]
enum Sent {
    Nothing,
    Parts,
    Means,
}

struct HalfReduction {
    flat: Tensor,
    /// What was last sent or received, padded so that it divides into equal parts.
    all: Tensor,
    parts: usize,
    sent: Sent,
}

impl Reduction for HalfReduction {
    fn next(&mut self) -> Result<Option<Operation>> {
        match self.sent {
            Sent::Nothing => {
                let received = self.all.zeros_like()?;
                let input = std::mem::replace(&mut self.all, received);
                let output = self.all.clone();
                self.sent = Sent::Parts;
                Ok(Some(Operation::AllToAll { output, input, output_counts: None, input_counts: None }))
            }
            Sent::Parts => {
                let own = self.all.reshape((self.parts, ()))?.to_dtype(DType::F32)?;
                let input = own.mean(0)?.to_dtype(self.all.dtype())?;
                let output = self.all.clone();
                self.sent = Sent::Means;
                Ok(Some(Operation::AllGather { output, input, counts: None }))
            }
            Sent::Means => {
                let means = self.all.narrow(0, 0, self.flat.elem_count())?;
                self.flat.slice_set(&means.to_dtype(self.flat.dtype())?, 0, 0)?;
                Ok(None)
            }
        }
    }

    fn has_more(&self) -> bool {
        matches!(self.sent, Sent::Parts)
    }
}
