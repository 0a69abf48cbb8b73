//! Saving the model of all ranks to one safetensors file, piece by piece, and loading it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use comm::{Communicator, Operation};
use training::TensorFile;
use training::internal::TensorWriter;

use crate::checkpoint::all_agree;
use crate::source::read_ranges;
use crate::{Error, Parameter, Result, Split, TensorParallel};

/// Elements of one rank that are sent at a time.
const PIECE: usize = 1 << 18;

impl<M> TensorParallel<M> {
    /// Writes the whole model as one safetensors file, which [`Weights::File`](crate::Weights::File) and PyTorch can read.
    /// Must be called on every rank; the model's first rank writes. The file appears complete or not at all.
    ///
    /// # Cost
    /// Each parameter is sent once, in pieces: no rank ever holds more than its own part and a megabyte of each other rank's.
    ///
    /// # Errors
    /// On every rank, if the file cannot be written; failures of communication.
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check()?;
        let is_first_copy = self.dp().is_none_or(|dp| dp.rank() == 0);
        let written = if is_first_copy { self.write(path.as_ref())? } else { Ok(()) };
        comm::all_agree([self.world()], written, |rank, reason| Error::PeerFile { rank, reason })
    }

    /// Reads this rank's part of each parameter from a safetensors file of the whole model, such as one of
    /// [`save_full`](Self::save_full) or of PyTorch. Must be called on every rank; every rank must be able to read the file.
    /// Nothing is changed on any rank unless the file matches the model. Gradients of
    /// [`backward_no_sync`](Self::backward_no_sync) belong to the old parameters: call this between two steps.
    ///
    /// # Cost
    /// Each rank reads only its parts, and holds them twice meanwhile.
    ///
    /// # Errors
    /// A rank cannot read the file, or it does not match; on the other ranks then [`Error::PeerFile`]. The first cause, if an
    /// earlier backward failed; failures of communication.
    pub fn load_full(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check()?;
        let parts = all_agree(self.world(), self.read(path.as_ref()))?;
        let set =
            self.parameters().iter().zip(&parts).try_for_each(|(parameter, part)| parameter.var().set(part));
        all_agree(self.world(), set.map_err(Error::from))
    }

    /// Reads this rank's part of each parameter.
    fn read(&self, path: &Path) -> Result<Vec<Tensor>> {
        let (rank, ranks) = (self.context().rank(), self.context().ranks());
        let file = TensorFile::open(path)?;
        let part = |parameter: &Parameter| -> Result<Tensor> {
            let (var, dims) = (parameter.var(), parameter.dims());
            let ranges: Vec<_> = parameter.split().runs(dims, rank, ranks).ranges().collect();
            let read = read_ranges(&file, parameter.name(), dims, var.dtype(), &ranges)?;
            Ok(read.reshape(var.dims())?.to_device(var.device())?)
        };
        let parts = self.parameters().iter().map(part).collect::<Result<_>>()?;
        file.only_of_model(&self.parameters().iter().map(Parameter::name).collect::<Vec<_>>())?;
        Ok(parts)
    }

    /// Writes this rank's parts to a separate file, under the names of the whole weights.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save_shard(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let tensors: HashMap<&str, Tensor> =
            self.parameters().iter().map(|p| (p.name(), p.var().as_detached_tensor())).collect();
        training::save_tensors(path, &tensors).map_err(|reason| {
            let reason = reason.to_string();
            Error::File { action: "write", path: path.to_path_buf(), reason }
        })
    }

    /// Takes part in writing the file; the inner result is the writer's.
    fn write(&self, path: &Path) -> Result<Result<()>> {
        let comm = &**self.context().comm();
        let mut writer = (comm.rank() == 0).then(|| Writer::begin(path, self.parameters()));
        for parameter in self.parameters() {
            stream(comm, parameter, &mut writer)?;
        }
        Ok(match writer.and_then(Writer::finish) {
            None => Ok(()),
            Some(reason) => Err(Error::File { action: "write", path: path.to_path_buf(), reason }),
        })
    }
}

