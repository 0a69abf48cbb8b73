//! Writes a trained language model from any layout as a folder that transformers loads.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use models::{CausalLm, FolderConfig, FolderWriter, Lora, Weights};
use strategy::checkpoint::CheckpointReader;
use strategy::{DistributedModel, with_keep_alive};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

use crate::agreement::all_agree;
use crate::{Error, Parallel, Result};

/// Folder for the ranks' parts until the model folder is written.
const PARTS: &str = ".unfinished-parts";

impl Parallel<CausalLm> {
    /// Writes the model as a folder that transformers loads. Parameters that were not trained are taken from `weights`,
    /// the initial weights of the model; with `lora`, the adapters are merged into them. Unless `how` says another, each
    /// tensor has the dtype that it has in the folder of `weights`. Call on every rank; all ranks must see the folder.
    ///
    /// # Cost
    /// Each rank writes its parts there; then rank 0 reads and writes one tensor after the other, and removes the
    /// parts.
    ///
    /// # Errors
    /// On every rank: a folder that cannot be written; failures of communication.
    pub fn save_folder(
        &self,
        folder: &Path,
        weights: &Weights,
        how: &FolderConfig,
        lora: Option<&Lora>,
    ) -> Result<()> {
        let dtype = self.config().dtype;
        self.collected(folder, |saved| {
            let trained: HashSet<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
            let adapters = lora.map(|lora| adapters(saved, lora)).transpose()?.unwrap_or_default();
            // In full precision, whatever the model was trained in: each is rounded once, when it is written.
            let before = weights.tensors(if dtype == DType::F64 { dtype } else { DType::F32 }, &Device::Cpu);
            let before = |name| match weights.dtype(name) {
                Some(DType::F64) => before.clone().set_dtype(DType::F64),
                _ => before.clone(),
            };
            let dtypes_of = how.dtypes_of.clone().or_else(|| Some(weights.clone()));
            let how = FolderConfig { dtypes_of, ..how.clone() };
            let mut writer = FolderWriter::begin(folder, weights.config(), dtype, &how)?;
            for (name, dims) in weights.shapes() {
                let weight = match trained.contains(name) {
                    true => saved.whole(name)?,
                    false => before(name).get(dims.as_slice(), name)?,
                };
                let merged = lora.map(|lora| lora.merged(name, &weight, &adapters)).transpose()?;
                writer.write(name, merged.as_ref().unwrap_or(&weight))?;
            }
            Ok(writer.finish()?)
        })
    }

    /// Writes only what is trained, the adapters and modules beside them, in the format of `peft`. Call on every rank; all ranks must see the folder.
    ///
    /// # Errors
    /// Those of [`save_folder`](Self::save_folder).
    pub fn save_adapters(&self, folder: &Path, lora: &Lora) -> Result<()> {
        self.collected(folder, |saved| {
            let all = adapters(saved, lora)?;
            Ok(lora.save(folder, all)?)
        })
    }

    /// Collects all trained parameters in a temporary checkpoint, and calls `with` on it on rank 0.
    fn collected(
        &self,
        folder: &Path,
        with: impl FnOnce(&mut CheckpointReader) -> Result<()> + Send,
    ) -> Result<()> {
        let world = &**self.mesh().world();
        let parts = folder.join(PARTS);
        let open = || Ok(Checkpoints::open(CheckpointConfig { dir: parts.clone(), keep: 1 })?);
        // The first rank creates the folder, before the others open it.
        let first = all_agree(world, if world.rank() == 0 { open().map(Some) } else { Ok(None) })?;
        let checkpoints = all_agree(world, first.map_or_else(open, Ok))?;
        let snapshot = all_agree(world, self.snapshot(None))?;
        snapshot.write(&[world], &checkpoints, &Checkpoint::default())?;
        let is_first = world.rank() == 0;
        with_keep_alive(&[world], || {
            if !is_first {
                return Ok(());
            }
            let latest = checkpoints.latest().map_err(Error::from);
            let contents = latest.and_then(|found| found.ok_or_else(|| Error::file(&parts, "it is gone")));
            let done = contents.and_then(|contents| with(&mut CheckpointReader::open(&contents)?));
            let removed = std::fs::remove_dir_all(&parts).map_err(|error| Error::file(&parts, error));
            done.and(removed)
        })
    }
}

fn adapters(saved: &mut CheckpointReader, lora: &Lora) -> Result<HashMap<String, Tensor>> {
    let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
    let names = names.into_iter().filter(|name| lora.trains(name));
    names.map(|name| Ok((name.clone(), saved.whole(&name)?))).collect()
}
