//! Safetensors files of whole models, of which each rank reads its part.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use safetensors::tensor::TensorInfo;
use training::{TensorReader, is_count_of_batches};

use crate::storage::is_trainable;
use crate::{Error, Result};

/// Name, dtype and shape of a tensor.
pub(crate) type Described = (String, DType, Vec<usize>);

/// Returns true if a buffer of dtype `own` can be read from a tensor of dtype `saved`.
pub(super) fn fits(saved: DType, own: DType) -> bool {
    saved == own || (is_trainable(saved) && is_trainable(own))
}

/// A safetensors file. Only its header is in memory.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    reader: TensorReader,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    /// [`Error::File`]: it cannot be read, is not a safetensors file, or is truncated.
    pub fn open(path: &Path) -> Result<Self> {
        let reader = TensorReader::open(path).map_err(|error| {
            let problem = match error.kind() {
                ErrorKind::InvalidData => format!("it is no safetensors file: {error}"),
                _ => format!("cannot be read: {error}"),
            };
            Error::file(path, problem)
        })?;
        Ok(Self { path: path.to_path_buf(), reader })
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
            match self.reader.info(name) {
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
        let extra =
            self.reader.names().into_iter().filter(|name| !known.contains(&**name)).find_map(|name| {
                let info = self.reader.info(&name)?;
                (!is_count_of_batches(&name, info))
                    .then(|| format!("`{name}` ({:?} {:?})", info.dtype, info.shape))
            });
        match extra {
            Some(extra) => refuse(format!("it has a tensor {extra} that the model has not")),
            None => Ok(()),
        }
    }

    /// Returns whether it contains a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.reader.info(name).is_some()
    }

    /// Returns names, dtypes and shapes of its tensors, sorted by name.
    pub fn tensors(&self) -> Vec<(String, DType, Vec<usize>)> {
        let described = |name: String| {
            let info = self.reader.info(&name)?;
            let (dtype, dims) = (DType::try_from(info.dtype).ok()?, info.shape.clone());
            Some((name, dtype, dims))
        };
        self.reader.names().into_iter().filter_map(described).collect()
    }

    /// Reads a whole tensor.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn whole(&mut self, name: &str) -> Result<Tensor> {
        let dims = self.reader.info(name).map(|info| info.shape.clone()).unwrap_or_default();
        Ok(self.read(name, 0..dims.iter().product())?.reshape(dims)?)
    }

    /// Reads a range of elements of a tensor, flattened.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(&mut self, name: &str, range: Range<usize>) -> Result<Tensor> {
        self.reader.read(name, std::slice::from_ref(&range)).map_err(|error| {
            let problem = match error.kind() {
                ErrorKind::InvalidInput => error.to_string(),
                _ => format!("cannot be read: {error}"),
            };
            Error::file(&self.path, problem)
        })
    }
}
