//! Writing a model folder that transformers loads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor, Var};
use serde_json::{Map, Value, json};
use training::internal::{TensorWriter, write_output};

use crate::config::BITS_FIELD;
use crate::files::{INDEX, SINGLE, TOKENIZER_FILES, is_weight_file};
use crate::tokens::{MORE_TEMPLATES, NamedTemplate, is_template};
use crate::{Error, Family, ModelConfig, Result, Weights, finite, names, reading};

/// How a folder is written.
#[derive(Debug, Clone)]
pub struct FolderConfig {
    /// Maximum size of the tensors in a file, in bytes, when they are split over several files. Default: 5 GB, as in
    /// transformers 4.
    pub max_file_bytes: usize,
    /// Dtype to save in. Default: none, see `dtypes_of`.
    pub dtype: Option<DType>,
    /// Weights of a folder: each tensor is saved in the dtype that it has there. Default: none, the dtype in memory.
    pub dtypes_of: Option<Weights>,
    /// Folder, or GGUF file, to copy the tokenizer from. Default: none.
    pub tokenizer_of: Option<PathBuf>,
    /// Chat template to save in place of that of `tokenizer_of`, whose other templates are not copied either: they would be taken for
    /// conversations with tools. Default: none.
    pub template: Option<NamedTemplate>,
}

impl Default for FolderConfig {
    fn default() -> Self {
        Self {
            max_file_bytes: 5_000_000_000,
            dtype: None,
            dtypes_of: None,
            tokenizer_of: None,
            template: None,
        }
    }
}

impl FolderConfig {
    /// Returns the dtype in which a parameter is saved; `dtype` is the one that it has in memory.
    fn dtype_of(&self, name: &str, dtype: DType, family: Family) -> DType {
        let is_wide = names::is_wide(family, name);
        let before = || self.dtypes_of.as_ref()?.dtype(name);
        match self.dtype.or_else(before).unwrap_or(dtype) {
            DType::F16 | DType::BF16 if is_wide => DType::F32,
            dtype => dtype,
        }
    }
}

/// Writes a model that is complete in this process: see [`FolderWriter`].
///
/// # Errors
/// Those of [`FolderWriter`].
pub fn save_folder(
    folder: &Path,
    config: &ModelConfig,
    parameters: &[(String, Var)],
    how: &FolderConfig,
) -> Result<()> {
    let dtype = parameters.first().map_or(DType::F32, |(_, var)| var.dtype());
    let mut writer = FolderWriter::begin(folder, config, dtype, how)?;
    for (name, var) in parameters {
        writer.write(name, &var.as_detached_tensor())?;
    }
    writer.finish()
}

/// Writes a model folder tensor by tensor, in any order, without keeping any: `config.json`, and `model.safetensors`,
/// or several files and `model.safetensors.index.json`.
///
/// Files appear after all tensors are written, each atomically; the configuration comes last. Weights of an older model
/// in the folder are replaced.
///
/// # Errors
/// A folder that cannot be written; a tensor that the model does not have, of another shape, or written twice; on
/// [`finish`](Self::finish), tensors that were not written.
#[derive(Debug)]
pub struct FolderWriter {
    folder: PathBuf,
    config: ModelConfig,
    how: FolderConfig,
    /// The dtype in memory.
    dtype: DType,
    files: Vec<(String, TensorWriter)>,
    /// For each tensor still to be written: index of its file, its index in the file, and shape in the file.
    places: BTreeMap<String, (usize, usize, Vec<usize>)>,
    index: BTreeMap<String, String>,
    sizes: Sizes,
}

/// Numbers and bytes of all tensors, and the numbers of each dtype.
#[derive(Debug, Default)]
struct Sizes {
    parameters: usize,
    bytes: usize,
    dtypes: Vec<(DType, usize)>,
}

