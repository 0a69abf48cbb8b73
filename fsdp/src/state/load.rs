//! Loading a safetensors file: each rank reads its own shard.

use std::path::Path;

use candle_core::DType;
use comm::Communicator;
use training::TensorFile;

use super::fits;
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
    /// [`training::Error::File`] if the file does not match or a rank cannot read it; on the other ranks then
    /// [`Error::PeerFile`]. Failures of communication.
    pub fn load_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = self.all_agree(path, self.open(path))?;
        let read = self.core().replace_shards(|| self.read_shards(file));
        self.all_agree(path, read)
    }

    /// Opens a file, which must match the model.
    fn open(&self, path: &Path) -> Result<TensorFile> {
        let file = TensorFile::open(path)?;
        let (described, buffers) = (self.described(), self.described_buffers());
        described.iter().try_for_each(|(name, dtype, dims)| file.check(name, dims, *dtype))?;
        for (name, dtype, dims) in buffers.iter().filter(|(name, ..)| file.has(name)) {
            let found = file.dtype(name).filter(|found| fits(*found, *dtype));
            file.check(name, dims, found.unwrap_or(*dtype))?;
        }
        let names = described.iter().chain(&buffers).map(|(name, ..)| name.as_str());
        file.only_of_model(&names.collect::<Vec<_>>())?;
        Ok(file)
    }

    fn read_shards(&self, file: TensorFile) -> Result<()> {
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
        let named = |after: &str| reason.strip_prefix(&format!("{}{after}", path.display()));
        let problem = named(": ").or_else(|| named(" ")).unwrap_or(&reason).to_string();
        Error::PeerFile { path: path.to_path_buf(), rank, problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_once_however_short_its_name_is() {
        let line = |reason: &str| peer_failed(Path::new("a"))(1, reason.into()).to_string();
        assert_eq!(line("a has no tensor `fc.a`"), "a: on rank 1: has no tensor `fc.a`");
        assert_eq!(line("a: tensor `fc.a` is small"), "a: on rank 1: tensor `fc.a` is small");
        assert_eq!(line("all is lost"), "a: on rank 1: all is lost");
    }
}
