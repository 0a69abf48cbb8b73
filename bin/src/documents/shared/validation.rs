//! Distributed validation: loss and accuracy of a classifier over a whole data set, each sample counted once.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use cli::error::Result;
use comm::{Communicator, Operation, ReduceOp};
use sampler::{DistributedSampler, DistributedSamplerConfig, Tail};
use serde::{Deserialize, Serialize};

/// Configuration of a validation, the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidationConfig {
    /// Samples in the set. Default 0.
    pub samples: usize,
    /// Samples per forward pass, independent of the number of ranks. Default 1.
    pub batch_size: usize,
    /// Number of classes. Default 2.
    pub classes: usize,
}

impl Default for ValidationConfig {
    fn default() -> Self {
        Self { samples: 0, batch_size: 1, classes: 2 }
    }
}

/// Result of a validation over all samples of a set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Sum of the samples' cross-entropies.
    pub loss_sum: f64,
    /// Indexed by class.
    pub classes: Vec<ClassCount>,
}

/// Counts for the samples of one class, or of all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassCount {
    /// Samples whose class was predicted correctly.
    pub correct: u64,
    /// All samples.
    pub samples: u64,
}

impl ClassCount {
    /// Returns the fraction predicted correctly, from 0 to 1; NaN if there is no sample.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.samples as f64
    }
}

impl Validation {
    /// Returns the sum over all classes.
    pub fn total(&self) -> ClassCount {
        let add = |sum: ClassCount, class: &ClassCount| ClassCount {
            correct: sum.correct + class.correct,
            samples: sum.samples + class.samples,
        };
        self.classes.iter().fold(ClassCount::default(), add)
    }

    /// Returns the mean cross-entropy over samples; NaN if there is no sample.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.total().samples as f64
    }
}

/// Evaluates a model on a data set divided over the ranks; every rank gets the sums over all samples.
///
/// Whole batches are distributed over the ranks. So each batch is computed as in a single process, and the result is
/// bitwise equal to that of one process, whatever the number of ranks. `forward` returns the logits `(samples,
/// classes)` and the targets `(samples)` of a range of samples. The class with the argmax logit is the prediction;
/// the first of equal ones.
///
/// # Cost
/// Two all-reduces: of 8 bytes for each batch, and of 16 for each class.
///
/// # Errors
/// Those of `forward`; logits or targets of another shape; a target out of range; a rank that failed.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use bin::documents::shared::validation::{ValidationConfig, validate};
///
/// let config = ValidationConfig { samples: 5, batch_size: 2, classes: 2 };
/// let on_ranks = comm::Local::run(3, |comm| {
///     let forward = |range: std::ops::Range<usize>| {
///         let logits: Vec<f32> = range.clone().flat_map(|sample| [sample as f32, 2.5]).collect();
///         let targets = Tensor::zeros(range.len(), candle_core::DType::U32, &Device::Cpu)?;
///         Ok((Tensor::from_vec(logits, (range.len(), 2), &Device::Cpu)?, targets))
///     };
///     Ok(validate(comm, &config, forward).expect("nothing fails"))
/// })?;
/// assert_eq!((on_ranks[2].total().correct, on_ranks[2].total().samples), (2, 5));
/// assert_eq!(on_ranks[0], on_ranks[2]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn validate(
    comm: &dyn Communicator,
    config: &ValidationConfig,
    mut forward: impl FnMut(Range<usize>) -> Result<(Tensor, Tensor)>,
) -> Result<Validation> {
    let batch_size = config.batch_size.max(1);
    let batches = config.samples.div_ceil(batch_size);
    let share = DistributedSampler::new(DistributedSamplerConfig {
        dataset_len: batches,
        num_replicas: comm.world_size(),
        rank: comm.rank(),
        shuffle: false,
        tail: Tail::Uneven,
        ..DistributedSamplerConfig::default()
    })?;
    let mut losses = vec![0.0; batches];
    let mut counts = vec![0; 2 * config.classes];
    for batch in share.iter()? {
        let first = batch * batch_size;
        let (logits, targets) = forward(first..(first + batch_size).min(config.samples))?;
        losses[batch] = count(&logits, &targets, &mut counts)?;
    }
    // Each batch's loss is nonzero on one rank only, and adding zeros changes nothing.
    let losses = sum(comm, Tensor::new(losses, &Device::Cpu)?)?.to_vec1::<f64>()?;
    let counts = sum(comm, Tensor::new(counts, &Device::Cpu)?)?.to_vec1::<i64>()?;
    let class = |pair: &[i64]| ClassCount { correct: pair[0] as u64, samples: pair[1] as u64 };
    Ok(Validation { loss_sum: losses.iter().sum(), classes: counts.chunks_exact(2).map(class).collect() })
}

fn sum(comm: &dyn Communicator, tensor: Tensor) -> comm::Result<Tensor> {
    comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    Ok(tensor)
}

