//! Saving the model in a safetensors file, and loading it.

use std::path::Path;

use candle_core::{Tensor, Var};
use training::internal::save_vars;
use training::{FileError, TensorFile};

use crate::{Ddp, Error, Result};

impl<M> Ddp<M> {
    /// Writes the parameters, buffers and integers to a safetensors file under the model's names (PyTorch's names if the model
    /// uses them). Must be called on every rank; rank 0 writes. The file appears complete or not at all: see
    /// [`training::internal::AtomicFile`].
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
    ///     ddp.save_full(&path)?;
    ///     Ok(ddp.load_full(&path)?)
    /// })?;
    /// let tensors = training::load_tensors(&path, &Device::Cpu)?;
    /// assert_eq!(tensors["layer.weight"].dims(), [2, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let is_first = self.comm()?.rank() == 0;
        let written = if is_first { save_vars(path.as_ref(), &self.state()) } else { Ok(()) };
        self.all_agree(written.map_err(Error::from))
    }

    /// Passes each parameter, buffer and tensor of integers and its name to `visit` on rank 0, for writing file formats other
    /// than that of [`save_full`](Self::save_full). Must be called on every rank.
    ///
    /// # Errors
    /// The error of `visit`, on the other ranks [`Error::PeerFile`]; the first cause, if an earlier call failed; failures of
    /// communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        let shown = match self.comm()?.rank() {
            0 => self.state().iter().try_for_each(|(name, var)| visit(name, var.as_detached_tensor())),
            _ => Ok(()),
        };
        self.all_agree(shown.map_err(Error::during("showing a variable")))
    }

    /// Reads all parameters, and those buffers and integers that it contains, from a safetensors file that uses the model's
    /// names, such as one of [`save_full`](Self::save_full) or of PyTorch. Must be called on every rank; every rank must be
    /// able to read the file. Nothing is changed on any rank unless the file matches the model on all. Gradients of
    /// [`backward_no_sync`](Self::backward_no_sync) belong to the old parameters: call this between two steps.
    ///
    /// # Memory
    /// A copy of the model.
    ///
    /// # Errors
    /// [`training::Error::File`] if a rank cannot read the file or it does not match; on the other ranks then
    /// [`Error::PeerFile`]. The first cause, if an earlier call failed; failures of communication.
    pub fn load_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let values = self.all_agree(self.read(path.as_ref()).map_err(Error::from))?;
        self.set(path.as_ref(), values)
    }

    /// Sets variables to the values that were read from a file.
    pub(crate) fn set(&self, path: &Path, values: Vec<(String, Var, Tensor)>) -> Result<()> {
        let set = values.into_iter().try_for_each(|(name, var, value)| {
            var.set(&value).map_err(|error| FileError::tensor(path, &name, error))
        });
        self.all_agree(set.map_err(Error::from))
    }

    /// Returns the variables that are in a file, with their values there.
    pub(crate) fn read(&self, path: &Path) -> std::result::Result<Vec<(String, Var, Tensor)>, FileError> {
        let (file, trained) = (TensorFile::open(path)?, self.named_vars().len());
        let all = self.state();
        file.only_of_model(&all.iter().map(|(name, _)| &**name).collect::<Vec<_>>())?;
        let wanted =
            all.into_iter().enumerate().filter(|(index, (name, _))| *index < trained || file.has(name));
        let vars: Vec<(String, Var)> = wanted.map(|(_, var)| var).collect();
        let values = file.values(&vars)?;
        Ok(vars.into_iter().zip(values).map(|((name, var), value)| (name, var, value)).collect())
    }

    /// Returns this rank's result if no rank has failed; otherwise an error on every rank.
    pub(crate) fn all_agree<T>(&self, own: Result<T>) -> Result<T> {
        comm::all_agree([self.comm()?], own, peer_failed)
    }
}

/// Makes the error of the other ranks, where a rank has failed with a file.
pub(crate) fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFile { rank, reason }
}
