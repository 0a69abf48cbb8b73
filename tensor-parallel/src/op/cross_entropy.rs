//! Vocabulary-parallel cross-entropy: each rank has the logits of some classes.

use std::ops::Range;

use candle_core::{DType, Device, FloatDType, Tensor};
use comm::{Operation, ReduceOp};

use crate::{Context, Error, Result};

use super::with_kept_bytes;

/// Returns the mean over all rows of `ln(sum(exp(row))) - row[target]`, where each rank has its part of every row. No rank
/// ever holds a whole row: three numbers per row are exchanged.
///
/// # Shapes
/// Logits (.., this rank's classes) on each rank, in order of rank starting with rank 0; the number of classes may differ
/// between ranks. Targets: integers, of the shape of the logits without the last dimension, the same on every rank. The loss
/// has no dimensions and is bitwise equal on every rank.
/// # Cost
/// Two all-reduces in forward, one of one number per row and one per rank, the other of two numbers per row; none in
/// backward. A copy of the logits is kept for backward.
///
/// # Errors
/// Incompatible shapes, a target that is not a class, no rows; failures of communication.
///
/// # Source
/// Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019), section 3.
pub fn vocab_parallel_cross_entropy(logits: &Tensor, targets: &Tensor, context: &Context) -> Result<Tensor> {
    fused(logits, targets, context, Wanted::MeanLoss)
}

/// Returns the logarithm of each target's probability, of which [`vocab_parallel_cross_entropy`] is the negative mean.
///
/// # Shapes
/// Those of [`vocab_parallel_cross_entropy`]; the result is as the targets.
///
/// # Cost
/// That of [`vocab_parallel_cross_entropy`].
///
/// # Errors
/// Those of [`vocab_parallel_cross_entropy`].
pub fn vocab_parallel_log_probs(logits: &Tensor, targets: &Tensor, context: &Context) -> Result<Tensor> {
    fused(logits, targets, context, Wanted::LogProbs)
}

/// What is made of the log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wanted {
    MeanLoss,
    LogProbs,
}

fn fused(logits: &Tensor, targets: &Tensor, context: &Context, wanted: Wanted) -> Result<Tensor> {
    let wide = logits.to_dtype(ops::wide_dtype(logits.dtype()))?;
    let found = match wide.dtype() {
        DType::F64 => fused_in::<f64>(&wide, targets, context, wanted)?,
        _ => fused_in::<f32>(&wide, targets, context, wanted)?,
    };
    Ok(found.to_dtype(logits.dtype())?)
}

/// Returns the target of each row.
fn numbers_of(logits: &Tensor, targets: &Tensor) -> Result<Vec<i64>> {
    let refuse = |got: String, help: String| Err(Error::invalid("targets", got, help));
    let Some((_, rows)) = logits.dims().split_last() else {
        return refuse("logits without dimensions".into(), "give (.., classes)".into());
    };
    if targets.dims() != rows {
        return refuse(format!("the shape {:?}", targets.dims()), format!("the logits need {rows:?}"));
    }
    if targets.elem_count() == 0 {
        return refuse("no rows".into(), "a mean needs one at least".into());
    }
    Ok(targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?)
}

/// Returns each row's target as an index among this rank's classes; `None` if it is another rank's. `all` is the number of
/// classes of each rank.
fn own_targets(targets: Vec<i64>, all: &[usize], context: &Context) -> Result<Vec<Option<usize>>> {
    let (classes, own) = (all.iter().sum::<usize>(), all[context.rank()]);
    let first: usize = all[..context.rank()].iter().sum();
    let place = |(row, target): (usize, i64)| match usize::try_from(target) {
        Ok(class) if class < classes => Ok(class.checked_sub(first).filter(|place| *place < own)),
        _ => {
            let help = format!("there are {classes} classes");
            Err(Error::invalid("targets", format!("{target} in row {row}"), help))
        }
    };
    targets.into_iter().enumerate().map(place).collect()
}

