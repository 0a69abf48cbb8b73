//! The order of rows of queries and keys: llama.cpp rotates pairs of features that are adjacent, in those of the architecture `llama`, where
//! folders have the two of a pair half a head apart.

use std::ops::Range;

use candle_core::Tensor;

use crate::Result;

/// Reorders the rows of each head so that the two of a rotated pair are adjacent.
pub(crate) fn pairs_adjacent(tensor: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, shape) = (tensor.dim(0)?, tensor.shape().clone());
    let halves = tensor.reshape((heads, 2, rows / heads / 2, ()))?;
    Ok(halves.transpose(1, 2)?.contiguous()?.reshape(shape)?)
}

/// The rows of a tensor whose file has the two of a rotated pair adjacent.
pub(crate) struct Rows {
    /// Numbers in a row.
    width: usize,
    /// Rows of half a head.
    half: usize,
}

impl Rows {
    pub(crate) fn of(dims: &[usize], heads: usize) -> Self {
        let rows = dims.first().copied().unwrap_or_default();
        Self { width: dims.iter().skip(1).product(), half: rows / heads.max(1) / 2 }
    }

    /// Returns where the file has ranges of elements of the tensor.
    pub(crate) fn in_file(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let (width, mut all) = (self.width.max(1), Vec::new());
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let row = start / width;
                let end = range.end.min((row + 1) * width);
                let begin = self.row(row) * width + start % width;
                all.push(begin..begin + end - start);
                start = end;
            }
        }
        all
    }

    fn row(&self, row: usize) -> usize {
        let of_head = (2 * self.half).max(1);
        let (head, row) = (row / of_head, row % of_head);
        let half = self.half.max(1);
        head * of_head + row % half * 2 + row / half
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_in_a_file_are_those_that_are_written() {
        let tensor = Tensor::arange(0u32, 36, &Device::Cpu).unwrap().reshape((12, 3)).unwrap();
        let written = pairs_adjacent(&tensor, 2).unwrap().flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let ranges = [0..36, 4..5, 7..20, 3..3];
        let found = Rows::of(&[12, 3], 2).in_file(&ranges);
        let found: Vec<u32> = found.into_iter().flat_map(|range| written[range].to_vec()).collect();
        assert_eq!(found, ranges.into_iter().flatten().map(|x| x as u32).collect::<Vec<_>>());
    }
}