impl Sizes {
    fn add(&mut self, dtype: DType, count: usize) {
        (self.parameters, self.bytes) = (self.parameters + count, self.bytes + count * dtype.size_in_bytes());
        match self.dtypes.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, all)) => *all += count,
            None => self.dtypes.push((dtype, count)),
        }
    }

    /// Returns the name of the dtype that most numbers have.
    fn dtype(&self) -> &'static str {
        match self.dtypes.iter().max_by_key(|(_, count)| count) {
            Some((DType::BF16, _)) => "bfloat16",
            Some((DType::F16, _)) => "float16",
            Some((DType::F64, _)) => "float64",
            _ => "float32",
        }
    }
}

impl FolderWriter {
    /// Creates all files. `dtype` is that of the tensors to be written.
    ///
    /// # Errors
    /// See [`FolderWriter`].
    pub fn begin(folder: &Path, config: &ModelConfig, dtype: DType, how: &FolderConfig) -> Result<Self> {
        let shapes = Weights::random(config, 0)?.shapes().clone();
        let (mut groups, mut bytes, mut sizes) = (vec![Vec::new()], 0, Sizes::default());
        for (name, mut dims) in shapes {
            if names::is_transposed(config.family, &name) {
                dims.reverse();
            }
            let (count, dtype) = (dims.iter().product::<usize>(), how.dtype_of(&name, dtype, config.family));
            let size = count * dtype.size_in_bytes();
            if bytes > 0 && bytes + size > how.max_file_bytes {
                groups.push(Vec::new());
                bytes = 0;
            }
            bytes += size;
            sizes.add(dtype, count);
            if let Some(group) = groups.last_mut() {
                group.push((name, dims));
            }
        }
        fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        let mut writer = Self {
            folder: folder.into(),
            config: config.clone(),
            how: how.clone(),
            dtype,
            files: Vec::new(),
            places: BTreeMap::new(),
            index: BTreeMap::new(),
            sizes,
        };
        let count = groups.len();
        for (number, group) in groups.into_iter().enumerate() {
            let name = match count {
                1 => SINGLE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            writer.begin_file(name, group)?;
        }
        Ok(writer)
    }

    fn begin_file(&mut self, file: String, tensors: Vec<(String, Vec<usize>)>) -> Result<()> {
        let path = self.folder.join(&file);
        let dtype = |name: &str| self.how.dtype_of(name, self.dtype, self.config.family);
        let described = |(name, dims): &(String, Vec<usize>)| (name.clone(), dtype(name), dims.clone());
        let described: Vec<_> = tensors.iter().map(described).collect();
        let writer = TensorWriter::begin(&path, &described).map_err(Error::io("write", &path))?;
        for (index, (name, dims)) in tensors.into_iter().enumerate() {
            self.index.insert(name.clone(), file.clone());
            self.places.insert(name, (self.files.len(), index, dims));
        }
        self.files.push((file, writer));
        Ok(())
    }

    /// Writes a parameter, in the model's shape. A head that is tied to the embedding is skipped. Numbers are rounded to
    /// the nearest of the dtype to save in, to even ones at ties.
    ///
    /// # Errors
    /// See [`FolderWriter`]; a number beyond that dtype.
    pub fn write(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        if self.config.tied && name == names::HEAD {
            return Ok(());
        }
        let Some((file, index, dims)) = self.places.remove(name) else {
            let known =
                if self.index.contains_key(name) { "was written before" } else { "is none of the model's" };
            let problem = format!("tensor {name} {known}");
            return Err(Error::Format { path: self.folder.clone(), problem });
        };
        let tensor = match names::is_transposed(self.config.family, name) {
            true => tensor.t()?,
            false => tensor.clone(),
        };
        if tensor.dims() != dims {
            let problem = format!("tensor {name} is of shape {:?} and should be of {dims:?}", tensor.dims());
            return Err(Error::Format { path: self.folder.clone(), problem });
        }
        let tensor = tensor.to_device(&candle_core::Device::Cpu)?;
        let dtype = self.how.dtype_of(name, self.dtype, self.config.family);
        let converted = tensor.to_dtype(dtype)?;
        if dtype != tensor.dtype()
            && let Some((place, number)) = finite::first_not_finite(&tensor, &converted)?
            && number.is_finite()
        {
            let problem = finite::problem(name, &dims, place, number, dtype.as_str());
            return Err(Error::Format { path: self.folder.clone(), problem });
        }
        let (path, writer) = &mut self.files[file];
        writer.write(index, &converted).map_err(Error::io("write", &self.folder.join(path)))
    }

    /// Moves all files into place.
    ///
    /// # Errors
    /// See [`FolderWriter`].
    pub fn finish(mut self) -> Result<()> {
        if !self.places.is_empty() {
            let missing = self.places.keys().cloned().collect::<Vec<_>>().join(", ");
            let problem = format!("these tensors were not written: {missing}");
            return Err(Error::Format { path: self.folder.clone(), problem });
        }
        // Without its configuration, a folder that has only some of the new files cannot be loaded.
        remove(&self.folder.join("config.json"))?;
        let mut kept = BTreeSet::new();
        for (name, writer) in std::mem::take(&mut self.files) {
            writer.finish().map_err(Error::io("write", &self.folder.join(&name)))?;
            kept.insert(name);
        }
        if kept.len() > 1 {
            let Sizes { parameters, bytes, .. } = self.sizes;
            let metadata = json!({ "total_parameters": parameters, "total_size": bytes });
            self.write_json(INDEX, &json!({ "metadata": metadata, "weight_map": self.index }))?;
            kept.insert(INDEX.into());
        }
        self.remove_older(&kept)?;
        self.copy_tokenizer()?;
        self.write_json("config.json", &Value::Object(self.described()))
    }

    /// Returns the configuration with the dtype that was written.
    fn described(&self) -> Map<String, Value> {
        let mut json = self.config.json().clone();
        let field = if json.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        json.insert(field.into(), self.sizes.dtype().into());
        // What is written are numbers.
        json.remove(BITS_FIELD);
        json
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<()> {
        let path = self.folder.join(name);
        let text = format!("{value:#}\n");
        write_output(&path, text.as_bytes()).map_err(Error::io("write", &path))
    }

    /// Removes weight files of an older model or of adapters: a program that loads the folder could read them.
    fn remove_older(&self, kept: &BTreeSet<String>) -> Result<()> {
        let refuse = Error::io("look through", &self.folder);
        for entry in fs::read_dir(&self.folder).map_err(&refuse)? {
            let entry = entry.map_err(&refuse)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // Adapters beside a whole model are applied to it.
            if is_weight_file(&name) && !kept.contains(&name) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    fn copy_tokenizer(&self) -> Result<()> {
        let FolderConfig { tokenizer_of, template, .. } = &self.how;
        if let Some(from) = tokenizer_of.as_ref().filter(|from| **from != self.folder) {
            for name in TOKENIZER_FILES.iter().filter(|name| template.is_none() || !is_template(name)) {
                let to = self.folder.join(name);
                if let Some(bytes) = reading::text(from, name)? {
                    write_output(&to, &bytes).map_err(Error::io("write", &to))?;
                }
            }
            if template.is_none() {
                self.copy_templates(&from.join(MORE_TEMPLATES))?;
            }
        }
        template.as_ref().map_or(Ok(()), |template| template.save(&self.folder))
    }

    fn copy_templates(&self, from: &Path) -> Result<()> {
        let folder = self.folder.join(MORE_TEMPLATES);
        if !from.is_dir() {
            return Ok(());
        }
        fs::create_dir_all(&folder).map_err(Error::io("make", &folder))?;
        let refuse = Error::io("look through", from);
        for entry in fs::read_dir(from).map_err(&refuse)? {
            let entry = entry.map_err(&refuse)?;
            if entry.path().extension().is_some_and(|ending| ending == "jinja") {
                let (bytes, to) = (Error::read(&entry.path())?, folder.join(entry.file_name()));
                write_output(&to, &bytes).map_err(Error::io("write", &to))?;
            }
        }
        Ok(())
    }
}

/// Removes a file, if it is there.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(Error::Io { action: "remove", path: path.into(), source })
        }
        _ => Ok(()),
    }
}
