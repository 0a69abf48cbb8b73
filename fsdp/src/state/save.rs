//! Saving the whole model in one file, without ever having it whole in memory.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo, View};

use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Writes all parameters, and rank 0's buffers, to a safetensors file under the model's names, PyTorch's where the model's
    /// are: it can be loaded at any number of ranks, and into a model that is not sharded. Rank 0 writes; to be called on every
    /// rank.
    ///
    /// The file appears whole or not at all: it is written beside its place, brought to disk, and renamed.
    ///
    /// # Memory
    /// On rank 0, one parameter at a time.
    ///
    /// # Errors
    /// [`Error::File`], on every rank, where the file cannot be written; failures of communication.
    pub fn save_full(&self, path: &Path) -> Result<()> {
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
                // The others send theirs in any case, so that a full disk here does not leave them waiting.
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

/// A file beside the one to be written, removed when dropped unless it has been renamed.
struct Draft {
    target: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
    /// Where each tensor begins.
    places: Vec<u64>,
}

impl Draft {
    fn begin(target: &Path, tensors: &[(String, DType, Vec<usize>)]) -> Result<Self> {
        let refuse =
            |error: &dyn std::fmt::Display| Error::file(target, format!("cannot be written: {error}"));
        let mut end = 0;
        let mut places = Vec::with_capacity(tensors.len());
        let mut infos = Vec::with_capacity(tensors.len());
        for (name, dtype, dims) in tensors {
            let begin = end;
            end += dims.iter().product::<usize>() * dtype.size_in_bytes();
            // As candle says it.
            let dtype = Tensor::zeros(0, *dtype, &Device::Cpu)?;
            let dtype = View::dtype(&dtype);
            infos.push((name.clone(), TensorInfo { dtype, shape: dims.clone(), data_offsets: (begin, end) }));
            places.push(begin as u64);
        }
        let format = [("format".to_string(), "pt".to_string())].into();
        let metadata = Metadata::new(Some(format), infos).map_err(|error| refuse(&error))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|error| refuse(&error))?;
        // Elements begin at a multiple of 8.
        header.resize(header.len().next_multiple_of(8), b' ');
        let Some(name) = target.file_name() else { return Err(refuse(&"the path names no file")) };
        let path = target.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        // What a killed process of the same number left.
        let _ = fs::remove_file(&path);
        let file =
            BufWriter::with_capacity(1 << 18, File::create_new(&path).map_err(|error| refuse(&error))?);
        let first = 8 + header.len() as u64;
        let places = places.into_iter().map(|place| first + place).collect();
        let mut draft = Self { target: target.to_path_buf(), path, file, places };
        let head = (header.len() as u64).to_le_bytes();
        draft
            .file
            .write_all(&head)
            .and_then(|()| draft.file.write_all(&header))
            .map_err(|error| refuse(&error))?;
        Ok(draft)
    }

    fn write(&mut self, place: usize, tensor: &Tensor) -> Result<()> {
        // Contiguous, and on the CPU: safetensors would panic where it cannot read.
        let tensor = tensor.contiguous()?;
        let place = SeekFrom::Start(self.places[place]);
        let written = self.file.seek(place).and_then(|_| self.file.write_all(&View::data(&tensor)));
        written.map_err(|error| Error::file(&self.target, format!("cannot be written: {error}")))
    }

    fn finish(mut self) -> Result<()> {
        let mut written = || -> std::io::Result<()> {
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            fs::rename(&self.path, &self.target)?;
            let folder = self.target.parent().filter(|folder| *folder != Path::new(""));
            // The folder too, or the new name may be lost when the machine stops. Not every system lets a folder be opened.
            File::open(folder.unwrap_or(Path::new("."))).map_or(Ok(()), |folder| folder.sync_all())
        };
        written().map_err(|error| Error::file(&self.target, format!("cannot be written: {error}")))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
