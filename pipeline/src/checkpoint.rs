//! Checkpoints of a pipeline: each rank writes its own stages, and reads the variables that it needs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor, Var};
use comm::complete_together;
use serde::{Deserialize, Serialize};
use training::internal::{OPTIMIZER_KEY, state_of_part};
use training::{Checkpoint, Checkpoints, Contents, FileHash, OptimizerState};

use crate::groups::peer_failed;
use crate::{Error, Pipeline, Result};

/// Extra data in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Extra {
    /// Variable name to the name of the tensor set (file) that contains it.
    sets: BTreeMap<String, String>,
    /// Number of tensor-parallel ranks that share each layer; each of them has separate sets.
    parts: usize,
    /// The caller's extra data.
    extra: serde_json::Value,
}

impl Pipeline {
    /// Writes a checkpoint: each rank writes its stages and its part of the optimizer state to a separate file; one manifest
    /// contains the hashes of all. Every rank must call it, with the same folder, which all ranks must be able to access. Of
    /// several data-parallel replicas of a stage, the first one writes.
    ///
    /// `checkpoint` contains everything else that is to be saved. That of the first rank is used, except for its tensors:
    /// each rank of the first replica writes its own, under names that no other rank uses.
    ///
    /// A crash at any moment leaves either the previous checkpoint or the complete new one: see [`Checkpoints`].
    ///
    /// # Memory
    /// A copy of this rank's optimizer state.
    ///
    /// # Errors
    /// [`Error::Training`] if a file cannot be written, on the other ranks [`Error::PeerFailed`]; the latest checkpoint is
    /// then unchanged. Failures of communication.
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap, linear, loss};
    /// use comm::Local;
    /// use pipeline::{Modules, Pipeline, PipelineConfig};
    /// use training::{Checkpoint, CheckpointConfig, Checkpoints, Sgd, SgdConfig};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let dir = folder.path().join("run");
    /// let steps = Local::run_shared(2, |comm| {
    ///     let layer = |vb| linear(4, 4, vb);
    ///     let modules = Modules::new().module("a", layer).module("b", layer);
    ///     let builder = |map: &VarMap| VarBuilder::from_varmap(map, DType::F32, &Device::Cpu);
    ///     let x = Tensor::zeros((1, 4), DType::F32, &Device::Cpu)?;
    ///     let pipeline = Pipeline::new(comm, &modules, &builder, &x, loss::mse, &PipelineConfig::default())?;
    ///     let mut sgd = Sgd::named(pipeline.named_vars(), SgdConfig::default()).map_err(candle_core::Error::from)?;
    ///     let config = CheckpointConfig { dir: dir.clone(), ..CheckpointConfig::default() };
    ///     let checkpoints = Checkpoints::open(config).map_err(candle_core::Error::from)?;
    ///     let now = Checkpoint { step: 600, ..Checkpoint::default() };
    ///     pipeline.save_checkpoint(&checkpoints, Some(&sgd), &now)?;
    ///     // Some day later:
    ///     let latest = checkpoints.latest().map_err(candle_core::Error::from)?;
    ///     let Some(latest) = latest else { return Ok(0) };
    ///     pipeline.load_checkpoint(&latest, Some(&mut sgd))?;
    ///     Ok(latest.step)
    /// })?;
    /// assert_eq!(steps, [600, 600]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_checkpoint(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        if let Some(first) = self.failed() {
            return Err(first.clone());
        }
        let groups = self.groups();
        let writes = groups.dp.as_ref().is_none_or(|copies| copies.rank() == 0);
        let number = complete_together(
            &groups.all().collect::<Vec<_>>(),
            || checkpoints.begin().map(|draft| draft.number()).map_err(Error::from),
            |number| writes.then(|| self.write(checkpoints, *number, optimizer, checkpoint)).transpose(),
            |number, all| {
                commit(checkpoints, *number, checkpoint, all.into_iter().flatten().collect(), self.parts())
            },
            peer_failed,
        )?;
        Ok(checkpoints.draft(number).folder())
    }

    /// Reads a checkpoint that [`Pipeline::save_checkpoint`] has written, with any split into stages and any number of ranks
    /// and replicas; only the number of tensor-parallel ranks must be the same. Every rank must call it, with the same
    /// checkpoint. Returns what was saved as [`Checkpoint::extra`].
    ///
    /// # Errors
    /// [`training::Error::DamagedCheckpoint`]; a checkpoint of another model. Nothing is then changed on any rank, and the
    /// other ranks return [`Error::PeerFailed`]. The cause, if an earlier step failed; failures of communication.
    pub fn load_checkpoint(
        &self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<serde_json::Value> {
        if let Some(first) = self.failed() {
            return Err(first.clone());
        }
        let groups = self.groups();
        let Saved { values, state, extra } = groups.all_agree(self.read(contents, optimizer.is_some()))?;
        let loaded = match optimizer {
            Some(optimizer) => optimizer.load_state(&state).map_err(Error::from),
            None => Ok(()),
        };
        groups.all_agree(loaded)?;
        let set = values.into_iter().try_for_each(|(var, value)| var.set(&value));
        groups.all_agree(set.map_err(Error::during("setting a variable")))?;
        Ok(extra)
    }

    fn parts(&self) -> usize {
        self.groups().tp.as_ref().map_or(1, |tp| tp.world_size())
    }

    /// Returns the name of this rank's own set, which depends on its tensor-parallel rank if it shares layers.
    fn own(&self, set: &str) -> String {
        match &self.groups().tp {
            Some(tp) if tp.world_size() > 1 => format!("{set}-part-{}", tp.rank()),
            _ => set.to_string(),
        }
    }

    fn write(
        &self,
        checkpoints: &Checkpoints,
        number: u64,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<Written> {
        let draft = checkpoints.draft(number);
        let set = format!("rank-{}", self.groups().pp.rank());
        let vars = self.all_vars();
        let mut tensors: HashMap<String, Tensor> =
            vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        if let Some(optimizer) = optimizer {
            let is_owned = |key: &str, _: &Tensor| is_of(&vars, key);
            tensors.extend(state_of_part(optimizer, "Pipeline::named_vars", is_owned)?);
        }
        let mut written = Written::default();
        written.sets.extend(tensors.keys().map(|name| (name.clone(), set.clone())));
        let own = self.own(&set);
        for (name, tensors) in checkpoint.tensors.iter().chain([(&own, &tensors)]) {
            written.files.push((name.clone(), draft.write(name, tensors)?));
        }
        Ok(written)
    }

    /// Reads what this rank needs, without changing anything.
    fn read(&self, contents: &Contents, has_optimizer: bool) -> Result<Saved> {
        let misfit = |problem: String| Error::Checkpoint { folder: contents.folder.clone(), problem };
        let Extra { sets, parts, extra } = serde_json::from_value(contents.extra.clone())
            .map_err(|reason| misfit(format!("it is of no pipeline: {reason}")))?;
        if parts != self.parts() {
            return Err(misfit(format!(
                "{parts} ranks shared each layer, now {}: give as many ranks to the axis tp",
                self.parts()
            )));
        }
        let vars = self.all_vars();
        let of_optimizer =
            |name: &str| name.strip_prefix(OPTIMIZER_KEY).is_some_and(|name| is_of(&vars, name));
        let needed = |name: &str| vars.iter().any(|(var, _)| var == name) || of_optimizer(name);
        let files: BTreeSet<&String> =
            sets.iter().filter(|(name, _)| needed(name)).map(|(_, set)| set).collect();
        let mut found = HashMap::new();
        for set in files.into_iter().map(|set| self.own(set)) {
            contents.check(&set)?;
            found.extend(training::load_tensors(&contents.path(&set), &Device::Cpu)?);
        }
        let mut values = Vec::with_capacity(vars.len());
        for (name, var) in &vars {
            let value = found.get(name).ok_or_else(|| misfit(format!("it has no tensor `{name}`")))?;
            if value.shape() != var.shape() || value.dtype() != var.dtype() {
                let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.dtype(), tensor.dims());
                let (saved, own) = (describe(value), describe(var));
                return Err(misfit(format!("its tensor `{name}` is {saved}, the model's is {own}")));
            }
            let value = value.to_device(var.device()).map_err(Error::during("reading a checkpoint"))?;
            values.push((var.clone(), value));
        }
        let own = found.iter().filter(|(name, _)| has_optimizer && of_optimizer(name));
        let state = own.map(|(name, tensor)| (name[OPTIMIZER_KEY.len()..].to_string(), tensor.clone()));
        let state = state.collect();
        Ok(Saved { values, state, extra })
    }
}

