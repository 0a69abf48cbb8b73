//! Folder of adapters in the format of `peft`: loading and saving.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::{Map, Value};
use training::internal::{AtomicFile, write_output, write_tensors};

use super::experts::ExpertMatrix;
use super::{Lora, LoraConfig, layers};
use crate::error::TensorMismatches;
use crate::files::{ADAPTER_CONFIG, ADAPTER_TENSORS, CONFIG};
use crate::folder::Folder;
use crate::names::{self, OfExpert, PEFT_PREFIX};
use crate::{Error, LabelsConfig, ModelConfig, Result};

impl Lora {
    /// Returns the adapters of a folder with `adapter_config.json` and `adapter_model.safetensors`, for a model. Their
    /// values are read by [`Weights::with_adapters`](crate::Weights::with_adapters).
    ///
    /// # Errors
    /// Files that cannot be read; fields that are not supported; targets of which none matches a layer of the model, or one the
    /// embedding, the head, a norm or a router.
    pub fn from_folder(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let path = folder.join(ADAPTER_CONFIG);
        let bytes = Error::read(&path)?;
        let json: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Format { path, problem: error.to_string() })?;
        let lora = Self::with_any_target(&LoraConfig::read(&json, model)?, model)?;
        let path = folder.join(ADAPTER_TENSORS);
        // Whoever reads the adapters says what is missing.
        if path.exists() {
            Self::refuse_single_experts(&Folder::of_file(folder, ADAPTER_TENSORS)?, path)?;
        }
        Ok(lora)
    }

    /// Refuses adapters of which each expert has its own, as they were before transformers 5.
    fn refuse_single_experts(tensors: &Folder, path: PathBuf) -> Result<()> {
        let is_single =
            |name: &&String| OfExpert::of(name.strip_prefix(PEFT_PREFIX).unwrap_or(name)).is_some();
        let Some(name) = tensors.names().find(is_single) else { return Ok(()) };
        let problem = format!(
            "each expert has adapters of its own ({name}), as before transformers 5; load the folder with peft 0.21 and transformers 5, which join them, and save it"
        );
        Err(Error::Format { path, problem })
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
        self.join_experts(&mut tensors)?;
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
        let linear: Vec<String> =
            layers(&self.shapes).into_iter().filter(|layer| !names::is_of_expert(layer)).collect();
        write(ADAPTER_CONFIG, self.config.json(&self.model, &linear, self.base.as_deref()))
    }

    /// Puts those of a layer's experts into the place of each, if there are all of them.
    fn join_experts(&self, tensors: &mut HashMap<String, Tensor>) -> Result<()> {
        let count = self.experts();
        let firsts: Vec<String> =
            tensors.keys().filter(|name| self.in_file(name) != **name).cloned().collect();
        for name in firsts {
            let Some(matrix) = ExpertMatrix::of(&name).filter(|matrix| matrix.expert() == 0) else {
                continue;
            };
            let own = (0..count).map(|expert| tensors.remove(&matrix.of_expert(expert)));
            if let Some(own) = own.collect::<Option<Vec<_>>>() {
                tensors.insert(self.in_file(&name), matrix.joined(&own)?);
            }
        }
        Ok(())
    }

    /// Returns the number of experts of a layer that has some.
    fn experts(&self) -> usize {
        self.model.experts.as_ref().map_or(0, |experts| experts.count)
    }

    /// Returns the name of a parameter in a folder, which of experts is that of all.
    pub(crate) fn in_file(&self, name: &str) -> String {
        let Some(matrix) = ExpertMatrix::of(name) else { return name.into() };
        matrix.in_file(self.shapes.contains_key(&matrix.other()))
    }

    /// Returns names and shapes of the tensors in a folder of these adapters.
    fn in_folder(&self) -> BTreeMap<String, Vec<usize>> {
        let in_file = |(name, dims): (&String, &Vec<usize>)| {
            let dims = ExpertMatrix::of(name)
                .map_or(dims.clone(), |matrix| matrix.dims_in_file(dims, self.experts()));
            (self.in_file(name), dims)
        };
        let mut all: BTreeMap<String, Vec<usize>> = self.shapes.iter().map(in_file).collect();
        for (name, copy) in self.model.ties() {
            all.extend(self.shapes.get(&name).map(|dims| (copy, dims.clone())));
        }
        all
    }

    /// Returns the names of the tensors that a folder of these adapters may have.
    pub(crate) fn names_in_folder(&self) -> BTreeSet<String> {
        self.in_folder().into_keys().chain(self.saved.iter().cloned()).collect()
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
