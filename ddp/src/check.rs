//! Are the parameters equal on all ranks? If not: which is the first that differs, on which ranks, and where.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use comm::{Communicator, Operation};

use crate::agreement::{gather, odd_one};
use crate::parameter::Parameter;
use crate::{ParameterDifference, Result};

/// Compares the parameters of all ranks, bit for bit.
pub(crate) fn check(comm: &dyn Communicator, parameters: &[Parameter]) -> Result<()> {
    if comm.world_size() == 1 || parameters.is_empty() {
        return Ok(());
    }
    let hashes = parameters.iter().map(|parameter| Ok(hash(&bits(parameter.var())?)));
    let hashes: Vec<u64> = hashes.collect::<Result<_>>()?;
    let all = gather(comm, vec![hash(&hashes).cast_signed()])?;
    if odd_one(&all).is_none() {
        return Ok(());
    }
    let all = gather(comm, hashes.into_iter().map(u64::cast_signed).collect())?;
    let of = |index: usize| all.iter().map(|hashes| vec![hashes[index]]).collect::<Vec<_>>();
    let first = (0..parameters.len()).find_map(|index| Some((index, odd_one(&of(index))?)));
    // The lists differ, so that one of them does.
    let Some((index, (rank, odd_rank))) = first else { return Ok(()) };
    let odd_ranks = (0..all.len()).filter(|&other| all[other][index] != all[rank][index]).collect();
    Err(Box::new(difference(comm, &parameters[index], rank, odd_rank, odd_ranks)?).into())
}

/// The same on every rank: the first element in which `odd_rank` differs from `rank`.
fn difference(
    comm: &dyn Communicator,
    parameter: &Parameter,
    rank: usize,
    odd_rank: usize,
    odd_ranks: Vec<usize>,
) -> Result<ParameterDifference> {
    let var = parameter.var();
    let (own, elements) = (var.as_detached_tensor().flatten_all()?, var.elem_count());
    let theirs = own.copy()?;
    comm.run(Operation::Broadcast { tensor: theirs.clone(), root: rank })?;
    let (own_bits, their_bits) = (bits(&own)?, bits(&theirs)?);
    let differ = |index: &usize| own_bits[*index] != their_bits[*index];
    let differing = (0..elements).filter(differ).count();
    let place = (0..elements).find(differ).unwrap_or(0);
    let value = |tensor: &Tensor| -> Result<i64> {
        let value: f64 = tensor.narrow(0, place, 1)?.squeeze(0)?.to_dtype(DType::F64)?.to_scalar()?;
        Ok(value.to_bits().cast_signed())
    };
    let seen = gather(comm, vec![place as i64, differing as i64, value(&own)?, value(&theirs)?])?;
    let seen = &seen[odd_rank];
    let shown = |bits: i64| shown(var.dtype(), f64::from_bits(bits.cast_unsigned()));
    // By their numbers in the whole job.
    let number = |rank: usize| comm.world_ranks()[rank];
    Ok(ParameterDifference {
        parameter: parameter.name().into(),
        odd_rank: number(odd_rank),
        odd: shown(seen[2]),
        rank: number(rank),
        expected: shown(seen[3]),
        index: position(var.dims(), seen[0] as usize),
        differing: seen[1] as usize,
        elements,
        odd_ranks: odd_ranks.into_iter().map(number).collect(),
    })
}

/// With no more digits than its dtype has.
fn shown(dtype: DType, value: f64) -> String {
    if dtype == DType::F64 { format!("{value:?}") } else { format!("{:?}", value as f32) }
}

/// Where an element lies, by dim.
fn position(dims: &[usize], mut index: usize) -> Vec<usize> {
    let mut position = vec![0; dims.len()];
    for (place, &len) in position.iter_mut().zip(dims).rev() {
        *place = index % len.max(1);
        index /= len.max(1);
    }
    position
}

/// The bits of each element.
fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    let tensor = tensor.detach().to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F64(data)) => data[range].iter().map(|x| x.to_bits()).collect(),
        Storage::Cpu(CpuStorage::F32(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        Storage::Cpu(CpuStorage::F16(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        Storage::Cpu(CpuStorage::BF16(data)) => data[range].iter().map(|x| x.to_bits().into()).collect(),
        // No other dtype is a parameter's.
        _ => Vec::new(),
    })
}

/// One flipped bit anywhere changes it: each step is one-to-one, and mixes high bits into low ones.
fn hash(words: &[u64]) -> u64 {
    let mix = |state: u64, word: &u64| {
        let state = (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state ^ (state >> 32)
    };
    words.iter().fold(words.len() as u64, mix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_tell_signs_and_places_apart() {
        let hashes: Vec<u64> = [
            vec![],
            vec![0],
            vec![0, 0],
            vec![1, 0],
            vec![0, 1],
            vec![1 << 63, 0],
            vec![0, 1 << 63],
            vec![1 << 63, 1 << 63],
        ]
        .iter()
        .map(|words| hash(words))
        .collect();
        for (index, one) in hashes.iter().enumerate() {
            assert!(!hashes[index + 1..].contains(one), "{hashes:?}");
        }
    }

    #[test]
    fn positions_go_row_by_row() {
        assert_eq!(position(&[2, 3, 4], 23), [1, 2, 3]);
        assert_eq!(position(&[2, 3, 4], 13), [1, 0, 1]);
        assert_eq!(position(&[], 0), [0usize; 0]);
    }
}
