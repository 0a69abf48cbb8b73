//! Checkpoints of a divided model: each rank writes its own part, and reads the part that it needs.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use comm::{Communicator, complete_together};
use serde::{Deserialize, Serialize};
use training::internal::{OPTIMIZER_KEY, state_of_part};
use training::{Checkpoint, Checkpoints, Contents, FileHash, OptimizerState, TensorFile};

use crate::builder::slice_part;
use crate::{Error, Parameter, Result, Split, TensorParallel};

/// Prefix of the keys of parameters in a checkpoint file, which has the optimizer's state, too.
const MODEL: &str = "model.";

/// The manifest's extra data: this crate's, and the user's.
#[derive(Serialize, Deserialize)]
struct Extra {
    tensor_parallel: Description,
    extra: serde_json::Value,
}

/// How the model was divided.
#[derive(Serialize, Deserialize)]
struct Description {
    ranks: usize,
    /// Each parameter, in order of construction.
    parameters: Vec<Divided>,
}

/// A parameter and how it was divided, without which a part's rows would be taken for others.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Divided {
    name: String,
    /// The whole shape.
    dims: Vec<usize>,
    split: String,
}

impl Divided {
    fn of(parameter: &Parameter) -> Self {
        let split = format!("{:?}", parameter.split());
        Self { name: parameter.name().to_string(), dims: parameter.dims().to_vec(), split }
    }
}

