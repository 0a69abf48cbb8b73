//! Safetensors file reader that reads ranges of tensors.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use training::TensorHeader;

use crate::{Error, Result};

/// A safetensors file whose header has been read.
#[derive(Debug)]
pub(crate) struct ShardedFile {
    path: PathBuf,
    file: File,
    /// Offset of the tensors' bytes in the file.
    data: u64,
    metadata: Metadata,
    asked_for: BTreeSet<String>,
}

impl ShardedFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let refuse = |error: std::io::Error| match error.kind() {
            ErrorKind::InvalidData => {
                let reason = first_line(&error.to_string());
                Error::NotSafetensors { path: path.to_path_buf(), reason }
            }
            _ => reading(path, error),
        };
        let mut file = training::open_input(path).map_err(refuse)?;
        let bytes = file.metadata().map_err(refuse)?.len();
        let header = training::tensor_header(&mut file, bytes).map_err(refuse)?;
        let TensorHeader { metadata, data, .. } = header;
        Ok(Self { path: path.to_path_buf(), file, data, metadata, asked_for: BTreeSet::new() })
    }

    /// Returns the offset of a tensor's bytes, after checking its dtype and shape.
    pub(crate) fn find(&mut self, name: &str, dims: &[usize], dtype: DType) -> Result<u64> {
        let expected = format!("{dtype:?} {dims:?}");
        let Some(info) = self.metadata.info(name) else {
            let path = self.path.clone();
            return Err(Error::MissingTensor { path, name: name.into(), expected, held: self.listing() });
        };
        if info.shape != dims || DType::try_from(info.dtype).ok() != Some(dtype) {
            let path = self.path.clone();
            return Err(Error::TensorMismatch { path, name: name.into(), expected, got: describe(info) });
        }
        let begin = self.data + info.data_offsets.0 as u64;
        self.asked_for.insert(name.to_string());
        Ok(begin)
    }

    /// Reads these ranges of a tensor, concatenated; `dims` is the shape of the whole tensor.
    pub(crate) fn read(
        &mut self,
        name: &str,
        dims: &[usize],
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        let begin = self.find(name, dims, dtype)?;
        let width = dtype.size_in_bytes();
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let (mut bytes, mut done) = (vec![0; len * width], 0);
        for range in ranges {
            let part = &mut bytes[done..done + range.len() * width];
            done += part.len();
            let at = SeekFrom::Start(begin + (range.start * width) as u64);
            let read = self.file.seek(at).and_then(|_| self.file.read_exact(part));
            read.map_err(|reason| reading(&self.path, reason))?;
        }
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &[len], &Device::Cpu)?)
    }

    /// Reads a whole tensor, of any dtype and shape.
    pub(crate) fn whole(&mut self, name: &str) -> Result<Tensor> {
        let Some(info) = self.metadata.info(name) else {
            let (path, held) = (self.path.clone(), self.listing());
            return Err(Error::MissingTensor { path, name: name.into(), expected: "any shape".into(), held });
        };
        let (dims, dtype) = (info.shape.clone(), DType::try_from(info.dtype)?);
        let all = 0..dims.iter().product();
        Ok(self.read(name, &dims, dtype, std::slice::from_ref(&all))?.reshape(dims)?)
    }

    /// Returns names and shapes of the tensors, sorted by name.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let shape = |name: &String| self.metadata.info(name).map_or(vec![], |info| info.shape.clone());
        self.names().into_iter().map(|name| (name.clone(), shape(&name))).collect()
    }

    /// Returns an error if the file contains a tensor that was not requested.
    pub(crate) fn finish(&self) -> Result<()> {
        let Some(name) = self.names().into_iter().find(|name| !self.asked_for.contains(name)) else {
            return Ok(());
        };
        let got = self.metadata.info(&name).map(describe).unwrap_or_default();
        Err(Error::ExtraTensor { path: self.path.clone(), name, got })
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// Lists the first few names, for an error message.
    fn listing(&self) -> String {
        const SHOWN: usize = 8;
        let names = self.names();
        match names.len() {
            0 => "none".into(),
            count if count <= SHOWN => names.join(", "),
            count => format!("{} and {} more", names[..SHOWN].join(", "), count - SHOWN),
        }
    }
}

fn describe(info: &TensorInfo) -> String {
    format!("{:?} {:?}", info.dtype, info.shape)
}

fn reading(path: &Path, reason: std::io::Error) -> Error {
    Error::File { action: "read", path: path.to_path_buf(), reason: reason.to_string() }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_string()
}
