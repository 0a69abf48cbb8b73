//! Safetensors files of whole models, of which each rank reads its parts and nothing may be left over.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use safetensors::tensor::TensorInfo;
use training::TensorReader;

use crate::{Error, Result};

/// A safetensors file whose header has been read.
#[derive(Debug)]
pub(crate) struct ShardedFile {
    path: PathBuf,
    reader: TensorReader,
    asked_for: BTreeSet<String>,
}

impl ShardedFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let refuse = |error: std::io::Error| match error.kind() {
            ErrorKind::InvalidData => {
                let reason = training::first_line(&error);
                Error::NotSafetensors { path: path.to_path_buf(), reason }
            }
            _ => reading(path, error),
        };
        let reader = TensorReader::open(path).map_err(refuse)?;
        Ok(Self { path: path.to_path_buf(), reader, asked_for: BTreeSet::new() })
    }

    /// Checks that there is a tensor of this dtype and shape.
    pub(crate) fn find(&mut self, name: &str, dims: &[usize], dtype: DType) -> Result<()> {
        let expected = format!("{dtype:?} {dims:?}");
        let Some(info) = self.reader.info(name) else {
            let path = self.path.clone();
            return Err(Error::MissingTensor { path, name: name.into(), expected, held: self.listing() });
        };
        if info.shape != dims || DType::try_from(info.dtype).ok() != Some(dtype) {
            let path = self.path.clone();
            return Err(Error::TensorMismatch { path, name: name.into(), expected, got: describe(info) });
        }
        self.asked_for.insert(name.to_string());
        Ok(())
    }

    /// Reads these ranges of a tensor, concatenated; `dims` is the shape of the whole tensor.
    pub(crate) fn read(
        &mut self,
        name: &str,
        dims: &[usize],
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        self.find(name, dims, dtype)?;
        self.reader.read(name, ranges).map_err(|reason| reading(&self.path, reason))
    }

    /// Reads a whole tensor, of any dtype and shape.
    pub(crate) fn whole(&mut self, name: &str) -> Result<Tensor> {
        let Some(info) = self.reader.info(name) else {
            let (path, held) = (self.path.clone(), self.listing());
            return Err(Error::MissingTensor { path, name: name.into(), expected: "any shape".into(), held });
        };
        let (dims, dtype) = (info.shape.clone(), DType::try_from(info.dtype)?);
        let all = 0..dims.iter().product();
        Ok(self.read(name, &dims, dtype, std::slice::from_ref(&all))?.reshape(dims)?)
    }

    /// Returns names and shapes of the tensors, sorted by name.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let shape = |name: &String| self.reader.info(name).map_or(vec![], |info| info.shape.clone());
        self.reader.names().into_iter().map(|name| (name.clone(), shape(&name))).collect()
    }

    /// Returns an error if the file contains a tensor that was not requested.
    pub(crate) fn finish(&self) -> Result<()> {
        let Some(name) = self.reader.names().into_iter().find(|name| !self.asked_for.contains(name)) else {
            return Ok(());
        };
        let got = self.reader.info(&name).map(describe).unwrap_or_default();
        Err(Error::ExtraTensor { path: self.path.clone(), name, got })
    }

    /// Lists the first few names, for an error message.
    fn listing(&self) -> String {
        const SHOWN: usize = 8;
        let names = self.reader.names();
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
