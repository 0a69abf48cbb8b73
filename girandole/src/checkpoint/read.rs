//! Sharded checkpoint reader: reads the elements that are needed from the files that hold them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use comm::{Communicator, all_gather_object};
use fsdp::TensorFile;
use serde_json::Value;
use training::build::{Model, RangeReader};
use training::{Contents, OptimizerState, Runs};

use super::save::{Manifest, OptimizerEntry, all_or_error, model_key, optimizer_key};
use super::{Region, with_keep_alive};
use crate::{Error, Parallel, Result};

/// Largest gap between two runs, in elements, up to which both are read at once: reading the gap is faster than a
/// second read.
const GAP: usize = 2048;

/// An open checkpoint, of which single parameters or parts of them can be read.
#[derive(Debug)]
pub struct CheckpointReader {
    contents: Contents,
    manifest: Manifest,
    files: BTreeMap<String, TensorFile>,
}

impl CheckpointReader {
    /// Opens a checkpoint: reads the headers of its files. Hashes are not compared, see [`Contents::check`].
    ///
    /// # Errors
    /// A checkpoint of another format; files that are missing or damaged.
    pub fn open(contents: &Contents) -> Result<Self> {
        let refuse = |problem: String| Error::file(&contents.folder, problem);
        let manifest: Manifest = serde_json::from_value(contents.extra.clone())
            .map_err(|error| refuse(format!("it is no checkpoint of a model in any layout: {error}")))?;
        for (name, described) in &manifest.parameters {
            let regions = described.parts.iter().map(|part| part.region(&described.dims));
            let lens = regions.map(|region| region.is_valid().then(|| region.len()));
            let held = lens.reduce(|sum, len| sum?.checked_add(len?)).flatten();
            let all = described.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
            if all.is_none() || held != all {
                return Err(refuse(format!("its parts of {name} are not the whole {:?}", described.dims)));
            }
        }
        let open = |name: &String| Ok((name.clone(), TensorFile::open(&contents.path(name))?));
        let files = contents.files.keys().map(open).collect::<Result<_>>()?;
        Ok(Self { contents: contents.clone(), manifest, files })
    }