impl<M> TensorParallel<M> {
    /// Writes a checkpoint: each tensor-parallel rank writes its part of the model and of the optimizer state to a separate
    /// file; one manifest contains the hashes of all. Must be called on every rank, with the same folder, which all ranks
    /// must be able to access. `checkpoint` contains everything else that is to be saved; that of rank 0 is used.
    ///
    /// A crash at any moment leaves either the previous checkpoint or the complete new one: see [`Checkpoints`].
    ///
    /// # Memory
    /// A copy of this rank's optimizer state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged: a rank could not write; an optimizer that was not made from
    /// [`TensorParallel::named_vars`]. Failures of communication.
    ///
    /// ```
    /// use comm::{Local, Mesh};
    /// use tensor_parallel::{ParallelMlp, TensorParallel, TensorParallelConfig, Weights};
    /// use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let config = CheckpointConfig { dir: folder.path().into(), ..CheckpointConfig::default() };
    /// let checkpoints = Checkpoints::open(config)?;
    /// let steps = Local::run_shared(2, |comm| {
    ///     let mesh = Mesh::new(comm, &[("tp", 2)])?;
    ///     let model = |builder| ParallelMlp::new(4, 8, &builder);
    ///     let parallel = TensorParallel::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(1), model)?;
    ///     let failed = |error: training::Error| comm::Error::from(tensor_parallel::Error::from(error));
    ///     let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default()).map_err(failed)?;
    ///     parallel.save_checkpoint(&checkpoints, Some(&adam), &Checkpoint { step: 7, ..Checkpoint::default() })?;
    ///     let Some(contents) = checkpoints.latest().map_err(failed)? else { return Ok(0) };
    ///     parallel.load_checkpoint(&contents, Some(&mut adam))?;
    ///     Ok(contents.step)
    /// })?;
    /// assert_eq!(steps, [7, 7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_checkpoint(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        self.check()?;
        let world = self.world();
        // Of several data-parallel replicas, the first one writes.
        let writes = self.dp().is_none_or(|dp| dp.rank() == 0);
        let number = complete_together(
            &[world],
            || Ok(checkpoints.begin()?.number()),
            |number| writes.then(|| self.write_part(checkpoints, *number, optimizer)).transpose(),
            |number, all| self.commit(checkpoints, *number, checkpoint, all.into_iter().flatten().collect()),
            peer_failed,
        )?;
        Ok(checkpoints.draft(number).folder())
    }

    fn write_part(
        &self,
        checkpoints: &Checkpoints,
        number: u64,
        optimizer: Option<&dyn OptimizerState>,
    ) -> Result<(String, FileHash)> {
        let own = self.parameters().iter();
        let mut tensors: HashMap<String, Tensor> =
            own.map(|p| (format!("{MODEL}{}", p.name()), p.var().as_detached_tensor())).collect();
        if let Some(optimizer) = optimizer {
            let is_owned = |key: &str, value: &Tensor| !self.is_unowned(key, value.dims());
            tensors.extend(state_of_part(optimizer, "TensorParallel::named_vars", is_owned)?);
        }
        let name = set_name(self.context().rank());
        let hash = checkpoints.draft(number).write(&name, &tensors)?;
        Ok((name, hash))
    }

    fn commit(
        &self,
        checkpoints: &Checkpoints,
        number: u64,
        checkpoint: &Checkpoint,
        files: BTreeMap<String, FileHash>,
    ) -> Result<()> {
        let parameters = self.parameters().iter().map(Divided::of).collect();
        let tensor_parallel = Description { ranks: self.context().ranks(), parameters };
        let extra = serde_json::to_value(Extra { tensor_parallel, extra: checkpoint.extra.clone() })
            .map_err(|error| Error::invalid("the checkpoint's extra", error, "give what JSON can hold"))?;
        checkpoints.draft(number).commit(&Checkpoint { extra, ..checkpoint.clone() }, files)?;
        Ok(())
    }

    /// Reads a checkpoint that [`save_checkpoint`](Self::save_checkpoint) has written, divided over this or any other number
    /// of ranks: parameters, and the optimizer state. Must be called on every rank, with the same checkpoint. Returns what
    /// was saved as [`Checkpoint::extra`].
    ///
    /// # Cost
    /// Each rank reads its part, and additionally reads some of the files whole to check their hashes. If the number of ranks
    /// has changed, each rank reads all parts, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, with nothing changed: the checkpoint is of another model, or is damaged. Failures of communication.
    pub fn load_checkpoint(
        &self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<serde_json::Value> {
        self.check()?;
        let world = self.world();
        let whole = contents.check_share(world.rank(), world.world_size()).map_err(Error::from);
        // Hashes are checked first, so that no rank interprets damaged data.
        all_agree(world, whole)?;
        let has_optimizer = optimizer.is_some();
        let read = || {
            let extra: Extra = serde_json::from_value(contents.extra.clone()).map_err(|reason| {
                misfit(&contents.folder, format!("it is no checkpoint of a divided model: {reason}"))
            })?;
            let saved = Saved::open(contents, extra.tensor_parallel)?;
            saved.check(self.parameters(), &contents.folder)?;
            let state = match has_optimizer {
                true => self.own_state(&saved, &contents.folder)?,
                false => HashMap::new(),
            };
            Ok((self.own_values(&saved)?, state, extra.extra))
        };
        let (values, state, extra) = all_agree(world, read())?;
        let loaded = optimizer.map_or(Ok(()), |optimizer| optimizer.load_state(&state));
        all_agree(world, loaded.map_err(Error::from))?;
        for (parameter, value) in self.parameters().iter().zip(values) {
            parameter.var().set(&value.to_device(parameter.var().device())?)?;
        }
        Ok(extra)
    }

    fn own_values(&self, saved: &Saved) -> Result<Vec<Tensor>> {
        let place = (self.context().rank(), self.context().ranks());
        let one = |parameter: &Parameter| {
            let value = saved.part(&format!("{MODEL}{}", parameter.name()), parameter, place)?;
            Ok(value.to_dtype(parameter.var().dtype())?)
        };
        self.parameters().iter().map(one).collect()
    }

    /// Returns the parameter that an optimizer's key belongs to.
    fn parameter_of(&self, key: &str) -> Option<&Parameter> {
        let (of, _) = key.rsplit_once('.')?;
        self.parameters().iter().find(|parameter| parameter.name() == of)
    }

    /// Returns true for optimizer state that may differ between ranks and belongs to no parameter.
    fn is_unowned(&self, key: &str, dims: &[usize]) -> bool {
        !dims.is_empty() && self.parameter_of(key).is_none_or(|parameter| parameter.var().dims() != dims)
    }

    /// Returns this rank's optimizer state: tensors that are divided like their parameters, and single numbers, which every
    /// rank has.
    fn own_state(&self, saved: &Saved, folder: &Path) -> Result<HashMap<String, Tensor>> {
        let place = (self.context().rank(), self.context().ranks());
        let mut state = HashMap::new();
        for (key, _, dims) in saved.files[0].tensors() {
            let Some(name) = key.strip_prefix(OPTIMIZER_KEY) else { continue };
            let value = match self.parameter_of(name) {
                Some(parameter) if dims == saved.shard_dims(parameter)? => {
                    saved.part(&key, parameter, place)?
                }
                _ if dims.is_empty() => saved.files[0].whole(&key)?,
                _ => {
                    let reason = "belongs to no parameter: its optimizer was not made from \
                                  `TensorParallel::named_vars`";
                    return Err(misfit(folder, format!("its optimizer state `{name}` {reason}")));
                }
            };
            state.insert(name.to_string(), value);
        }
        Ok(state)
    }
}

