//! Saving the whole model in one safetensors file, without holding it whole in memory.

use std::path::Path;

use candle_core::Tensor;
use training::internal::TensorWriter;

use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Writes all parameters, and rank 0's buffers, to a safetensors file under the model's names (PyTorch's names if the
    /// model uses them). It can be loaded at any number of ranks, and into a model that is not sharded. Rank 0 writes; must
    /// be called on every rank.
    ///
    /// The file appears complete or not at all: see [`training::internal::AtomicFile`].
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
        let writer = if is_first { Some(TensorWriter::begin(path, &tensors())) } else { None };
        let (mut writer, mut failed) = match writer.transpose() {
            Ok(writer) => (writer, None),
            Err(error) => (None, Some(error)),
        };
        self.visit_places(&mut |place, _, tensor| {
            // The other ranks send their pieces in any case, so this rank receives them even if its disk is full.
            if let (Some(writer), None) = (&mut writer, &failed) {
                failed = writer.write(place, &tensor).err();
            }
        })?;
        let written = match (failed, writer) {
            (Some(error), _) => Err(error),
            (None, Some(writer)) => writer.finish(),
            (None, None) => Ok(()),
        };
        self.all_agree(
            path,
            written.map_err(|error| Error::file(path, format!("cannot be written: {error}"))),
        )
    }
}

impl<M> Fsdp<M> {
    /// Passes each parameter whole, and each buffer of rank 0, with its name to `visit` on rank 0, for writing other file
    /// formats. Must be called on every rank.
    ///
    /// # Memory
    /// On rank 0, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, if `visit` fails; the first cause, if an earlier call failed; failures of communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        let mut failed = None;
        self.visit_places(&mut |_, name, tensor| {
            // The other ranks send their pieces in any case.
            if failed.is_none() {
                failed = visit(name, tensor).err();
            }
        })?;
        let visited = failed.map_or(Ok(()), |error| Err(Error::from(error)));
        self.all_agree(Path::new("what is written of the parameters"), visited)
    }
}
