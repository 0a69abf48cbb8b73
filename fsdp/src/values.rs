//! Copies a range of a parameter's initial values.

use std::ops::Range;

use candle_core::{Result, Tensor};

/// Copies a range of a flat tensor, so that the whole tensor can be freed.
pub(crate) fn copy_range(flat: &Tensor, range: Range<usize>) -> Result<Tensor> {
    let part = Tensor::zeros(range.len(), flat.dtype(), flat.device())?;
    if !range.is_empty() {
        part.slice_set(&flat.narrow(0, range.start, range.len())?, 0, 0)?;
    }
    Ok(part)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_cut_shares_nothing() -> Result<()> {
        let flat = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
        let part = copy_range(&flat, 1..3)?;
        flat.zero_set()?;
        assert_eq!(part.to_vec1::<f32>()?, [2.0, 3.0]);
        assert_eq!(copy_range(&flat, 1..1)?.elem_count(), 0);
        Ok(())
    }
}
