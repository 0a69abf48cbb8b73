//! Loading: each rank reads its own part.

use std::path::Path;

use candle_core::DType;
use comm::Communicator;

use super::TensorFile;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Reads all parameters from a safetensors file with the model's names, PyTorch's where the model's are; of the buffers those
    /// that it has. To be called on every rank; every rank must be able to read the file. Nothing is changed unless it fits. What
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
        let rank = self.core().groups.shard_rank();
        for built in &self.core().units {
            for part in &built.layout.parts {
                let own = part.range(rank);
                for slot in &part.slots {
                    let (start, end) = (own.start.max(slot.start), own.end.min(slot.start + slot.len));
                    if start < end {
                        let name = &built.params[slot.param].name;
                        let values = file.read(name, start - slot.start..end - slot.start)?;
                        let values = values.to_device(built.shard.device())?;
                        built.shard.slice_set(&values, 0, part.offset + start - own.start)?;
                    }
                }
            }
        }
        for (name, var) in self.buffers() {
            if file.has(name) {
                var.set(&file.whole(name)?.to_device(var.device())?)?;
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
        let of = |unit: &crate::builder::Built| {
            let dtype = unit.shard.dtype();
            let one =
                |param: &crate::builder::Param| (param.name.clone(), dtype, param.tensor.dims().to_vec());
            unit.params.iter().map(one).collect::<Vec<_>>()
        };
        self.core().units.iter().flat_map(of).collect()
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