/// Returns the maximum of each row over all ranks, and the number of classes of each rank, which is sent in the same
/// all-reduce.
fn row_maxima<T: FloatDType>(
    mut largest: Vec<T>,
    own: usize,
    logits: &Tensor,
    context: &Context,
) -> Result<(Vec<T>, Vec<usize>)> {
    /// Integers up to this are exact in f32.
    const MOST: usize = 1 << 24;
    if own > MOST {
        let help = format!("divide them over more ranks, so that each has {MOST} at most");
        return Err(Error::invalid("the classes of a rank", own, help));
    }
    let rows = largest.len();
    largest.resize(rows + context.ranks(), T::zero());
    largest[rows + context.rank()] = T::from_f64(own as f64);
    let mut largest = reduced(largest, ReduceOp::Max, logits, context)?;
    let classes = largest.split_off(rows).into_iter().map(|classes| classes.to_f64() as usize).collect();
    Ok((largest, classes))
}

fn fused_in<T: FloatDType>(
    logits: &Tensor,
    targets: &Tensor,
    context: &Context,
    wanted: Wanted,
) -> Result<Tensor> {
    let shape = targets.dims();
    let targets = numbers_of(logits, targets)?;
    let (rows, own) = (targets.len(), logits.elem_count() / targets.len());
    let row = move |index: usize| -> Range<usize> { index * own..(index + 1) * own };
    let mut exponentials = logits.detach().flatten_all()?.to_vec1::<T>()?;
    let greater = |a: T, b: T| if b > a { b } else { a };
    let lowest = T::from_f64(f64::NEG_INFINITY);
    let largest = |index| exponentials[row(index)].iter().copied().fold(lowest, greater);
    let (tops, classes) = row_maxima((0..rows).map(largest).collect(), own, logits, context)?;
    let targets = own_targets(targets, &classes, context)?;
    // First half: sums of exponentials; second half: logits of the targets.
    let mut parts = vec![T::zero(); 2 * rows];
    for (index, target) in targets.iter().enumerate() {
        let (numbers, top) = (&mut exponentials[row(index)], tops[index]);
        if let Some(target) = target {
            parts[rows + index] = numbers[*target] - top;
        }
        let mut sum = 0.0;
        for number in numbers.iter_mut() {
            let power = (*number - top).to_f64().exp();
            sum += power;
            *number = T::from_f64(power);
        }
        parts[index] = T::from_f64(sum);
    }
    let parts = reduced(parts, ReduceOp::Sum, logits, context)?;
    let (sums, of_targets) = parts.split_at(rows);
    let losses = sums.iter().zip(of_targets).map(|(sum, target)| sum.to_f64().ln() - target.to_f64());
    let (device, context) = (logits.device().clone(), context.clone());
    let output = match wanted {
        Wanted::MeanLoss => {
            Tensor::from_vec(vec![T::from_f64(losses.sum::<f64>() / rows as f64)], (), &device)?
        }
        Wanted::LogProbs => {
            Tensor::from_vec(losses.map(|loss| T::from_f64(-loss)).collect::<Vec<_>>(), shape, &device)?
        }
    };
    let (sums, dims) = (sums.to_vec(), logits.dims().to_vec());
    let bytes = size_of_val(&exponentials[..]) + size_of_val(&sums[..]) + size_of_val(&targets[..]);
    with_kept_bytes(bytes, "vocab_parallel_cross_entropy", &[logits], output, move |gradient| {
        context.check_backward()?;
        let gradient =
            gradient.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let mut of_logits = exponentials.clone();
        for (index, target) in targets.iter().enumerate() {
            let share = match wanted {
                Wanted::MeanLoss => gradient[0] / rows as f64,
                Wanted::LogProbs => -gradient[index],
            };
            let numbers = &mut of_logits[row(index)];
            let scale = T::from_f64(share / sums[index].to_f64());
            numbers.iter_mut().for_each(|number| *number *= scale);
            if let Some(target) = target {
                numbers[*target] -= T::from_f64(share);
            }
        }
        Ok(vec![Some(Tensor::from_vec(of_logits, &dims[..], &device)?)])
    })
}

/// All-reduces `numbers`.
fn reduced<T: FloatDType>(
    numbers: Vec<T>,
    op: ReduceOp,
    logits: &Tensor,
    context: &Context,
) -> Result<Vec<T>> {
    let len = numbers.len();
    let tensor = Tensor::from_vec(numbers, len, logits.device())?;
    context.comm().run(Operation::AllReduce { tensor: tensor.clone(), op })?;
    Ok(tensor.to_vec1()?)
}