/// The files of a checkpoint, one per rank that it was divided over.
struct Saved {
    description: Description,
    files: Vec<TensorFile>,
}

impl Saved {
    fn open(contents: &Contents, description: Description) -> Result<Self> {
        let ranks = description.ranks.max(1);
        let files = (0..ranks).map(|rank| TensorFile::open(&contents.path(&set_name(rank))));
        let files = files.collect::<std::result::Result<_, _>>()?;
        Ok(Self { description, files })
    }

    /// Checks that the checkpoint is of the same model.
    fn check(&self, parameters: &[Parameter], folder: &Path) -> Result<()> {
        let own: Vec<Divided> = parameters.iter().map(Divided::of).collect();
        let saved = &self.description.parameters;
        let place = (0..own.len().max(saved.len())).find(|&place| own.get(place) != saved.get(place));
        let Some(place) = place else { return Ok(()) };
        let whole = |divided: &Divided| format!("{} {:?}", divided.name, divided.dims);
        let (own, saved) = match (own.get(place), saved.get(place)) {
            (Some(own), Some(saved)) if whole(own) == whole(saved) => (
                format!("it divided as {}", own.split),
                format!("{} divided as {}", whole(saved), saved.split),
            ),
            (own, saved) => {
                let shown = |of: Option<&Divided>| of.map_or("nothing".into(), whole);
                (shown(own), shown(saved))
            }
        };
        Err(misfit(folder, format!("it is of another model: it has {saved}, the model has {own}")))
    }

    /// Returns the shape of a parameter's part in the first file.
    fn shard_dims(&self, parameter: &Parameter) -> Result<Vec<usize>> {
        parameter.split().uneven_dims(parameter.name(), parameter.dims(), (0, self.files.len()))
    }

    /// Reads this rank's part of a tensor that is divided like `parameter`.
    fn part(&self, key: &str, parameter: &Parameter, (rank, ranks): (usize, usize)) -> Result<Tensor> {
        let (split, dims, then) = (parameter.split(), parameter.dims(), self.files.len());
        if split == Split::Whole || ranks == then {
            return Ok(self.files[rank % then].whole(key)?);
        }
        let mut all = Vec::with_capacity(then);
        for (old, file) in self.files.iter().enumerate() {
            let runs = split.runs(dims, old, then);
            all.push(file.whole(key)?.reshape((runs.count, runs.len))?);
        }
        // Each run of the whole tensor is the concatenation of the ranks' runs, in order of rank.
        slice_part(&Tensor::cat(&all, 1)?, split.runs(dims, rank, ranks), parameter.var().dims())
    }
}

/// Returns this rank's result if no rank has failed; otherwise an error on every rank.
pub(crate) fn all_agree<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    comm::all_agree([world], own, peer_failed)
}

fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFile { rank, reason: format!("failed: {reason}") }
}

fn misfit(folder: &Path, reason: String) -> Error {
    Error::File { action: "go on from", path: folder.to_path_buf(), reason }
}

fn set_name(rank: usize) -> String {
    format!("tp-{rank}")
}