/// What a rank has read.
struct Saved {
    values: Vec<(Var, Tensor)>,
    /// The optimizer state.
    state: HashMap<String, Tensor>,
    extra: serde_json::Value,
}

/// Returns true if `name` is that of optimizer state of one of these variables.
fn is_of(vars: &[(String, Var)], name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(of, _)| vars.iter().any(|(var, _)| var == of))
}

/// What a rank has written.
#[derive(Default, Serialize, Deserialize)]
struct Written {
    sets: BTreeMap<String, String>,
    files: Vec<(String, FileHash)>,
}

fn commit(
    checkpoints: &Checkpoints,
    number: u64,
    checkpoint: &Checkpoint,
    all: Vec<Written>,
    parts: usize,
) -> Result<()> {
    let (mut sets, mut files) = (BTreeMap::new(), BTreeMap::new());
    for written in all {
        sets.extend(written.sets);
        files.extend(written.files);
    }
    let extra = Extra { sets, parts, extra: checkpoint.extra.clone() };
    let extra = serde_json::to_value(extra).map_err(|reason| Error::Checkpoint {
        folder: PathBuf::new(),
        problem: format!("its manifest cannot be written: {reason}"),
    })?;
    let checkpoint = Checkpoint { extra, tensors: BTreeMap::new(), ..checkpoint.clone() };
    checkpoints.draft(number).commit(&checkpoint, files).map(drop).map_err(Error::from)
}