/// Sends a parameter to the first rank, in the order of its elements in the file.
fn stream(comm: &dyn Communicator, parameter: &Parameter, writer: &mut Option<Writer>) -> Result<()> {
    let own = parameter.var().as_detached_tensor();
    if parameter.split() == Split::Whole {
        if let Some(writer) = writer {
            writer.write(&own);
        }
        return Ok(());
    }
    let (split, dims, ranks) = (parameter.split(), parameter.dims(), comm.world_size());
    let runs = split.runs(dims, comm.rank(), ranks);
    let own = own.contiguous()?.reshape((runs.count, runs.len))?;
    let lens: Vec<usize> = (0..ranks).map(|rank| split.runs(dims, rank, ranks).len).collect();
    if lens.iter().any(|len| *len >= PIECE || *len != lens[0]) {
        for run in 0..runs.count {
            long_run(comm, &own.get(run)?, &lens, writer)?;
        }
        return Ok(());
    }
    let together = PIECE / runs.len.max(1);
    for first in (0..runs.count).step_by(together) {
        let count = together.min(runs.count - first);
        short_runs(comm, &own.narrow(0, first, count)?, writer)?;
    }
    Ok(())
}

/// Sends one run of each rank, of lengths `lens`, one rank after the other.
fn long_run(
    comm: &dyn Communicator,
    own: &Tensor,
    lens: &[usize],
    writer: &mut Option<Writer>,
) -> Result<()> {
    for (rank, &len) in lens.iter().enumerate() {
        for start in (0..len).step_by(PIECE) {
            let count = PIECE.min(len - start);
            let piece = || own.narrow(0, start, count)?.force_contiguous();
            match writer {
                Some(writer) if rank == 0 => writer.write(&piece()?),
                Some(writer) => {
                    let theirs = Tensor::zeros(count, own.dtype(), own.device())?;
                    comm.run(Operation::Recv { tensor: theirs.clone(), from: rank })?;
                    writer.write(&theirs);
                }
                None if rank == comm.rank() => comm.run(Operation::Send { tensor: piece()?, to: 0 })?,
                None => {}
            }
        }
    }
    Ok(())
}

/// Gathers several short runs of all ranks, and writes each run's parts in order of rank.
fn short_runs(comm: &dyn Communicator, own: &Tensor, writer: &mut Option<Writer>) -> Result<()> {
    let ranks = comm.world_size();
    let (count, len) = own.dims2()?;
    let input = own.force_contiguous()?;
    let output = match writer {
        Some(_) => Some(Tensor::zeros((ranks, count, len), own.dtype(), own.device())?),
        None => None,
    };
    comm.run(Operation::Gather { output: output.clone(), input, root: 0, counts: None })?;
    if let (Some(all), Some(writer)) = (output, writer) {
        writer.write(&all.transpose(0, 1)?);
    }
    Ok(())
}

/// The file, or after a failure the error: the other ranks still send their parts.
struct Writer {
    file: std::io::Result<TensorWriter>,
}

impl Writer {
    fn begin(path: &Path, parameters: &[Parameter]) -> Self {
        let tensor = |parameter: &Parameter| {
            (parameter.name().to_string(), parameter.var().dtype(), parameter.dims().to_vec())
        };
        Self { file: TensorWriter::begin(path, &parameters.iter().map(tensor).collect::<Vec<_>>()) }
    }

    fn write(&mut self, elements: &Tensor) {
        if let Ok(file) = &mut self.file
            && let Err(error) = file.append(elements)
        {
            self.file = Err(error);
        }
    }

    /// Completes the file, and returns the error if any write failed.
    fn finish(self) -> Option<String> {
        self.file.and_then(TensorWriter::finish).err().map(|error| error.to_string())
    }
}
