//! Loading: each rank reads its own part.

use std::path::Path;

use candle_core::DType;
use comm::Communicator;

use super::TensorFile;
use crate::built::Param;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Reads all parameters from a safetensors file with the model's names, PyTorch's where the model's are; of the buffers those
    /// that it has, in whatever dtype of floats. To be called on every rank; every rank must be able to read the file. Nothing is changed unless it fits. What
    /// [`Fsdp::backward_no_sync`] has added up, of the parameters before, is dropped.
    ///
    /// # Cost
    /// Each rank reads its own part of every parameter, and no more. A few bytes of each rank are compared.
    ///
    /// # Errors
    /// [`Error::File`], on every rank, where the file does not fit or cannot be read on one; failures of communication.
    pub fn load_full(&self, path: &Path) -> Result<()> {
        let opened = TensorFile::open(path).and_then(|file| {
            file.check_some(&self.described(), &self.described_buffers())?;
            Ok(file)
        });
        let file = self.all_agree(path, opened)?;
        let read = self.core().replacing(|| self.read_shards(file));
        self.all_agree(path, read)
    }

    fn read_shards(&self, mut file: TensorFile) -> Result<()> {
        for built in &self.core().units {
            for (param, Param { name, shard, .. }) in built.params.iter().enumerate() {
                let kept = built.kept(param);
                if !kept.is_empty() {
                    shard.slice_set(&file.read(name, kept)?.to_device(shard.device())?, 0, 0)?;
                }
            }
        }
        for (name, var) in self.buffers() {
            if file.has(name) {
                var.set(&file.whole(name)?.to_dtype(var.dtype())?.to_device(var.device())?)?;
            }
        }
        Ok(())
    }

    /// Names, dtypes and shapes of what is state and no parameter.
    pub(crate) fn described_buffers(&self) -> Vec<(String, DType, Vec<usize>)> {
        self.buffers().iter().map(|(name, var)| (name.clone(), var.dtype(), var.dims().to_vec())).collect()
    }

    /// Names, dtypes of shards, and shapes, in order of construction.
    pub(crate) fn described(&self) -> Vec<(String, DType, Vec<usize>)> {
        let of = |param: &Param| (param.name.clone(), param.shard.dtype(), param.tensor.dims().to_vec());
        self.core().units.iter().flat_map(|unit| unit.params.iter().map(of)).collect()
    }

    /// What this rank has, where none has failed; otherwise a failure on every rank.
    pub(crate) fn all_agree<T>(&self, path: &Path, own: Result<T>) -> Result<T> {
        let world = &*self.core().groups.world;
        comm::all_agree([world as &dyn Communicator], own, |rank, reason| {
            // The path is named once.
            let problem =
                reason.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&reason).to_string();
            Error::PeerFile { path: path.to_path_buf(), rank, problem }
        })
    }
}
