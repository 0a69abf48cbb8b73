//! Saving the model in a safetensors file.

use std::path::Path;

use training::save_vars;

use crate::{Ddp, Error, Result};

impl<M> Ddp<M> {
    /// Writes the parameters, buffers and integers to a safetensors file under the model's names (PyTorch's names if the model
    /// uses them). Must be called on every rank; rank 0 writes. The file appears complete or not at all: see
    /// [`training::AtomicFile`].
    ///
    /// # Errors
    /// On rank 0, [`training::Error::File`] if the file cannot be written; on the other ranks then [`Error::PeerFile`]. The
    /// first cause, if an earlier call failed; failures of communication.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use comm::Local;
    /// use ddp::{Ddp, DdpConfig};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// Local::run_shared(2, |comm| {
    ///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(3, 2, vb.pp("layer")))?;
    ///     Ok(ddp.save_full(&path)?)
    /// })?;
    /// let tensors = training::load_tensors(&path, &Device::Cpu)?;
    /// assert_eq!(tensors["layer.weight"].dims(), [2, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, comm) = (path.as_ref(), self.comm()?);
        let written = if comm.rank() == 0 { save_vars(path, &self.state()) } else { Ok(()) };
        let own = written.map_err(|error| training::Error::from(error).into());
        comm::all_agree([comm], own, |rank, reason| Error::PeerFile { rank, reason })
    }
}
