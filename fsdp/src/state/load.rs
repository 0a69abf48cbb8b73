//! Loading a safetensors file: each rank reads its own shard.

use std::path::Path;

use candle_core::DType;
use comm::Communicator;

use super::TensorFile;
use crate::built::Param;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Reads all parameters from a safetensors file that uses the model's names (PyTorch's names if the model does), and
    /// those buffers that it contains, in any floating-point dtype. Must be called on every rank; every rank must be able to
    /// read the file. Nothing is changed unless the file matches the model. Gradients accumulated by
    /// [`Fsdp::backward_no_sync`] belong to the old parameters and are dropped.
    ///
    /// # Cost
    /// Each rank reads only what it keeps of every parameter. A few bytes of each rank are compared.
    ///
    /// # Errors
    /// [`Error::File`], on every rank, if the file does not match or a rank cannot read it; failures of communication.
    pub fn load_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let opened = TensorFile::open(path).and_then(|file| {
            file.check_some(&self.described(), &self.described_buffers())?;
            Ok(file)
        });
        let file = self.all_agree(path, opened)?;
        let read = self.core().replace_shards(|| self.read_shards(file));
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

    /// Returns names, dtypes and shapes of the buffers.
    pub(crate) fn described_buffers(&self) -> Vec<(String, DType, Vec<usize>)> {
        self.buffers().iter().map(|(name, var)| (name.clone(), var.dtype(), var.dims().to_vec())).collect()
    }

    /// Returns names, shard dtypes and shapes of the parameters, in order of construction.
    pub(crate) fn described(&self) -> Vec<(String, DType, Vec<usize>)> {
        let of = |param: &Param| (param.name.clone(), param.shard.dtype(), param.tensor.dims().to_vec());
        self.core().units.iter().flat_map(|unit| unit.params.iter().map(of)).collect()
    }

    /// Returns this rank's result if no rank has failed; otherwise an error on every rank.
    pub(crate) fn all_agree<T>(&self, path: &Path, own: Result<T>) -> Result<T> {
        let world = &*self.core().groups.world;
        comm::all_agree([world as &dyn Communicator], own, peer_failed(path))
    }
}

/// Makes the error of the other ranks, where a rank has failed with a file.
pub(super) fn peer_failed(path: &Path) -> impl Fn(usize, String) -> Error {
    move |rank, reason| {
        // Avoids naming the path twice.
        let problem = reason.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&reason).to_string();
        Error::PeerFile { path: path.to_path_buf(), rank, problem }
    }
}
