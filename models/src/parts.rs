//! Reading ranges of parameters, for ranks that hold a part of each.

use std::ops::Range;

use candle_core::{DType, Result, Shape, Tensor};
use candle_nn::Init;
use training::build::RangeReader;

use crate::folder::Folder;
use crate::names::{self, PEFT_PREFIX};
use crate::weights::Inner;

impl RangeReader for Inner {
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        match self.find(name, shape) {
            Some((folder, in_file, width)) => match width {
                Some(width) => read_transposed(folder, &in_file, width, dtype, ranges),
                None => Ok(folder.read_ranges(&in_file, ranges, dtype)?),
            },
            // Randomly drawn parameters; also those of another shape or missing in the adapters' file, which are
            // refused.
            None => {
                concat_ranges(&self.value(shape, name, init, dtype)?.flatten_all()?, ranges.iter().cloned())
            }
        }
    }
}

impl Inner {
    /// Returns the folder and the tensor name to read a parameter of this shape from, and, if the file stores it
    /// transposed, the number of columns of the model's matrix. `None` if it is not read from a file.
    fn find(&self, name: &str, shape: &Shape) -> Option<(&Folder, String, Option<usize>)> {
        let name = self.stored_name(name);
        if self.shapes.get(&*name).is_some_and(|expected| expected == shape.dims()) {
            let (folder, in_file) = self.in_folder(&name)?;
            let width = shape.dims().last().copied();
            let width = width.filter(|_| folder.is_transposed(self.config.family, &in_file));
            return Some((folder, in_file, width));
        }
        let (adapters, in_file) = (self.adapters.as_ref()?, format!("{PEFT_PREFIX}{name}"));
        let is_there = adapters.entry(&in_file).is_some_and(|entry| entry.dims == shape.dims());
        (is_there && names::is_adapter(&name)).then_some((adapters, in_file, None))
    }
}

/// A rectangle of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Block {
    /// Returns the smallest block of whole rows that contains a range of a matrix of this width; only the range's
    /// columns if it is within one row.
    fn of(range: &Range<usize>, width: usize) -> Self {
        let (first, last) = (range.start / width, (range.end - 1) / width);
        let start = range.start % width;
        let columns = if first == last { start..start + range.len() } else { 0..width };
        Self { rows: first..last + 1, columns }
    }

    /// Returns the range within the flattened block.
    fn place(&self, range: &Range<usize>, width: usize) -> Range<usize> {
        let (row, column) = (range.start / width - self.rows.start, range.start % width - self.columns.start);
        let start = row * self.columns.len() + column;
        start..start + range.len()
    }
}

/// Groups ranges into blocks, each with the ranges in it. Ranges of the same columns in consecutive rows share a block.
fn blocks(ranges: &[Range<usize>], width: usize) -> Vec<(Block, Vec<Range<usize>>)> {
    let mut all: Vec<(Block, Vec<Range<usize>>)> = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let block = Block::of(range, width);
        match all.last_mut() {
            Some((before, own)) if before.columns == block.columns && before.rows.end == block.rows.start => {
                before.rows.end = block.rows.end;
                own.push(range.clone());
            }
            _ => all.push((block, vec![range.clone()])),
        }
    }
    all
}

/// Reads ranges of a matrix of this width that the file stores transposed.
fn read_transposed(
    folder: &Folder,
    name: &str,
    width: usize,
    dtype: DType,
    ranges: &[Range<usize>],
) -> Result<Tensor> {
    let height = folder.entry(name).and_then(|entry| entry.dims.last().copied()).unwrap_or_default();
    let mut parts = Vec::new();
    for (block, own) in blocks(ranges, width) {
        let in_file = |column: usize| column * height + block.rows.start..column * height + block.rows.end;
        let in_file: Vec<_> = block.columns.clone().map(in_file).collect();
        let read = folder.read_ranges(name, &in_file, dtype)?;
        let read = read.reshape((block.columns.len(), block.rows.len()))?.t()?.contiguous()?;
        parts.push(concat_ranges(&read.flatten_all()?, own.iter().map(|range| block.place(range, width)))?);
    }
    match &parts[..] {
        [one] => Ok(one.clone()),
        [] => Ok(folder.read_ranges(name, &[], dtype)?),
        several => Tensor::cat(several, 0),
    }
}

/// Concatenates ranges of a flat tensor, in memory that does not keep the rest of the tensor alive.
fn concat_ranges(flat: &Tensor, ranges: impl Iterator<Item = Range<usize>>) -> Result<Tensor> {
    let parts = ranges.filter(|range| !range.is_empty());
    let parts: Vec<_> = parts.map(|range| flat.narrow(0, range.start, range.len())).collect::<Result<_>>()?;
    match &parts[..] {
        [] => flat.narrow(0, 0, 0)?.force_contiguous(),
        [one] if one.elem_count() == flat.elem_count() => Ok(one.clone()),
        [one] => one.force_contiguous(),
        several => Tensor::cat(several, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges from pairs of start and end.
    fn ranges<const N: usize>(all: [[usize; 2]; N]) -> Vec<Range<usize>> {
        all.map(|[start, end]| start..end).into()
    }

    #[test]
    fn blocks_are_no_larger_than_they_must_be() {
        let block = |rows, columns| Block { rows, columns };
        // Some columns, as a rank of a divided layer has them.
        let columns = ranges([[3, 5], [13, 15], [23, 25]]);
        assert_eq!(blocks(&columns, 10), [(block(0..3, 3..5), columns)]);
        // Some whole rows, and parts of two others.
        let rows = ranges([[15, 42]]);
        assert_eq!(blocks(&rows, 10), [(block(1..5, 0..10), rows)]);
        // A part of a row, an empty range, and rows of several groups.
        let of = blocks(&ranges([[0, 4], [7, 7], [20, 40], [60, 80]]), 10);
        let first = (block(0..1, 0..4), ranges([[0, 4]]));
        let groups = [(block(2..4, 0..10), ranges([[20, 40]])), (block(6..8, 0..10), ranges([[60, 80]]))];
        assert!(of[0] == first && of[1..] == groups, "{of:?}");
        assert_eq!(block(1..5, 0..10).place(&(15..42), 10), 5..32);
        assert_eq!(block(0..3, 3..5).place(&(23..25), 10), 4..6);
    }
}
