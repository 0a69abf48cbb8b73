//! Saving the whole model in one safetensors file, without holding it whole in memory.

use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::View;
use training::{AtomicFile, tensor_file_begin};

use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Writes all parameters, and rank 0's buffers, to a safetensors file under the model's names (PyTorch's names if the
    /// model uses them). It can be loaded at any number of ranks, and into a model that is not sharded. Rank 0 writes; must
    /// be called on every rank.
    ///
    /// The file appears complete or not at all: see [`AtomicFile`].
    ///
    /// # Memory
    /// On rank 0, one parameter at a time.
    ///
    /// # Errors
    /// [`Error::File`], on every rank, if the file cannot be written; failures of communication.
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let is_first = self.core().groups.world.rank() == 0;
        let tensors = || [self.described(), self.described_buffers()].concat();
        let draft = if is_first { Some(Draft::begin(path, &tensors())) } else { None };
        let (mut draft, mut failed) = match draft.transpose() {
            Ok(draft) => (draft, None),
            Err(error) => (None, Some(error)),
        };
        let mut first = 0;
        for (unit, built) in self.core().units.iter().enumerate() {
            self.visit_unit(unit, &mut |param, _, tensor| {
                // The other ranks send their pieces in any case, so this rank receives them even if its disk is full.
                if let (Some(draft), None) = (&mut draft, &failed) {
                    failed = draft.write(first + param, &tensor).err();
                }
                Ok(())
            })?;
            first += built.params.len();
        }
        if let (Some(draft), None) = (&mut draft, &failed) {
            failed = self.buffers().iter().enumerate().find_map(|(place, (_, var))| {
                let value = var.to_device(&Device::Cpu).map_err(Error::from);
                value.and_then(|value| draft.write(first + place, &value)).err()
            });
        }
        let written = match (failed, draft) {
            (Some(error), _) => Err(error),
            (None, Some(draft)) => draft.finish(),
            (None, None) => Ok(()),
        };
        self.all_agree(path, written)
    }
}

impl<M> Fsdp<M> {
    /// Passes each whole parameter and its name to `visit` on rank 0, unit by unit, for writing other file formats. Must be
    /// called on every rank.
    ///
    /// # Memory
    /// On rank 0, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, the error of `visit`; failures of communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        let mut failed = None;
        for unit in 0..self.core().units.len() {
            self.visit_unit(unit, &mut |_, name, tensor| {
                // The other ranks send their pieces in any case.
                if failed.is_none() {
                    failed = visit(name, tensor).err();
                }
                Ok(())
            })?;
        }
        let visited = failed.map_or(Ok(()), |error| Err(Error::from(error)));
        self.all_agree(Path::new("what is made of the parameters"), visited)
    }
}

/// The file being written.
struct Draft {
    target: PathBuf,
    file: BufWriter<AtomicFile>,
    /// Offset of each tensor in the file.
    places: Vec<u64>,
}

impl Draft {
    fn begin(target: &Path, tensors: &[(String, DType, Vec<usize>)]) -> Result<Self> {
        let infos = tensors.iter().map(|(name, dtype, dims)| (name.clone(), (*dtype).into(), dims.clone()));
        let begun = tensor_file_begin(infos, Some("pt")).and_then(|begin| {
            let mut file = BufWriter::with_capacity(1 << 18, AtomicFile::create(target)?);
            file.write_all(&begin)?;
            Ok((file, begin.len()))
        });
        let (file, mut end) = begun.map_err(|error| unwritten(target, &error))?;
        let mut places = Vec::with_capacity(tensors.len());
        for (_, dtype, dims) in tensors {
            places.push(end as u64);
            end += dims.iter().product::<usize>() * dtype.size_in_bytes();
        }
        Ok(Self { target: target.to_path_buf(), file, places })
    }

    fn write(&mut self, place: usize, tensor: &Tensor) -> Result<()> {
        // safetensors panics on tensors that are not contiguous or not on the CPU.
        let tensor = tensor.contiguous()?;
        let place = SeekFrom::Start(self.places[place]);
        let written = self.file.seek(place).and_then(|_| self.file.write_all(&View::data(&tensor)));
        written.map_err(|error| unwritten(&self.target, &error))
    }

    fn finish(self) -> Result<()> {
        let file = self.file.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(AtomicFile::commit).map_err(|error| unwritten(&self.target, &error))
    }
}

fn unwritten(target: &Path, error: &std::io::Error) -> Error {
    Error::file(target, format!("cannot be written: {error}"))
}
