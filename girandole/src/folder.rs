//! A trained language model as a folder that transformers loads, from any layout.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use models::{CausalLm, FolderConfig, FolderWriter, Lora, ModelConfig, Weights};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

use crate::checkpoint::{Saved, agreed};
use crate::{Error, Parallel, Result};

/// Where the ranks' parts lie until the folder is written.
const PARTS: &str = ".unfinished-parts";

impl Parallel<CausalLm> {
    /// Writes the model as a folder that transformers loads. To be called on every rank; all see the folder.
    ///
    /// # Cost
    /// Each rank writes its parts there; then rank 0 reads and writes one tensor after the other, and removes the parts.
    ///
    /// # Errors
    /// On every rank: a folder that cannot be written; failures of communication.
    pub fn save_folder(&self, folder: &Path, config: &ModelConfig, how: &FolderConfig) -> Result<()> {
        let dtype = self.config().dtype;
        self.collected(
            folder,
            |_| true,
            |saved| {
                let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
                let mut writer = FolderWriter::begin(folder, config, dtype, how)?;
                for name in names {
                    writer.write(&name, &saved.whole(&name)?)?;
                }
                Ok(writer.finish()?)
            },
        )
    }

    /// Writes the model that `weights` are of, with the trained adapters merged into it, as a folder that transformers loads. To be called on
    /// every rank; all see the folder.
    ///
    /// # Cost
    /// Rank 0 reads the weights once more, one tensor after the other.
    ///
    /// # Errors
    /// Those of [`save_folder`](Self::save_folder).
    pub fn save_merged(
        &self,
        folder: &Path,
        weights: &Weights,
        how: &FolderConfig,
        lora: &Lora,
    ) -> Result<()> {
        let dtype = self.config().dtype;
        self.collected(folder, Lora::is_adapter, |saved| {
            let (adapters, source) = (adapters(saved)?, weights.tensors(dtype, &Device::Cpu));
            let mut writer = FolderWriter::begin(folder, weights.config(), dtype, how)?;
            for (name, dims) in weights.shapes() {
                let weight = source.get(dims.as_slice(), name)?;
                writer.write(name, &lora.merged(name, &weight, &adapters)?)?;
            }
            Ok(writer.finish()?)
        })
    }

    /// Writes the adapters alone, as `peft` reads them. To be called on every rank; all see the folder.
    ///
    /// # Errors
    /// Those of [`save_folder`](Self::save_folder).
    pub fn save_adapters(&self, folder: &Path, lora: &Lora) -> Result<()> {
        self.collected(folder, Lora::is_adapter, |saved| {
            let all = adapters(saved)?;
            Ok(lora.save(folder, all)?)
        })
    }

    /// Rank 0 does something with all parameters of these names.
    fn collected(
        &self,
        folder: &Path,
        is_wanted: impl Fn(&str) -> bool,
        with: impl FnOnce(&mut Saved) -> Result<()>,
    ) -> Result<()> {
        let world = &**self.mesh().world();
        let parts = folder.join(PARTS);
        let open = || Ok(Checkpoints::open(CheckpointConfig { dir: parts.clone(), keep: 1 })?);
        // The first rank makes the folder, and the others find it.
        let first = agreed(world, if world.rank() == 0 { open().map(Some) } else { Ok(None) })?;
        let checkpoints = agreed(world, first.map_or_else(open, Ok))?;
        let snapshot = agreed(world, self.snapshot_of(None, is_wanted))?;
        snapshot.write(world, &checkpoints, &Checkpoint::default())?;
        let mut done = Ok(());
        if world.rank() == 0 {
            let latest = checkpoints.latest().map_err(Error::from);
            let contents = latest.and_then(|found| found.ok_or_else(|| Error::file(&parts, "it is gone")));
            done = contents.and_then(|contents| with(&mut Saved::open(&contents)?));
            if let Err(error) = std::fs::remove_dir_all(&parts) {
                done = done.and(Err(Error::file(&parts, error)));
            }
        }
        agreed(world, done)
    }
}

fn adapters(saved: &mut Saved) -> Result<HashMap<String, Tensor>> {
    let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
    let names = names.into_iter().filter(|name| Lora::is_adapter(name));
    names.map(|name| Ok((name.clone(), saved.whole(&name)?))).collect()
}