    /// Returns the names and shapes of the parameters.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.manifest.parameters.iter().map(|(name, described)| (name.as_str(), described.dims.as_slice()))
    }

    /// Returns the program's own data in the checkpoint.
    pub fn extra(&self) -> &Value {
        &self.manifest.extra
    }

    /// Reads a whole parameter.
    ///
    /// # Errors
    /// A parameter that the checkpoint does not have; a file that cannot be read.
    pub fn whole(&mut self, name: &str) -> Result<Tensor> {
        let root = self.manifest.ties.get(name).cloned();
        let name = root.as_deref().unwrap_or(name);
        let dims = match self.manifest.parameters.get(name) {
            Some(described) => described.dims.clone(),
            None => return Err(self.missing(name)),
        };
        Ok(self.read(name, &Region::whole(&dims))?.reshape(dims)?)
    }

    /// Reads some elements of a parameter as a flat tensor on the CPU.
    ///
    /// # Errors
    /// A parameter that the checkpoint does not have, or has in another shape; a file that cannot be read.
    pub fn read(&mut self, name: &str, wanted: &Region) -> Result<Tensor> {
        let root = self.manifest.ties.get(name).cloned();
        let name = root.as_deref().unwrap_or(name);
        self.read_as(&model_key(name), name, wanted)
    }

    fn missing(&self, name: &str) -> Error {
        let help = "it is of another model";
        Error::file(&self.contents.folder, format!("it has no parameter {name}: {help}"))
    }

    /// Reads elements of the tensor under this key, which is divided into parts like the parameter `name`.
    fn read_as(&mut self, key: &str, name: &str, wanted: &Region) -> Result<Tensor> {
        let Some(described) = self.manifest.parameters.get(name) else { return Err(self.missing(name)) };
        let refuse = || {
            let problem = format!("its parts of {name} overlap, and others are missing");
            Error::file(&self.contents.folder, problem)
        };
        if described.dims != wanted.dims {
            let (got, expected) = (&described.dims, &wanted.dims);
            let problem =
                format!("its {name} is {got:?}, and the model's is {expected:?}: it is of another model");
            return Err(Error::file(&self.contents.folder, problem));
        }
        let mut pieces: Vec<(usize, Tensor)> = Vec::new();
        for part in &described.parts {
            let common = wanted.common(&part.region(&described.dims));
            if common.is_empty() {
                continue;
            }
            let Some(file) = self.files.get_mut(&part.file) else {
                let problem = format!("it has no file {}", part.file);
                return Err(Error::file(&self.contents.folder, problem));
            };
            // Neighbouring runs are read at once, with the small gaps between them.
            for runs in common.chunk_by(|run, next| next.second - (run.second + run.len) <= GAP) {
                let (start, end) = runs.iter().fold((usize::MAX, 0), |(start, end), run| {
                    (start.min(run.second), end.max(run.second + run.len))
                });
                let read = file.read(key, start..end)?;
                for run in runs {
                    pieces.push((run.first, read.narrow(0, run.second - start, run.len)?));
                }
            }
        }
        pieces.sort_by_key(|(place, _)| *place);
        let end = pieces
            .iter()
            .try_fold(0, |end, (place, piece)| (*place == end).then(|| end + piece.elem_count()));
        if end != Some(wanted.len()) {
            return Err(refuse());
        }
        let pieces: Vec<Tensor> = pieces.into_iter().map(|(_, piece)| piece).collect();
        match &pieces[..] {
            [] => self.none_of(key, name),
            [one] => Ok(one.contiguous()?),
            several => Ok(Tensor::cat(several, 0)?),
        }
    }

    /// Returns an empty tensor of the right dtype.
    fn none_of(&mut self, key: &str, name: &str) -> Result<Tensor> {
        let described = self.manifest.parameters.get(name);
        let part = described.and_then(|described| described.parts.first());
        match part.and_then(|part| self.files.get_mut(&part.file)).filter(|file| file.has(key)) {
            Some(file) => Ok(file.read(key, 0..0)?),
            None => {
                let dtype = described.and_then(|described| described.dtype.parse().ok());
                // Optimizer state of half-precision parameters is f32.
                let wide = |dtype: &DType| key == model_key(name) || *dtype == DType::F64;
                Ok(Tensor::zeros(0, dtype.filter(wide).unwrap_or(DType::F32), &Device::Cpu)?)
            }
        }
    }

    /// Reads the optimizer state under this key.
    fn remembered(
        &mut self,
        key: &str,
        OptimizerEntry { of, by_element }: &OptimizerEntry,
        wanted: &Region,
    ) -> Result<Tensor> {
        let key = optimizer_key(key);
        if *by_element {
            return self.read_as(&key, of, wanted);
        }
        for file in self.files.values_mut() {
            if file.has(&key) {
                return Ok(file.whole(&key)?);
            }
        }
        Err(Error::file(&self.contents.folder, format!("it has no {key}")))
    }
}

