//! Comparison of parameters between ranks: finds the first parameter that differs, on which ranks, and at which
//! element.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use comm::internal::{Digest, all_gather_words, odd_one};
use comm::{Communicator, Operation, Result};

use crate::{Error, ParameterDifference, first_of};

/// Tensors of floats that several ranks hold.
#[derive(Debug)]
pub struct Replicas<'a> {
    /// These ranks; `None` for this rank alone.
    pub among: Option<&'a dyn Communicator>,
    /// The tensors with their names: of the same shapes, in the same order on all these ranks.
    pub tensors: Vec<(&'a str, &'a Tensor)>,
}

/// Checks that ranks hold the same values, bit for bit. `all` are the groups that together are all ranks; none if the one group in `held` has them all. Call on every rank.
///
/// # Cost
/// One pass over the tensors, and all-gathers of a few bytes. Only where they differ: 8 bytes for each tensor, then a
/// broadcast of one tensor.
///
/// # Errors
/// On every rank the same [`Error::ParametersDiffer`], which names a tensor that differs; failures of communication.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use comm::{Communicator, Local};
/// use strategy::{Replicas, check_replicas};
///
/// let messages = Local::run(3, |comm| {
///     let bias = Tensor::new(&[0f32, if comm.rank() == 2 { 0.5 } else { 0.25 }], &Device::Cpu)?;
///     let checked = check_replicas(&[], &[Replicas { among: Some(comm), tensors: vec![("bias", &bias)] }]);
///     Ok(checked.map_err(|error| error.to_string()).unwrap_err())
/// })?;
/// assert!(messages[0].starts_with(
///     "parameter bias is not the same on every rank: at [1] rank 2 has 0.5, and rank 0 has 0.25"
/// ));
/// # Ok::<(), comm::Error>(())
/// ```
pub fn check_replicas(all: &[&dyn Communicator], held: &[Replicas<'_>]) -> crate::Result<()> {
    let mut found = None;
    for Replicas { among, tensors } in held {
        // Whatever is found: the other ranks of each group wait for this one.
        let differs = among.map_or(Ok(None), |among| parameter_difference(among, tensors))?;
        found = found.or(differs);
    }
    if !all.is_empty() {
        found = first_of(all.iter().copied(), found)?.map(|(_, difference)| difference);
    }
    found.map_or(Ok(()), |difference| Err(Error::ParametersDiffer(Box::new(difference))))
}

/// Compares tensors over the ranks of a group. Returns `None` if they are equal, else a difference that is the same on every
/// rank.
fn parameter_difference(
    comm: &dyn Communicator,
    tensors: &[(&str, &Tensor)],
) -> Result<Option<ParameterDifference>> {
    if comm.world_size() == 1 || tensors.is_empty() {
        return Ok(None);
    }
    let digests = tensors.iter().map(|(_, tensor)| Ok(Digest::new().floats(tensor)?.value()));
    let digests: Vec<u64> = digests.collect::<Result<_>>()?;
    let whole = digests.iter().copied().fold(Digest::new(), Digest::word);
    let all = all_gather_words(comm, &[whole.value().cast_signed()])?;
    if odd_one(&all).is_none() {
        return Ok(None);
    }
    let own: Vec<i64> = digests.into_iter().map(u64::cast_signed).collect();
    let all = all_gather_words(comm, &own)?;
    let of = |index: usize| all.iter().map(|digests| digests[index]).collect::<Vec<_>>();
    let first = (0..tensors.len()).find_map(|index| Some((index, odd_one(&of(index))?)));
    // The digests of the lists differ, so one of the tensors does.
    let Some((index, (rank, odd_rank))) = first else { return Ok(None) };
    let odd_ranks = (0..all.len()).filter(|&other| all[other][index] != all[rank][index]).collect();
    difference(comm, tensors[index], rank, odd_rank, odd_ranks).map(Some)
}

/// Returns, on every rank, the first element in which `odd_rank` differs from `rank`.
fn difference(
    comm: &dyn Communicator,
    (name, tensor): (&str, &Tensor),
    rank: usize,
    odd_rank: usize,
    odd_ranks: Vec<usize>,
) -> Result<ParameterDifference> {
    let (own, elements) = (tensor.detach().flatten_all()?, tensor.elem_count());
    let theirs = own.copy()?;
    comm.run(Operation::Broadcast { tensor: theirs.clone(), root: rank })?;
    let (own_bits, their_bits) = (bits(&own)?, bits(&theirs)?);
    let differ = |index: &usize| own_bits[*index] != their_bits[*index];
    let differing = (0..elements).filter(differ).count();
    let place = (0..elements).find(differ).unwrap_or(0);
    let value = |tensor: &Tensor| -> Result<i64> {
        let value: f64 = tensor
            .narrow(0, place, 1)?
            .squeeze(0)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_scalar()?;
        Ok(value.to_bits().cast_signed())
    };
    let seen = all_gather_words(comm, &[place as i64, differing as i64, value(&own)?, value(&theirs)?])?;
    let seen = &seen[odd_rank];
    let shown = |bits: i64| shown(tensor.dtype(), f64::from_bits(bits.cast_unsigned()));
    // The rank in the whole job.
    let number = |rank: usize| comm.world_ranks()[rank];
    Ok(ParameterDifference {
        parameter: name.into(),
        odd_rank: number(odd_rank),
        odd: shown(seen[2]),
        rank: number(rank),
        expected: shown(seen[3]),
        index: position(tensor.dims(), seen[0] as usize),
        differing: seen[1] as usize,
        elements,
        odd_ranks: odd_ranks.into_iter().map(number).collect(),
    })
}

/// Formats a value with no more digits than its dtype has.
fn shown(dtype: DType, value: f64) -> String {
    if dtype == DType::F64 { format!("{value:?}") } else { format!("{:?}", value as f32) }
}

/// Returns the index of an element by dim, given its row-major index.
fn position(dims: &[usize], mut index: usize) -> Vec<usize> {
    let mut position = vec![0; dims.len()];
    for (element, &len) in position.iter_mut().zip(dims).rev() {
        *element = index % len.max(1);
        index /= len.max(1);
    }
    position
}

/// Returns the bits of each element.
fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    let tensor = tensor.detach().to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F64(data)) => data[range].iter().map(|x| x.to_bits()).collect(),
        Storage::Cpu(CpuStorage::F32(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        Storage::Cpu(CpuStorage::F16(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        Storage::Cpu(CpuStorage::BF16(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        // Parameters have no other dtypes.
        _ => Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_go_row_by_row() {
        assert_eq!(position(&[2, 3, 4], 23), [1, 2, 3]);
        assert_eq!(position(&[2, 3, 4], 13), [1, 0, 1]);
        assert_eq!(position(&[], 0), [0usize; 0]);
    }
}
