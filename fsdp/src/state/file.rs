//! Safetensors file reader that reads ranges of tensors.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};

use crate::storage::is_trainable;
use crate::{Error, Result};

/// Name, dtype and shape of a tensor.
pub(crate) type Described = (String, DType, Vec<usize>);

/// Returns true if a buffer of dtype `own` can be read from a tensor of dtype `saved`.
pub(super) fn fits(saved: DType, own: DType) -> bool {
    saved == own || (is_trainable(saved) && is_trainable(own))
}

/// Checks for the batch counter of PyTorch's batch norms, which is only used by those without a momentum.
fn is_count_of_batches(name: &str, dtype: Option<DType>, dims: &[usize]) -> bool {
    name.rsplit('.').next() == Some("num_batches_tracked") && dtype == Some(DType::I64) && dims.is_empty()
}

/// A safetensors file. Only its header is in memory.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Offset of the first element in the file.
    data: u64,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    /// [`Error::File`]: it cannot be read, is not a safetensors file, or is truncated.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::file(path, problem);
        let unread = |error: io::Error| refuse(format!("cannot be read: {error}"));
        let mut file = training::open_input(path).map_err(unread)?;
        let bytes = file.metadata().map_err(unread)?.len();
        let header = training::tensor_header(&mut file, bytes).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => refuse(format!("it is no safetensors file: {error}")),
            _ => unread(error),
        })?;
        Ok(Self { path: path.to_path_buf(), file, metadata: header.metadata, data: header.data })
    }

    /// Checks that it contains tensors of these names, dtypes and shapes, and no others except PyTorch's batch counters
    /// (`num_batches_tracked`), which are not used here.
    ///
    /// # Errors
    /// [`Error::File`] names the first tensor that does not match.
    pub fn check<'a>(&self, wanted: impl IntoIterator<Item = (&'a str, DType, &'a [usize])>) -> Result<()> {
        let owned = |(name, dtype, dims): (&str, DType, &[usize])| (name.to_string(), dtype, dims.to_vec());
        self.check_some(&wanted.into_iter().map(owned).collect::<Vec<_>>(), &[])
    }

    /// Checks the same, where `optional` tensors may be missing or have another floating-point dtype.
    pub(crate) fn check_some(&self, wanted: &[Described], optional: &[Described]) -> Result<()> {
        let refuse = |problem: String| Err(Error::file(&self.path, problem));
        for (place, (name, dtype, dims)) in wanted.iter().chain(optional).enumerate() {
            let has_dtype = |info: &TensorInfo| match DType::try_from(info.dtype) {
                Ok(known) => known == *dtype || (place >= wanted.len() && fits(known, *dtype)),
                Err(_) => false,
            };
            match self.metadata.info(name) {
                Some(info) if has_dtype(info) && info.shape == *dims => {}
                Some(info) => {
                    let got = format!("{:?} {:?}", info.dtype, info.shape);
                    return refuse(format!("tensor `{name}` is {got}, expected {dtype:?} {dims:?}"));
                }
                None if place < wanted.len() => {
                    return refuse(format!("it has no tensor `{name}` ({dtype:?} {dims:?})"));
                }
                None => {}
            }
        }
        let known: HashSet<&str> = wanted.iter().chain(optional).map(|(name, ..)| &**name).collect();
        let extra = self.metadata.tensors().into_iter().filter(|(name, info)| {
            !known.contains(&**name)
                && !is_count_of_batches(name, DType::try_from(info.dtype).ok(), &info.shape)
        });
        match extra.min_by(|(a, _), (b, _)| a.cmp(b)) {
            Some((name, info)) => {
                let got = format!("{:?} {:?}", info.dtype, info.shape);
                refuse(format!("it has a tensor `{name}` ({got}) that the model has not"))
            }
            None => Ok(()),
        }
    }

    /// Returns whether it contains a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// Returns names, dtypes and shapes of its tensors, sorted by name.
    pub fn tensors(&self) -> Vec<(String, DType, Vec<usize>)> {
        let tensors = self.metadata.tensors().into_iter();
        let mut all: Vec<_> = tensors
            .filter_map(|(name, info)| Some((name, DType::try_from(info.dtype).ok()?, info.shape.clone())))
            .collect();
        all.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        all
    }

    /// Reads a whole tensor.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn whole(&mut self, name: &str) -> Result<Tensor> {
        let dims = self.metadata.info(name).map(|info| info.shape.clone()).unwrap_or_default();
        Ok(self.read(name, 0..dims.iter().product())?.reshape(dims)?)
    }

    /// Reads a range of elements of a tensor, flattened.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(&mut self, name: &str, range: Range<usize>) -> Result<Tensor> {
        let refuse = |problem: String| Error::file(&self.path, problem);
        let Some(info) = self.metadata.info(name) else {
            return Err(refuse(format!("it has no tensor `{name}`")));
        };
        let dtype = DType::try_from(info.dtype)?;
        let size = dtype.size_in_bytes();
        let (begin, end) = info.data_offsets;
        let fits = range.end.checked_mul(size).is_some_and(|bytes| bytes <= end - begin);
        if range.start > range.end || !fits {
            return Err(refuse(format!("tensor `{name}` has no elements {range:?}")));
        }
        let (from, to) = (begin + range.start * size, begin + range.end * size);
        let mut bytes = vec![0; to - from];
        let read = self
            .file
            .seek(SeekFrom::Start(self.data + from as u64))
            .and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(|error| refuse(format!("cannot be read: {error}")))?;
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &[range.len()], &Device::Cpu)?)
    }
}
