//! The whole model in a file: the variables of all stages on the first rank, one at a time; and back.

use std::cmp::Reverse;
use std::path::Path;

use candle_core::{DType, Tensor, Var};
use comm::{Operation, all_gather_object};
use training::internal::TensorWriter;
use training::{FileError, TensorFile};

use crate::{Error, Pipeline, Result};

/// The dtypes that ranks exchange, by index.
const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

/// Name, dtype and shape of a variable.
type Described = (String, DType, Vec<usize>);

impl Pipeline {
    /// Writes the variables of all stages, buffers included, to one safetensors file under their names, which PyTorch can read
    /// if the model uses its names. Must be called on every rank; the first one writes. The file appears complete or not at
    /// all: see [`training::internal::AtomicFile`]. Tensor-parallel layers are refused: no rank holds the whole of them.
    ///
    /// # Memory
    /// On the first rank, one variable at a time.
    ///
    /// # Errors
    /// On every rank, if the file cannot be written; otherwise as [`visit_full`](Self::visit_full).
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, all) = (path.as_ref(), self.described()?);
        let mut sorted: Vec<Described> = all.iter().flatten().cloned().collect();
        // Widest dtypes first, so that all tensors are aligned.
        sorted.sort_by_cached_key(|(name, dtype, _)| (Reverse(dtype.size_in_bytes()), name.clone()));
        let mut writer = match self.groups().is_first() {
            true => Some(TensorWriter::begin(path, &sorted)),
            false => None,
        };
        self.bring(&all, &mut |name, tensor| {
            let place = sorted.iter().position(|(known, ..)| known == name);
            if let (Some(Ok(file)), Some(place)) = (&mut writer, place)
                && let Err(error) = file.write(place, &tensor)
            {
                writer = Some(Err(error));
            }
        })?;
        let written = writer.map_or(Ok(()), |file| file.and_then(TensorWriter::finish));
        self.groups().all_agree(written.map_err(|error| FileError::write(path, error).into()))
    }

    /// Reads the variables of this rank's stages from a safetensors file of the whole model, such as one of
    /// [`save_full`](Self::save_full) or of PyTorch; buffers may be missing there. Must be called on every rank; every rank
    /// must be able to read the file. Nothing is changed on any rank unless the file matches the model. Tensor-parallel
    /// layers are refused.
    ///
    /// # Cost
    /// Each rank reads only what its stages have, and holds it twice meanwhile.
    ///
    /// # Errors
    /// [`Error::Training`] if a rank cannot read the file or it does not match, on the other ranks then
    /// [`Error::PeerFailed`]; a pipeline of divided layers; the cause, if an earlier step failed; failures of communication.
    pub fn load_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let (groups, all) = (self.groups(), self.described()?);
        let names: Vec<&str> = all.iter().flatten().map(|(name, ..)| &**name).collect();
        let read = self.read_whole(path.as_ref(), &names).map_err(Error::from);
        let values = groups.all_agree(read)?;
        let set = values.into_iter().try_for_each(|(var, value)| var.set(&value));
        groups.all_agree(set.map_err(Error::during("setting a variable")))
    }

    /// Returns the variables of this rank's stages that are in a file, with their values there. `names`: those of all stages.
    fn read_whole(&self, path: &Path, names: &[&str]) -> std::result::Result<Vec<(Var, Tensor)>, FileError> {
        let file = TensorFile::open(path)?;
        file.only_of_model(names)?;
        let is_buffer = |name: &str| self.buffers().iter().any(|(known, _)| known == name);
        let mut vars = self.all_vars();
        vars.retain(|(name, _)| !is_buffer(name) || file.has(name));
        let values = file.values(&vars)?;
        Ok(vars.into_iter().map(|(_, var)| var).zip(values).collect())
    }

    /// Passes each variable of all stages and its name to `visit` on the first rank, for writing file formats other than that
    /// of [`save_full`](Self::save_full). Of tied variables all are passed. Must be called on every rank. Tensor-parallel
    /// layers are refused: no rank holds the whole of them.
    ///
    /// # Memory
    /// On the first rank, one variable at a time.
    ///
    /// # Errors
    /// On every rank, the error of `visit`; a pipeline of divided layers; a variable of a dtype that ranks do not exchange;
    /// the cause, if an earlier step failed; failures of communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        let (mut failed, is_first) = (None, self.groups().is_first());
        self.bring(&self.described()?, &mut |name, tensor| {
            if is_first && failed.is_none() {
                failed = visit(name, tensor).err();
            }
        })?;
        self.groups()
            .all_agree(failed.map_or(Ok(()), |error| Err(Error::during("showing a variable")(error))))
    }

    /// Returns the variables of each rank of the pipeline, on every rank.
    fn described(&self) -> Result<Vec<Vec<Described>>> {
        if let Some(first) = self.failed() {
            return Err(first.clone());
        }
        let refuse = |got: String| {
            let (what, help) =
                ("the variables of a pipeline".into(), "save a checkpoint in its place".into());
            Err(Error::InvalidArgument { what, got, help })
        };
        let groups = self.groups();
        if let Some(tp) = groups.tp.as_ref().filter(|tp| tp.world_size() > 1) {
            return refuse(format!("layers that {} ranks share", tp.world_size()));
        }
        let place = |dtype| DTYPES.iter().position(|known| *known == dtype);
        let own = self.all_vars().into_iter();
        let own: Vec<(String, Option<usize>, Vec<usize>)> =
            own.map(|(name, var)| (name, place(var.dtype()), var.dims().to_vec())).collect();
        let all = all_gather_object(&*groups.pp, &own)?;
        if let Some((name, ..)) = all.iter().flatten().find(|(_, dtype, _)| dtype.is_none()) {
            return refuse(format!("{name} of a dtype that ranks do not exchange"));
        }
        let known =
            |(name, dtype, dims): (String, Option<usize>, Vec<usize>)| Some((name, DTYPES[dtype?], dims));
        Ok(all.into_iter().map(|vars| vars.into_iter().filter_map(known).collect()).collect())
    }

    /// Passes each of the [`described`](Self::described) variables to `receive`, on the first rank of the pipeline.
    fn bring(&self, all: &[Vec<Described>], receive: &mut dyn FnMut(&str, Tensor)) -> Result<()> {
        let (pp, own) = (&*self.groups().pp, self.all_vars());
        let device = self.device();
        for (rank, vars) in all.iter().enumerate() {
            for (index, (name, dtype, dims)) in vars.iter().enumerate() {
                let during = || Error::during("variables of all stages");
                if rank == pp.rank() {
                    let tensor = own[index].1.as_detached_tensor();
                    if rank == 0 {
                        receive(name, tensor);
                        continue;
                    }
                    let tensor = tensor.contiguous().map_err(during())?;
                    pp.run(Operation::Send { tensor, to: 0 })?;
                } else if pp.rank() == 0 {
                    let tensor = Tensor::zeros(&dims[..], *dtype, device).map_err(during())?;
                    pp.run(Operation::Recv { tensor: tensor.clone(), from: rank })?;
                    receive(name, tensor);
                }
            }
        }
        Ok(())
    }
}
