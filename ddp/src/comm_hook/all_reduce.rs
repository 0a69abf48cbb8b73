//! Communication hook without compression: all-reduces each bucket.

use candle_core::Tensor;
use comm::{Operation, ReduceOp};

use super::{BucketHook, GradBucket, Reduction};
use crate::Result;

#[derive(Debug)]
pub(super) struct AllReduce;

impl BucketHook for AllReduce {
    fn begin(&self, bucket: GradBucket) -> Result<Box<dyn Reduction>> {
        Ok(Box::new(SingleAllReduce(Some(bucket.flat))))
    }
}

/// A single averaging all-reduce, in place.
pub(super) struct SingleAllReduce(pub(super) Option<Tensor>);

impl Reduction for SingleAllReduce {
    fn next(&mut self) -> Result<Option<Operation>> {
        Ok(self.0.take().map(|tensor| Operation::AllReduce { tensor, op: ReduceOp::Avg }))
    }
}
