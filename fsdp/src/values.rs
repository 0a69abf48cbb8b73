//! First values of parameters: the part that is kept, and a hash of all.

use std::ops::Range;

use candle_core::{CpuStorage, Device, Result, Storage, Tensor, bail};

use crate::agreement::Digest;

/// Some elements of a flat tensor, in memory of their own: the rest can be freed.
pub(crate) fn cut(flat: &Tensor, range: Range<usize>) -> Result<Tensor> {
    let part = Tensor::zeros(range.len(), flat.dtype(), flat.device())?;
    if !range.is_empty() {
        part.slice_set(&flat.narrow(0, range.start, range.len())?, 0, 0)?;
    }
    Ok(part)
}

/// Adds the bits of a flat, contiguous tensor to a hash.
pub(crate) fn digest(flat: &Tensor, hash: Digest) -> Result<Digest> {
    let flat = flat.to_device(&Device::Cpu)?;
    let (storage, layout) = flat.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("fsdp: a parameter's first values are not in one piece on the CPU");
    };
    Ok(match storage {
        CpuStorage::F64(data) => data[start..end].iter().fold(hash, |hash, x| hash.add(x.to_bits())),
        CpuStorage::F32(data) => data[start..end].iter().fold(hash, |hash, x| hash.add(x.to_bits())),
        CpuStorage::F16(data) => data[start..end].iter().fold(hash, |hash, x| hash.add(x.to_bits())),
        CpuStorage::BF16(data) => data[start..end].iter().fold(hash, |hash, x| hash.add(x.to_bits())),
        _ => bail!("fsdp: no float"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_shares_nothing_and_a_hash_sees_every_bit() -> Result<()> {
        let flat = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
        let part = cut(&flat, 1..3)?;
        flat.zero_set()?;
        assert_eq!(part.to_vec1::<f32>()?, [2.0, 3.0]);
        assert_eq!(cut(&flat, 1..1)?.elem_count(), 0);
        let negative = Tensor::new(&[0f32, -0.0, 0.0], &Device::Cpu)?;
        assert_ne!(digest(&flat, Digest::new())?, digest(&negative, Digest::new())?);
        Ok(())
    }
}