impl<M: Model> Parallel<M> {
    /// Loads a checkpoint that any layout wrote: the trained parameters, and the optimizer state if an optimizer is
    /// given. Call on every rank, with the same checkpoint. Returns the writer's [`training::Checkpoint::extra`].
    ///
    /// # Cost
    /// Each rank reads its parts; all ranks together read all files once more to check the hashes.
    ///
    /// # Errors
    /// On every rank: a checkpoint of another model; a file that has changed since it was written, by name.
    pub fn load(&mut self, contents: &Contents, optimizer: Option<&mut dyn OptimizerState>) -> Result<Value> {
        let world = self.mesh().world().clone();
        let (rank, ranks) = (world.rank(), world.world_size());
        let files: Vec<(&String, &str)> =
            contents.files.iter().map(|(name, hash)| (name, &*hash.sha256)).collect();
        let own = format!("step {}: {files:?}", contents.step);
        if let Some(other) = all_gather_object(&*world, &own)?.iter().position(|other| *other != own) {
            let problem = format!("rank {other} is given another checkpoint: all ranks must see one folder");
            return Err(Error::file(&contents.folder, problem));
        }
        // Hashes are checked before damaged files can be read and misunderstood.
        with_keep_alive(&*world, || {
            let own = contents.files.keys().skip(rank).step_by(ranks);
            Ok(own.into_iter().try_for_each(|name| contents.check(name))?)
        })?;
        let mut saved = all_or_error(&*world, CheckpointReader::open(contents))?;
        self.check_names(&*world, &saved)?;
        let read = self.read_all(&mut saved, optimizer);
        all_or_error(&*world, read)?;
        if let (Some(scaler), Some(state)) = (self.loss_scaler_mut(), saved.manifest.loss_scale) {
            scaler.resume(state);
        }
        Ok(saved.manifest.extra)
    }

    /// Refuses a checkpoint with parameters that no rank has.
    fn check_names(&self, world: &dyn Communicator, saved: &CheckpointReader) -> Result<()> {
        let own: Vec<String> = self.pieces().into_iter().map(|piece| piece.name).collect();
        let all: HashSet<String> = all_gather_object(world, &own)?.into_iter().flatten().collect();
        match saved.shapes().find(|(name, _)| !all.contains(*name)) {
            Some((name, _)) => {
                let problem =
                    format!("it has a parameter {name} that is not trained here: it is of another model");
                Err(Error::file(&saved.contents.folder, problem))
            }
            None => Ok(()),
        }
    }

    fn read_all(
        &self,
        saved: &mut CheckpointReader,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        let pieces = self.pieces();
        let padded = |values: Tensor, var: &candle_core::Var| {
            let missing = var.elem_count() - values.elem_count();
            let values = if missing == 0 { values } else { values.pad_with_zeros(0, 0, missing)? };
            values.reshape(var.shape())
        };
        if let Some(optimizer) = optimizer {
            let mut state = HashMap::new();
            let keys = saved.manifest.optimizer.clone();
            let mut of: HashMap<&str, Vec<(&String, &OptimizerEntry)>> = HashMap::new();
            keys.iter().for_each(|(key, kept)| of.entry(&kept.of).or_default().push((key, kept)));
            for piece in &pieces {
                for (key, kept) in of.get(piece.name.as_str()).into_iter().flatten() {
                    let value = saved.remembered(key, kept, &piece.region)?;
                    let value = if kept.by_element { padded(value, &piece.var)? } else { value };
                    state.insert(format!("{}{}", piece.var_name, &key[piece.name.len()..]), value);
                }
            }
            optimizer.load_state(&state)?;
        }
        for piece in &pieces {
            let values = padded(saved.read(&piece.name, &piece.region)?, &piece.var)?;
            piece.var.set(&values.to_dtype(piece.var.dtype())?.to_device(piece.var.device())?)?;
        }
        Ok(())
    }
}

/// A checkpoint as the source of a model's initial weights.
#[derive(Debug)]
struct SavedWeights(Mutex<CheckpointReader>);

impl From<CheckpointReader> for Arc<dyn RangeReader> {
    fn from(saved: CheckpointReader) -> Self {
        Arc::new(SavedWeights(Mutex::new(saved)))
    }
}

impl RangeReader for SavedWeights {
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        _: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> candle_core::Result<Tensor> {
        let mut saved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |range: &Range<usize>| {
            let runs = Runs { start: range.start, len: range.len(), stride: range.len(), count: 1 };
            let region = Region { dims: shape.dims().to_vec(), runs, window: 0..range.len() };
            Ok(saved.read(name, &region)?.to_dtype(dtype)?)
        };
        let parts = ranges.iter().map(read).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0)
    }
}
