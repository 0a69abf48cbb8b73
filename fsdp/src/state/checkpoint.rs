//! Sharded checkpoints: each rank writes its own shard, and reads the ranges that it keeps.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use comm::complete_together;
use training::internal::{OPTIMIZER_KEY, state_of_part};
use training::{Checkpoint, Checkpoints, Contents, FileHash, OptimizerState};

use super::load::peer_failed;
use super::saved::{
    Description, Extra, Kind, SavedCheckpoint, UnitDescription, buffer_key, set_name, shard_key,
};
use crate::built::Param;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Writes a checkpoint: each rank writes its shards and its part of the optimizer state to a separate file; one manifest
    /// contains the hashes of all. Must be called on every rank, with the same folder, which all ranks must be able to
    /// access. Of [`Fsdp::buffers`], those of rank 0 are saved. `checkpoint` contains everything else that is to be saved;
    /// that of rank 0 is used.
    ///
    /// A crash at any moment leaves either the previous checkpoint or the complete new one: see [`Checkpoints`].
    ///
    /// # Memory
    /// A copy of this rank's optimizer state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged: [`Error::File`] if a rank could not write; an optimizer that was
    /// not made from [`Fsdp::named_vars`]. The first cause, if an earlier call failed; failures of communication.
    pub fn save_checkpoint(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        self.core().check()?;
        let groups = &self.core().groups;
        let world = &*groups.world;
        // Of several replicas, the first one writes.
        let writes = groups.dp.as_ref().is_none_or(|replicas| replicas.rank() == 0);
        let number = complete_together(
            &[world],
            || Ok(checkpoints.begin()?.number()),
            |number| writes.then(|| self.write_part(checkpoints, *number, optimizer)).transpose(),
            |number, all| self.commit(checkpoints, *number, checkpoint, all.into_iter().flatten().collect()),
            peer_failed(Path::new("the checkpoint")),
        )?;
        Ok(checkpoints.draft(number).folder())
    }

    fn write_part(
        &self,
        checkpoints: &Checkpoints,
        number: u64,
        optimizer: Option<&dyn OptimizerState>,
    ) -> Result<(String, FileHash)> {
        let mut tensors: HashMap<String, Tensor> = HashMap::new();
        for param in self.core().params() {
            tensors.insert(shard_key(&param.name), param.shard.as_detached_tensor());
        }
        // Buffers of rank 0 only, which is one of the ranks that write.
        if self.core().groups.shard_rank() == 0 {
            let buffers = self.core().buffers.iter();
            tensors.extend(buffers.map(|(name, var)| (buffer_key(name), var.as_detached_tensor())));
        }
        if let Some(optimizer) = optimizer {
            let lens = self.core().params().map(|param| (&*param.name, param.shard.elem_count()));
            let lens: Vec<_> = lens.collect();
            let is_owned = |key: &str, value: &Tensor| Kind::of(key, value.dims(), &lens) != Kind::Unowned;
            tensors.extend(state_of_part(optimizer, "Fsdp::named_vars", is_owned)?);
        }
        let name = set_name(self.core().groups.shard_rank());
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
        let core = self.core();
        let fsdp = Description {
            shards: core.groups.shards(),
            pack_elements: core.config.pack_elements,
            by_parameter: true,
            units: core.units.iter().map(UnitDescription::of).collect(),
        };
        let extra = Extra { fsdp, extra: checkpoint.extra.clone() };
        let extra = serde_json::to_value(extra)
            .map_err(|error| Error::file(Path::new("the manifest"), error.to_string()))?;
        checkpoints.draft(number).commit(&Checkpoint { extra, ..checkpoint.clone() }, files)?;
        Ok(())
    }

    /// Reads a checkpoint that [`Fsdp::save_checkpoint`] has written, at this or any other number of ranks and with any
    /// [`crate::FsdpConfig`]: shards, those buffers that it contains, and the optimizer state if an optimizer is given. Must
    /// be called on every rank, with the same checkpoint. Returns what was saved as [`Checkpoint::extra`]. Gradients
    /// accumulated by [`Fsdp::backward_no_sync`] belong to the old parameters and are dropped.
    ///
    /// # Cost
    /// Each rank reads what it keeps, and additionally reads some of the files whole to check their hashes.
    ///
    /// # Errors
    /// On every rank: [`Error::File`] and [`training::Error::DamagedCheckpoint`] if the checkpoint is of another model or is
    /// damaged. Failures of communication.
    pub fn load_checkpoint(
        &self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<serde_json::Value> {
        let world = &*self.core().groups.world;
        // Hashes are checked first, so that no rank interprets damaged data.
        let whole =
            self.core().check().and_then(|()| Ok(contents.check_share(world.rank(), world.world_size())?));
        self.all_agree(&contents.folder, whole)?;
        let opened = SavedCheckpoint::open(contents).and_then(|saved| {
            saved.check(contents, &self.core().units)?;
            saved.check_buffers(contents, &self.core().buffers)?;
            Ok(saved)
        });
        let saved = self.all_agree(&contents.folder, opened)?;
        let read = self.core().replace_shards(|| self.read_parts(&contents.folder, &saved, optimizer));
        self.all_agree(&contents.folder, read)?;
        Ok(saved.extra)
    }

    fn read_parts(
        &self,
        folder: &Path,
        saved: &SavedCheckpoint,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        let core = self.core();
        let rank = core.groups.shard_rank();
        let places = core.units.iter().enumerate();
        let places = places.flat_map(|(unit, built)| (0..built.params.len()).map(move |param| (unit, param)));
        let places: Vec<_> = places.collect();
        let part = |saved: &SavedCheckpoint, key: &str, (unit, param): (usize, usize)| {
            let dtype = saved.dtype(key);
            saved.shard(key, (unit, param), (&core.units[unit].layout, rank), dtype)
        };
        if let Some(optimizer) = optimizer {
            let mut state = HashMap::new();
            for (key, kind) in saved.optimizer_keys() {
                let value = match kind {
                    Kind::Shard(param) => part(saved, &key, places[param])?,
                    Kind::Number => saved.whole(&key)?,
                    Kind::Unowned => {
                        let key = &key[OPTIMIZER_KEY.len()..];
                        return Err(Error::file(
                            folder,
                            format!(
                                "its optimizer state `{key}` belongs to no parameter: its optimizer was not made from \
                                 `Fsdp::named_vars`; load the weights alone, without an optimizer"
                            ),
                        ));
                    }
                };
                state.insert(key[OPTIMIZER_KEY.len()..].to_string(), value);
            }
            optimizer.load_state(&state)?;
        }
        for (place, Param { name, shard, .. }) in places.iter().zip(core.params()) {
            let value = part(saved, &shard_key(name), *place)?.to_dtype(shard.dtype())?;
            shard.set(&value.to_device(shard.device())?)?;
        }
        for (name, var) in &core.buffers {
            if let Some(value) = saved.buffer(name)? {
                var.set(&value.to_dtype(var.dtype())?.to_device(var.device())?)?;
            }
        }
        Ok(())
    }
}

/// Reads all parameters of a sharded checkpoint, whole and by name, then its buffers: for a model that is not sharded. Any
/// process can call it.
///
/// # Memory
/// The whole model.
///
/// # Errors
/// [`Error::File`] if it is not a sharded checkpoint; [`training::Error::DamagedCheckpoint`].
pub fn full_tensors(contents: &Contents) -> Result<Vec<(String, Tensor)>> {
    contents.check_all()?;
    let saved = SavedCheckpoint::open(contents)?;
    let units = saved.description.units.clone();
    let mut all = Vec::new();
    for (unit, described) in units.iter().enumerate() {
        for (param, (name, dims)) in described.parameters.iter().enumerate() {
            let len = dims.iter().product();
            let values = saved.read(&shard_key(name), (unit, param), 0..len)?;
            all.push((name.clone(), values.reshape(dims.as_slice())?));
        }
    }
    for (name, ..) in saved.buffers() {
        all.extend(saved.buffer(&name)?.map(|value| (name, value)));
    }
    Ok(all)
}
