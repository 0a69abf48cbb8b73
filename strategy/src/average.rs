//! Averaging of tensors over a group, several at a time, while the caller computes the next ones.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use tracing::Span;

use comm::{Communicator, Operation, ReduceOp, Result, Work};

/// Averages tensors over the ranks of a group, in place and in buckets: a bucket is sent when it is full, while the caller
/// goes on, as a backward pass does with gradients. Every rank adds tensors of the same shapes in the same order.
///
/// # Cost
/// One all-reduce per bucket.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use comm::{Communicator, Local};
/// use strategy::BucketAverage;
///
/// let means = Local::run_shared(2, |comm| {
///     let mut average = BucketAverage::new(comm.clone(), 1 << 20);
///     let gradients = [1.0, 2.0].map(|value| Tensor::full(value * comm.rank() as f64, 3, &Device::Cpu));
///     let gradients = gradients.into_iter().collect::<Result<Vec<_>, _>>()?;
///     gradients.iter().try_for_each(|gradient| average.add(gradient))?;
///     let used = average.any(&[comm.rank() == 0, false], &Device::Cpu)?;
///     average.wait()?;
///     assert_eq!(used.to_vec1::<u8>()?, [1, 0]);
///     Ok(gradients[1].to_vec1::<f64>()?)
/// })?;
/// assert_eq!(means, vec![vec![1.0; 3]; 2]);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug)]
pub struct BucketAverage {
    comm: Arc<dyn Communicator>,
    bucket_bytes: usize,
    /// Tensors that are to be sent together with the next ones; all of one dtype.
    bucket: Vec<Tensor>,
    bytes: usize,
    /// Flags that are to be combined after what was sent, and before what comes next.
    flags: Option<Tensor>,
    works: Vec<Work>,
}

impl BucketAverage {
    /// Creates an average over the ranks of `comm`. A bucket is full when it has at least `bucket_bytes` bytes.
    pub fn new(comm: Arc<dyn Communicator>, bucket_bytes: usize) -> Self {
        Self { comm, bucket_bytes, bucket: Vec::new(), bytes: 0, flags: None, works: Vec::new() }
    }

    /// Adds a contiguous tensor, which contains the mean after [`wait`](Self::wait). A bucket has one dtype: a tensor of
    /// another one starts the next bucket.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn add(&mut self, tensor: &Tensor) -> Result<()> {
        if self.bucket.first().is_some_and(|first| first.dtype() != tensor.dtype()) {
            self.flush()?;
        }
        self.bytes += tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.bucket.push(tensor.clone());
        if self.bytes >= self.bucket_bytes { self.flush() } else { Ok(()) }
    }

    /// Sends the bucket that is not full yet, if there is one.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn flush(&mut self) -> Result<()> {
        if let Some((span, operation)) = self.take_bucket()? {
            self.works.push(span.in_scope(|| self.comm.submit(operation))?);
        }
        Ok(())
    }

    /// Combines flags over the ranks, such as which parameters have a gradient. After [`wait`](Self::wait), the returned
    /// tensor of u8 contains ones where any rank has true.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn any(&mut self, flags: &[bool], device: &Device) -> Result<Tensor> {
        self.flush()?;
        self.send_flags()?;
        let flags = Tensor::from_iter(flags.iter().map(|flag| u8::from(*flag)), device)?;
        self.flags = Some(flags.clone());
        Ok(flags)
    }

    /// Sends what is left, and waits until everything that was sent is averaged.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn wait(&mut self) -> Result<()> {
        // Nothing is left to overlap the last operation with: it runs on this thread, which is faster.
        if let Some((span, operation)) = self.take_bucket()? {
            span.in_scope(|| self.comm.run(operation))?;
        } else if let Some(flags) = self.flags.take() {
            self.comm.run(combine(flags))?;
        }
        std::mem::take(&mut self.works).into_iter().try_for_each(Work::wait)
    }

    /// Returns the operation that averages the bucket, if there is one, after sending what precedes it.
    fn take_bucket(&mut self) -> Result<Option<(Span, Operation)>> {
        let tensors = std::mem::take(&mut self.bucket);
        self.bytes = 0;
        if tensors.is_empty() {
            return Ok(None);
        }
        self.send_flags()?;
        let span = tracing::info_span!("bucket", tensors = tensors.len());
        Ok(Some((span, Operation::AllReduceCoalesced { tensors, op: ReduceOp::Avg })))
    }

    fn send_flags(&mut self) -> Result<()> {
        if let Some(flags) = self.flags.take() {
            self.works.push(self.comm.submit(combine(flags))?);
        }
        Ok(())
    }
}

fn combine(flags: Tensor) -> Operation {
    Operation::AllReduce { tensor: flags, op: ReduceOp::Max }
}

/// Replaces gradients by their means over the ranks of `comm`. A variable of which no rank has a gradient has none afterwards;
/// where only some ranks have one, it counts as zero on the others. Every rank passes the same variables, in the same order.
///
/// # Cost
/// Two all-reduces: of a byte for each variable, and of the gradients.
///
/// # Errors
/// Failures of communication.
pub fn average_gradients(
    comm: &Arc<dyn Communicator>,
    vars: &[Var],
    gradients: &mut GradStore,
) -> Result<()> {
    let Some(first) = vars.first() else { return Ok(()) };
    let mut average = BucketAverage::new(comm.clone(), usize::MAX);
    let own: Vec<bool> = vars.iter().map(|var| gradients.get(var).is_some()).collect();
    let any = average.any(&own, first.device())?;
    average.wait()?;
    for (var, any) in vars.iter().zip(any.to_vec1::<u8>()?) {
        if any == 0 {
            continue;
        }
        let own = match gradients.remove(var) {
            Some(gradient) => gradient.contiguous()?,
            None => var.as_detached_tensor().zeros_like()?,
        };
        average.add(&own)?;
        gradients.insert(var, own);
    }
    average.wait()
}
