//! Folder of adapters in the format of `peft`: loading and saving.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::Tensor;
use serde_json::{Map, Value};
use training::internal::{AtomicFile, write_output, write_tensors};

use super::{Lora, LoraConfig};
use crate::error::TensorMismatches;
use crate::files::{ADAPTER_CONFIG, ADAPTER_TENSORS, CONFIG};
use crate::folder::Folder;
use crate::names::{self, PEFT_PREFIX};
use crate::{Error, LabelsConfig, ModelConfig, Result};

impl Lora {
    /// Returns the adapters of a folder with `adapter_config.json` and `adapter_model.safetensors`, for a model. Their
    /// values are read by [`Weights::with_adapters`](crate::Weights::with_adapters).
    ///
    /// # Errors
    /// Files that cannot be read; fields that are not supported; targets of which none matches a layer of the model, or one the
    /// embedding, the head, a norm, a router or an expert.
    pub fn from_folder(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let path = folder.join(ADAPTER_CONFIG);
        let bytes = Error::read(&path)?;
        let json: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Format { path, problem: error.to_string() })?;
        Self::with_any_target(&LoraConfig::read(&json, model)?, model)
    }

    /// Returns the labels that adapters of a folder were trained for, if they have a head that scores documents: of the `config.json`
    /// that [`save`](Self::save) writes there; without one that has labels, as peft leaves it, as many without names.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn labels_of(folder: &Path) -> Result<Option<LabelsConfig>> {
        if !folder.join(ADAPTER_TENSORS).exists() {
            // Whoever reads the adapters says what is missing.
            return Ok(None);
        }
        let tensors = Folder::of_file(folder, ADAPTER_TENSORS)?;
        let Some(head) = tensors.entry(&format!("{PEFT_PREFIX}{}", names::SCORE)) else { return Ok(None) };
        let known = match folder.join(CONFIG).exists() {
            true => ModelConfig::from_folder(folder)?.labels,
            false => None,
        };
        let unnamed = || LabelsConfig::unnamed(head.dims.first().copied().unwrap_or_default());
        Ok(Some(known.unwrap_or_else(unnamed)))
    }

    /// Writes the adapters, and the modules that are trained whole beside them, in the format of `peft`. `parameters` have the names
    /// that the model uses; those that are not trained are left out. With a head that scores documents, the model's `config.json` is
    /// written, too: it has the labels.
    ///
    /// # Errors
    /// Adapters that are missing or of other shapes; a folder that cannot be written.
    pub fn save(&self, folder: &Path, parameters: impl IntoIterator<Item = (String, Tensor)>) -> Result<()> {
        let mut tensors: HashMap<String, Tensor> =
            parameters.into_iter().filter(|(name, _)| self.trains(name)).collect();
        // A tied embedding and head are in the file both.
        for (name, copy) in self.model.ties() {
            if let (Some(tensor), true) = (tensors.get(&name), self.trains(&name)) {
                tensors.insert(copy, tensor.clone());
            }
        }
        let misfits = self.misfits(|name| tensors.get(name).map(|tensor| tensor.dims().to_vec()));
        if !misfits.is_empty() {
            return Err(Error::Tensors { folder: folder.into(), misfits: Box::new(misfits) });
        }
        fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        let named = tensors
            .into_iter()
            .map(|(name, tensor)| Ok((format!("{PEFT_PREFIX}{name}"), tensor.contiguous()?)));
        let named: HashMap<String, Tensor> = named.collect::<candle_core::Result<_>>()?;
        let path = folder.join(ADAPTER_TENSORS);
        let written = AtomicFile::create(&path).and_then(|mut file| {
            write_tensors(&mut file, &named, Some("pt"))?;
            file.commit()
        });
        written.map_err(Error::io("write", &path))?;
        let write = |name: &str, json: Value| {
            let path = folder.join(name);
            write_output(&path, format!("{json:#}\n").as_bytes()).map_err(Error::io("write", &path))
        };
        if self.model.labels.is_some() {
            write(CONFIG, Value::Object(self.model.json().clone()))?;
        }
        write(ADAPTER_CONFIG, self.config.json(&self.model, self.base.as_deref()))
    }

    /// Returns names and shapes of the tensors in a folder of these adapters.
    fn in_folder(&self) -> BTreeMap<String, Vec<usize>> {
        let mut all = self.shapes.clone();
        for (name, copy) in self.model.ties() {
            all.extend(self.shapes.get(&name).map(|dims| (copy, dims.clone())));
        }
        all
    }

    /// Returns whether a folder of these adapters has a tensor of this name.
    pub(crate) fn is_in_folder(&self, name: &str) -> bool {
        self.shapes.contains_key(name) || self.saved.contains(name)
    }

    /// Returns the trained parameters for which `dims` returns `None` or another shape.
    pub(crate) fn misfits(&self, dims: impl Fn(&str) -> Option<Vec<usize>>) -> TensorMismatches {
        let mut misfits = TensorMismatches::default();
        for (name, expected) in &self.in_folder() {
            match dims(name) {
                None => misfits.missing.push(name.clone()),
                Some(got) if got != *expected => {
                    misfits.misshapen.push((name.clone(), got, expected.clone()))
                }
                Some(_) => {}
            }
        }
        misfits
    }
}
