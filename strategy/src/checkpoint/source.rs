//! Where the tensors of a checkpoint are read from: a file, or the memory of a rank.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use candle_core::Tensor;
use training::TensorFile;

use crate::{Error, Result};

/// The tensors that one rank contributes.
#[derive(Debug)]
pub(super) enum PieceSource {
    /// A file that the rank has written.
    File(TensorFile),
    /// Ranges of tensors from the rank's memory, by the tensor's key and the index of the first element.
    Memory(HashMap<(String, usize), Tensor>),
}

impl Default for PieceSource {
    /// A rank's memory, of which nothing has been read.
    fn default() -> Self {
        Self::Memory(HashMap::new())
    }
}

impl PieceSource {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Ok(Self::File(TensorFile::open(path)?))
    }

    /// Adds a range that begins at this element.
    pub(super) fn insert(&mut self, key: &str, start: usize, elements: Tensor) {
        if let Self::Memory(ranges) = self {
            ranges.insert((key.into(), start), elements);
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        match self {
            Self::File(file) => file.has(key),
            Self::Memory(ranges) => ranges.contains_key(&(key.into(), 0)),
        }
    }

    /// Returns a whole tensor in its shape.
    pub(super) fn whole(&self, key: &str) -> Result<Tensor> {
        match self {
            Self::File(file) => Ok(file.whole(key)?),
            Self::Memory(ranges) => in_memory(ranges, key, 0),
        }
    }

    /// Returns a range of elements of a tensor, flattened.
    pub(super) fn read(&self, key: &str, range: Range<usize>) -> Result<Tensor> {
        match self {
            Self::File(file) => Ok(file.read(key, range)?),
            Self::Memory(ranges) => Ok(in_memory(ranges, key, range.start)?.narrow(0, 0, range.len())?),
        }
    }
}

fn in_memory(ranges: &HashMap<(String, usize), Tensor>, key: &str, start: usize) -> Result<Tensor> {
    ranges.get(&(key.into(), start)).cloned().ok_or_else(|| {
        let got = format!("{key} from element {start}");
        Error::invalid("a part of the model", got, "no rank has sent it: this is a mistake in girandole")
    })
}
