//! A trained language model as a folder that transformers loads, from any layout.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use models::{CausalLm, FolderConfig, FolderWriter, Lora, ModelConfig};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

use crate::checkpoint::{Saved, agreed};
use crate::{Error, Parallel, Result};

/// Where the ranks' parts lie until the folder is written.
const PARTS: &str = ".unfinished-parts";

impl Parallel<CausalLm> {
    /// Writes the model as a folder that transformers loads; with `lora`, the adapters are merged into its weights. To be called on every
    /// rank; all see the folder.
    ///
    /// # Cost
    /// Each rank writes its parts there; then rank 0 reads and writes one tensor after the other, and removes the parts.
    ///
    /// # Errors
    /// On every rank: a folder that cannot be written; failures of communication.
    pub fn save_folder(
        &self,
        folder: &Path,
        config: &ModelConfig,
        how: &FolderConfig,
        lora: Option<&Lora>,
    ) -> Result<()> {
        self.collected(folder, |_| true, |saved| write(saved, folder, config, how, lora, self.config().dtype))
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

fn write(
    saved: &mut Saved,
    folder: &Path,
    config: &ModelConfig,
    how: &FolderConfig,
    lora: Option<&Lora>,
    dtype: candle_core::DType,
) -> Result<()> {
    let adapters = if lora.is_some() { adapters(saved)? } else { HashMap::new() };
    let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
    let mut writer = FolderWriter::begin(folder, config, dtype, how)?;
    for name in names.iter().filter(|name| !Lora::is_adapter(name)) {
        let weight = saved.whole(name)?;
        let weight = match lora {
            Some(lora) => lora.merged(name, &weight, &adapters)?,
            None => weight,
        };
        writer.write(name, &weight)?;
    }
    Ok(writer.finish()?)
}
