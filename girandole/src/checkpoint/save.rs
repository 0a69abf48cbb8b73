//! Writes checkpoints: each rank writes its parts, and rank 0 the manifest.

use std::collections::BTreeMap;
use std::path::PathBuf;

use comm::{Communicator, complete_together};
use training::build::Model;
use training::{Checkpoint, Checkpoints, FileHash, OptimizerState};

use super::manifest::Manifest;
use super::snapshot::SnapshotParts;
use super::{Snapshot, with_keep_alive};
use crate::agreement::{all_agree, peer_failed};
use crate::{Error, Parallel, Result};

impl<M: Model> Parallel<M> {
    /// Writes a checkpoint of the trained state: each rank writes its parts of the parameters and of the optimizer
    /// state; the manifest holds the loss scale. Call on every rank, with the same folder, which all ranks must see.
    /// Rank 0's `checkpoint` holds everything else that is stored, including additional tensor sets.
    ///
    ///
    /// A crash at any moment leaves either the last checkpoint intact or the new one complete.
    ///
    /// # Memory
    /// A copy of this rank's parts and of the optimizer state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged: a file that cannot be written; an optimizer that was not
    /// made from [`named_vars`](Parallel::named_vars); failures of communication.
    pub fn save(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let world = &**self.mesh().world();
        let snapshot = all_agree(world, self.snapshot(optimizer))?;
        snapshot.write(world, checkpoints, checkpoint)
    }
}

impl Snapshot {
    /// Writes the snapshot. Call on every rank of `world`, which may be a separate group, so that training continues at
    /// the same time.
    ///
    /// # Errors
    /// Those of [`Parallel::save`].
    pub fn write(
        &self,
        world: &dyn Communicator,
        checkpoints: &Checkpoints,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let SnapshotParts { file, parts, optimizer, ties, loss_scale } = self.described.clone();
        let part = |number: &u64| {
            let write = || match self.tensors.is_empty() {
                true => Ok(None),
                false => Ok(Some((file.clone(), checkpoints.draft(*number).write(&file, &self.tensors)?))),
            };
            Ok((with_keep_alive(world, write)?, parts, optimizer))
        };
        let complete = |number: &u64, all: Vec<(Option<(String, FileHash)>, _, _)>| {
            let mut files = BTreeMap::new();
            let mut manifest =
                Manifest { ties, loss_scale, extra: checkpoint.extra.clone(), ..Manifest::default() };
            for (file, parts, optimizer) in all {
                files.extend(file);
                manifest.add(parts, optimizer);
            }
            let draft = checkpoints.draft(*number);
            let extra =
                serde_json::to_value(&manifest).map_err(|error| Error::file(&draft.folder(), error))?;
            Ok(draft.commit(&Checkpoint { extra, ..checkpoint.clone() }, files).map(drop)?)
        };
        let begin = || Ok(checkpoints.begin()?.number());
        let number = complete_together(&[world], begin, part, complete, peer_failed)?;
        Ok(checkpoints.draft(number).folder())
    }
}
