//! Sharded checkpoint reader: reads the elements that are needed from the files that hold them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use serde_json::Value;
use training::build::RangeReader;
use training::internal::Runs;
use training::{Contents, LossScalerState};

use super::shard_index::{OptimizerEntry, Part, ShardIndex, TensorEntry, model_key, optimizer_key};
use super::source::PieceSource;
use crate::region::{Overlap, Region};
use crate::{Error, Piece, Result};
use training::internal::lock;

/// Largest gap between two runs, in elements, up to which both are read at once: reading the gap is faster than a
/// second read.
const GAP: usize = 2048;

/// An open checkpoint, of which single parameters or parts of them can be read.
#[derive(Debug)]
pub struct CheckpointReader {
    /// The folder, for messages.
    folder: PathBuf,
    index: ShardIndex,
    files: BTreeMap<String, PieceSource>,
}

impl CheckpointReader {
    /// Opens a checkpoint: reads the headers of its files. Hashes are not compared, see [`Contents::check`].
    ///
    /// # Errors
    /// A checkpoint of another format; files that are missing or damaged.
    pub fn open(contents: &Contents) -> Result<Self> {
        let index: ShardIndex = serde_json::from_value(contents.extra.clone()).map_err(|error| {
            let problem = format!("it is no checkpoint of a model in any layout: {error}");
            Error::file(&contents.folder, problem)
        })?;
        let open = |name: &String| Ok((name.clone(), PieceSource::open(&contents.path(name))?));
        let files = contents.files.keys().map(open).collect::<Result<_>>()?;
        Self::of(&contents.folder, index, files)
    }

    /// Creates a reader of what an index describes.
    pub(super) fn of(folder: &Path, index: ShardIndex, files: BTreeMap<String, PieceSource>) -> Result<Self> {
        let refuse = |problem: String| Error::file(folder, problem);
        for (name, described) in &index.parameters {
            let regions = described.parts.iter().map(|part| part.region(&described.dims));
            let lens = regions.map(|region| region.is_valid().then(|| region.len()));
            let held = lens.reduce(|sum, len| sum?.checked_add(len?)).flatten();
            let all = described.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
            if all.is_none() || held != all {
                return Err(refuse(format!("its parts of {name} are not the whole {:?}", described.dims)));
            }
        }
        Ok(Self { folder: folder.to_path_buf(), index, files })
    }