/// Adds a batch to `counts` (correct and total samples of each class, alternating) and returns the sum of its losses.
fn count(logits: &Tensor, targets: &Tensor, counts: &mut [i64]) -> Result<f64> {
    let classes = counts.len() / 2;
    let samples = targets.dims1()?;
    if logits.dims() != [samples, classes] {
        let (expected, got) = (vec![samples, classes], logits.dims().to_vec());
        let mismatch = ops::Error::ShapeMismatch { operation: "validation", tensor: "logits", expected, got };
        return Err(candle_core::Error::from(mismatch).into());
    }
    let logits = logits.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    let targets = targets.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut loss = 0.0;
    for (row, (logits, &target)) in logits.iter().zip(&targets).enumerate() {
        let Some(class) = usize::try_from(target).ok().filter(|class| *class < classes) else {
            let unknown = ops::Error::TargetOutOfRange { row, target, classes, ignore_index: None };
            return Err(candle_core::Error::from(unknown).into());
        };
        let found = argmax(logits);
        let total: f64 = logits.iter().map(|logit| (logit - logits[found]).exp()).sum();
        loss += total.ln() - (logits[class] - logits[found]);
        counts[2 * class] += i64::from(found == class);
        counts[2 * class + 1] += 1;
    }
    Ok(loss)
}

/// Returns the index of the highest value, the first of equal ones; NaN counts as higher than any number, as in
/// PyTorch.
pub fn argmax(values: &[f64]) -> usize {
    let mut best = 0;
    for (place, value) in values.iter().enumerate() {
        if !values[best].is_nan() && (value.is_nan() || *value > values[best]) {
            best = place;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: usize = 7;

    /// A linear layer on samples generated from their indices, so that batches go through a matrix product.
    fn forward(range: Range<usize>) -> Result<(Tensor, Tensor)> {
        let mut generator = sampler::Generator::new(5);
        let weight = Tensor::from_vec(generator.randn(40 * CLASSES)?, (40, CLASSES), &Device::Cpu)?;
        let rows: Vec<f32> =
            range.clone().flat_map(|i| sampler::Generator::new(i as u64).randn(40).unwrap()).collect();
        let targets: Vec<u32> = range.clone().map(|i| (i * i) as u32 % CLASSES as u32).collect();
        let x = Tensor::from_vec(rows, (range.len(), 40), &Device::Cpu)?;
        Ok((x.matmul(&weight)?, Tensor::new(targets, &Device::Cpu)?))
    }

    fn on_ranks(ranks: usize, samples: usize, batch_size: usize) -> Vec<Validation> {
        let config = ValidationConfig { samples, batch_size, classes: CLASSES };
        comm::Local::run(ranks, |comm| Ok(validate(comm, &config, forward).unwrap())).unwrap()
    }

    #[test]
    fn any_number_of_ranks_gives_what_one_gives_to_the_bit() {
        for (samples, batch_size) in [(101, 8), (101, 1), (64, 64), (3, 2), (1, 4), (0, 4), (97, 200)] {
            let alone = on_ranks(1, samples, batch_size).remove(0);
            assert_eq!(alone.total().samples, samples as u64);
            for ranks in 2..=5 {
                for other in on_ranks(ranks, samples, batch_size) {
                    assert_eq!(other.loss_sum.to_bits(), alone.loss_sum.to_bits(), "{ranks}, {samples}");
                    assert_eq!(other.classes, alone.classes, "{ranks} ranks, {samples} samples");
                }
            }
        }
    }

    #[test]
    fn the_sums_are_those_of_the_formula() {
        let (logits, targets) = forward(0..50).unwrap();
        let loss = candle_nn::loss::cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
        let right = logits.argmax(1).unwrap().eq(&targets).unwrap().to_vec1::<u8>().unwrap();
        let got = on_ranks(3, 50, 8).remove(0);
        assert!((got.loss() - f64::from(loss)).abs() < 1e-5, "{} and {loss}", got.loss());
        assert_eq!(got.total().correct, right.iter().map(|right| u64::from(*right)).sum::<u64>());
        let of_class = |class| (0..50).filter(|i| i * i % CLASSES == class).count() as u64;
        assert_eq!(
            got.classes.iter().map(|class| class.samples).collect::<Vec<_>>(),
            (0..7).map(of_class).collect::<Vec<_>>()
        );
    }

    #[test]
    fn what_is_not_finite_comes_through() {
        let config = ValidationConfig { samples: 4, batch_size: 1, classes: 2 };
        let strange = |range: Range<usize>| {
            let logit = [f32::NAN, 1.0, 2.0, 3.0][range.start];
            Ok((Tensor::new(&[[0.0, logit]], &Device::Cpu)?, Tensor::new(&[1u32], &Device::Cpu)?))
        };
        let on_ranks = comm::Local::run(2, |comm| Ok(validate(comm, &config, strange).unwrap())).unwrap();
        assert!(on_ranks.iter().all(|got| got.loss().is_nan() && got.total().correct == 4));
        assert_eq!(
            (argmax(&[1.0, 3.0, 3.0]), argmax(&[f64::NAN, 9.0]), argmax(&[-1.0, f64::NAN])),
            (1, 0, 1)
        );
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let mut counts = vec![0; 4];
        let logits = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
        let targets = |targets: &[i64]| Tensor::new(targets, &Device::Cpu).unwrap();
        for wrong in [&[0, 2][..], &[-1, 0]] {
            let line = count(&logits, &targets(wrong), &mut counts).unwrap_err().to_string();
            assert!(line.contains("class"), "{line}");
        }
        assert!(count(&logits, &targets(&[0]), &mut counts).is_err());
        assert!(count(&logits, &targets(&[0, 1]), &mut [0; 6]).is_err());
        assert!(count(&logits, &targets(&[0, 1]), &mut counts).is_ok());
    }
}
