//! Writes checkpoints: each rank writes its parts, and rank 0 the index.

use std::collections::BTreeMap;
use std::path::PathBuf;

use comm::Communicator;
use training::{Checkpoint, Checkpoints, FileHash};

use super::Snapshot;
use super::shard_index::ShardIndex;
use super::snapshot::SnapshotParts;
use super::together::complete_together;
use crate::agreement::{gather, rank_and_count};
use crate::{Error, Result, with_keep_alive};

impl Snapshot {
    /// Writes the snapshot. Call on every rank of the groups, which may be separate ones, so that training continues at
    /// the same time; a rank that holds all pieces may write alone, without a group.
    ///
    /// # Errors
    /// Those of [`save_checkpoint`](crate::DistributedModel::save_checkpoint).
    pub fn write(
        &self,
        groups: &[&dyn Communicator],
        checkpoints: &Checkpoints,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let SnapshotParts { file, parts, optimizer, ties, loss_scale } = self.described.clone();
        // Additional sets may be on any rank; of those with one name the first is written.
        let named = gather(groups, checkpoint.tensors.keys().cloned().collect::<Vec<String>>())?;
        let is_own = |name: &String| {
            named.iter().position(|of_rank| of_rank.contains(name)) == Some(rank_and_count(groups).0)
        };
        let part = |number: &u64| {
            let write = || -> Result<Vec<(String, FileHash)>> {
                let own = (!self.tensors.is_empty()).then_some((&file, &self.tensors));
                let sets = checkpoint.tensors.iter().filter(|(name, _)| is_own(name)).chain(own);
                sets.map(|(name, set)| Ok((name.clone(), checkpoints.draft(*number).write(name, set)?)))
                    .collect()
            };
            Ok((with_keep_alive(groups, write)?, parts, optimizer, ties))
        };
        let complete = |number: &u64, all: Vec<(Vec<(String, FileHash)>, _, _, _)>| {
            let mut files = BTreeMap::new();
            let mut index =
                ShardIndex { loss_scale, extra: checkpoint.extra.clone(), ..ShardIndex::default() };
            for (file, parts, optimizer, ties) in all {
                files.extend(file);
                index.add(parts, optimizer, ties);
            }
            let draft = checkpoints.draft(*number);
            let extra = serde_json::to_value(&index).map_err(|error| Error::file(&draft.folder(), error))?;
            let checkpoint = Checkpoint { extra, tensors: BTreeMap::new(), ..checkpoint.clone() };
            Ok(draft.commit(&checkpoint, files).map(drop)?)
        };
        let begin = || Ok(checkpoints.begin()?.number());
        let number = complete_together(groups, begin, part, complete)?;
        Ok(checkpoints.draft(number).folder())
    }
}