    /// Returns the names and shapes of the parameters.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.index.parameters.iter().map(|(name, described)| (name.as_str(), described.dims.as_slice()))
    }

    /// Returns the program's own data in the checkpoint.
    pub fn extra(&self) -> &Value {
        &self.index.extra
    }

    pub(super) fn into_extra(self) -> Value {
        self.index.extra
    }

    /// Reads a whole parameter.
    ///
    /// # Errors
    /// A parameter that the checkpoint does not have; a file that cannot be read.
    pub fn whole(&mut self, name: &str) -> Result<Tensor> {
        let name = &self.root(name).to_string();
        let dims = match self.index.parameters.get(name) {
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
        let name = &self.root(name).to_string();
        self.read_as(&model_key(name), name, wanted)
    }

    /// Returns the parameter to which a parameter is tied, or its own name.
    pub(super) fn root<'a>(&'a self, name: &'a str) -> &'a str {
        self.index.ties.get(name).map_or(name, String::as_str)
    }

    /// Returns the reads that [`read`](Self::read) makes: files, and ranges of elements in them.
    pub(super) fn reads(&self, name: &str, wanted: &Region) -> Vec<(String, Range<usize>)> {
        let Some(described) = self.index.parameters.get(self.root(name)) else { return Vec::new() };
        let of_part = |part: &Part| {
            let common = wanted.common(&part.region(&described.dims));
            reads_of(&common).map(|(_, range)| (part.file.clone(), range)).collect::<Vec<_>>()
        };
        described.parts.iter().flat_map(of_part).collect()
    }

    /// Returns the optimizer's keys of a parameter, and whether each has a value for each element.
    pub(super) fn optimizer_keys(&self, name: &str) -> impl Iterator<Item = (&String, bool)> {
        let of = self.index.optimizer.iter().flatten().filter(move |(_, entry)| entry.of == name);
        of.map(|(key, entry)| (key, entry.by_element))
    }

    pub(super) fn loss_scale(&self) -> Option<LossScalerState> {
        self.index.loss_scale
    }

    /// Adds elements from a rank's memory to what can be read from its file.
    pub(super) fn insert(&mut self, file: &str, key: &str, start: usize, elements: Tensor) {
        self.files.entry(file.into()).or_default().insert(key, start, elements);
    }

    fn missing(&self, name: &str) -> Error {
        let help = "it is of another model";
        Error::file(&self.folder, format!("it has no parameter {name}: {help}"))
    }

    /// Reads elements of the tensor under this key, which is divided into parts like the parameter `name`.
    fn read_as(&mut self, key: &str, name: &str, wanted: &Region) -> Result<Tensor> {
        let Some(described) = self.index.parameters.get(name) else { return Err(self.missing(name)) };
        let refuse = || {
            let problem = format!("its parts of {name} overlap, and others are missing");
            Error::file(&self.folder, problem)
        };
        self.check_dims(name, described, wanted)?;
        let mut pieces: Vec<(usize, Tensor)> = Vec::new();
        for part in &described.parts {
            let common = wanted.common(&part.region(&described.dims));
            if common.is_empty() {
                continue;
            }
            let Some(file) = self.files.get_mut(&part.file) else {
                let problem = format!("it has no file {}", part.file);
                return Err(Error::file(&self.folder, problem));
            };
            for (runs, range) in reads_of(&common) {
                let start = range.start;
                let read = file.read(key, range)?;
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
        let described = self.index.parameters.get(name);
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

    /// Returns the state that an optimizer had of these pieces, by its keys.
    pub(super) fn optimizer_state(&mut self, pieces: &[Piece]) -> Result<HashMap<String, Tensor>> {
        let Some(entries) = self.index.optimizer.clone() else {
            let problem = "it was written without an optimizer; load it without one";
            return Err(Error::file(&self.folder, problem));
        };
        let mut of: HashMap<&str, Vec<(&String, &OptimizerEntry)>> = HashMap::new();
        entries.iter().for_each(|(key, entry)| of.entry(&entry.of).or_default().push((key, entry)));
        let mut state = HashMap::new();
        for piece in pieces {
            for (key, entry) in of.get(piece.name.as_str()).into_iter().flatten() {
                let value = self.remembered(key, entry, &piece.region)?;
                let value = if entry.by_element { piece.padded(value)? } else { value };
                state.insert(format!("{}{}", piece.var_name, &key[piece.name.len()..]), value);
            }
        }
        Ok(state)
    }

    /// Returns the whole state of the optimizer, by its keys; `None` if the checkpoint was written without one.
    pub(super) fn whole_optimizer(&mut self) -> Result<Option<HashMap<String, Tensor>>> {
        let Some(entries) = self.index.optimizer.clone() else { return Ok(None) };
        let mut state = HashMap::new();
        for (key, entry) in entries {
            let dims = self.index.parameters.get(&entry.of).map(|described| described.dims.clone());
            let dims = dims.ok_or_else(|| self.missing(&entry.of))?;
            let value = self.remembered(&key, &entry, &Region::whole(&dims))?;
            state.insert(key, if entry.by_element { value.reshape(dims)? } else { value });
        }
        Ok(Some(state))
    }

    /// Refuses a model that has a parameter which the checkpoint does not have, or has in another shape.
    pub(super) fn check(&self, pieces: &[Piece]) -> Result<()> {
        for piece in pieces.iter().filter(|piece| !piece.is_buffer || self.has(&piece.name)) {
            match self.index.parameters.get(self.root(&piece.name)) {
                None => return Err(self.missing(&piece.name)),
                Some(described) => self.check_dims(&piece.name, described, &piece.region)?,
            }
        }
        Ok(())
    }

    /// Whether the checkpoint has a parameter or buffer of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.index.parameters.contains_key(self.root(name))
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn check_dims(&self, name: &str, described: &TensorEntry, wanted: &Region) -> Result<()> {
        if described.dims == wanted.dims {
            return Ok(());
        }
        let (got, expected) = (&described.dims, &wanted.dims);
        let problem =
            format!("its {name} is {got:?}, and the model's is {expected:?}: it is of another model");
        Err(Error::file(&self.folder, problem))
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
                return file.whole(&key);
            }
        }
        Err(Error::file(&self.folder, format!("it has no {key}")))
    }
}

/// Returns the ranges of a part to read for the elements that are needed: neighbouring runs at once, with the small gaps
/// between them.
fn reads_of(common: &[Overlap]) -> impl Iterator<Item = (&[Overlap], Range<usize>)> {
    common.chunk_by(|run, next| next.second - (run.second + run.len) <= GAP).map(|runs| {
        let (start, end) = runs.iter().fold((usize::MAX, 0), |(start, end), run| {
            (start.min(run.second), end.max(run.second + run.len))
        });
        (runs, start..end)
    })
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
        let mut saved = lock(&self.0);
        let read = |range: &Range<usize>| {
            let runs = Runs { start: range.start, len: range.len(), stride: range.len(), count: 1 };
            let region = Region { dims: shape.dims().to_vec(), runs, window: 0..range.len() };
            Ok(saved.read(name, &region)?.to_dtype(dtype)?)
        };
        let parts = ranges.iter().map(read).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0)
    }
}
