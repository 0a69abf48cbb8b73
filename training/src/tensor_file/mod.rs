//! Tensors in safetensors files that a user names: weights and data, checked, with errors of one line.
//!
//! Files are read, never mapped, so that a file that is changed meanwhile does no harm.

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use crate::file::{AtomicFile, TensorReader, write_tensors};
use crate::file_error::{FileError, first_line};
use crate::named_vars;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use ops::kernels::lock;
use safetensors::tensor::{Dtype, TensorInfo};

type Result<T> = std::result::Result<T, FileError>;

/// A safetensors file. Its header is in memory; a tensor is read when it is asked for.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    reader: Mutex<TensorReader>,
}

impl TensorFile {
    /// Reads a file's header.
    ///
    /// # Errors
    /// A file that cannot be read, is no safetensors file, or is truncated.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |reason| FileError::NotSafetensors { path: path.to_path_buf(), reason };
        let reader = TensorReader::open(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => refuse(first_line(error)),
            _ => FileError::read(path, error),
        })?;
        Ok(Self { path: path.to_path_buf(), reader: Mutex::new(reader) })
    }

    fn reader(&self) -> MutexGuard<'_, TensorReader> {
        lock(&self.reader)
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the file has no tensors of other names.
    ///
    /// # Errors
    /// The first unexpected tensor.
    pub fn only(&self, names: &[&str]) -> Result<()> {
        let Some(name) = self.names().into_iter().find(|name| !names.contains(&name.as_str())) else {
            return Ok(());
        };
        let (path, got, wanted) = (self.path.clone(), self.describe(&name), names.join(", "));
        Err(FileError::ExtraTensor { path, name, got, wanted })
    }

    /// Checks that the file has no tensors but those of a model, and PyTorch's counters of batches (`num_batches_tracked`),
    /// which only batch norms without a momentum use.
    ///
    /// # Errors
    /// The first unexpected tensor.
    pub fn only_of_model(&self, names: &[&str]) -> Result<()> {
        let known: HashSet<&str> = names.iter().copied().collect();
        let is_extra = |name: &String| {
            let is_count = self.reader().info(name).is_some_and(|info| is_count_of_batches(name, info));
            !known.contains(&**name) && !is_count
        };
        let Some(name) = self.names().into_iter().find(is_extra) else { return Ok(()) };
        Err(FileError::NotOfModel { path: self.path.clone(), got: self.describe(&name), name })
    }

    /// Returns whether the file has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.reader().info(name).is_some()
    }

    /// Returns the dtype of a tensor; `None` if there is no such tensor, or candle has not its dtype.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.reader().info(name).and_then(|info| DType::try_from(info.dtype).ok())
    }

    /// The names of its tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.reader().names()
    }

    /// Returns the tensors of these variables' names, which must have their dtypes and shapes, on their devices.
    ///
    /// # Errors
    /// Those of [`tensor`](Self::tensor), for the first variable whose tensor is missing or differs.
    pub fn values(&self, vars: &[(String, Var)]) -> Result<Vec<Tensor>> {
        let value = |(name, var): &(String, Var)| {
            let shape: Vec<_> = var.dims().iter().copied().map(Some).collect();
            self.tensor(name, &shape, var.dtype(), var.device())
        };
        vars.iter().map(value).collect()
    }

    /// Returns one tensor, of this dtype and shape; a dimension given as `None` may have any size.
    ///
    /// # Errors
    /// No such tensor, or one of another dtype or shape.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use training::TensorFile;
    ///
    /// let path = std::env::temp_dir().join(format!("data-{}.safetensors", std::process::id()));
    /// Tensor::zeros((100, 20), DType::F32, &Device::Cpu)?.save_safetensors("x", &path)?;
    /// let x = TensorFile::open(&path)?.tensor("x", &[None, Some(20)], DType::F32, &Device::Cpu)?;
    /// assert_eq!(x.dims(), [100, 20]);
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn tensor(
        &self,
        name: &str,
        shape: &[Option<usize>],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.check_any_size(name, shape, dtype)?;
        let tensor = self.whole(name)?.to_device(device);
        tensor.map_err(|error| FileError::tensor(&self.path, name, error))
    }

    /// Checks that there is a tensor of this dtype and shape, without reading it.
    ///
    /// # Errors
    /// No such tensor, or one of another dtype or shape.
    pub fn check(&self, name: &str, dims: &[usize], dtype: DType) -> Result<()> {
        self.check_any_size(name, &dims.iter().copied().map(Some).collect::<Vec<_>>(), dtype)
    }

    /// Does the same, where a dimension given as `None` may have any size.
    fn check_any_size(&self, name: &str, shape: &[Option<usize>], dtype: DType) -> Result<()> {
        let reader = self.reader();
        let Some(info) = reader.info(name) else {
            return Err(self.missing(name, describe(dtype, shape), &reader));
        };
        let fits = shape.len() == info.shape.len()
            && shape.iter().zip(&info.shape).all(|(want, got)| want.is_none_or(|want| want == *got));
        if fits && DType::try_from(info.dtype).ok() == Some(dtype) {
            return Ok(());
        }
        let (name, expected) = (name.to_string(), describe(dtype, shape));
        Err(FileError::TensorMismatch { path: self.path.clone(), name, expected, got: describe_info(info) })
    }

    /// Returns a whole tensor, whatever its dtype and shape, on the CPU.
    ///
    /// # Errors
    /// No such tensor; a dtype that candle has not; a file that cannot be read.
    pub fn whole(&self, name: &str) -> Result<Tensor> {
        let dims = self.reader().info(name).map(|info| info.shape.clone()).unwrap_or_default();
        let elements = self.read(name, 0..dims.iter().product())?;
        elements.reshape(dims).map_err(|error| FileError::tensor(&self.path, name, error))
    }

    /// Reads a range of a tensor's elements, flat, on the CPU, and nothing else of the file.
    ///
    /// # Errors
    /// Those of [`read_ranges`](Self::read_ranges).
    pub fn read(&self, name: &str, range: Range<usize>) -> Result<Tensor> {
        self.read_ranges(name, std::slice::from_ref(&range))
    }

    /// Does the same for several ranges, which it concatenates.
    ///
    /// # Errors
    /// No such tensor; a range beyond its end; a dtype that candle has not; a file that cannot be read.
    pub fn read_ranges(&self, name: &str, ranges: &[Range<usize>]) -> Result<Tensor> {
        let mut reader = self.reader();
        if reader.info(name).is_none() {
            return Err(self.missing(name, "any shape".into(), &reader));
        }
        reader.read(name, ranges).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => FileError::tensor(&self.path, name, error),
            _ => FileError::read(&self.path, error),
        })
    }

    /// Returns names, dtypes and shapes of its tensors, sorted by name, without those of a dtype that candle has not.
    pub fn tensors(&self) -> Vec<(String, DType, Vec<usize>)> {
        let reader = self.reader();
        let described = |name: String| {
            let info = reader.info(&name)?;
            let (dtype, dims) = (DType::try_from(info.dtype).ok()?, info.shape.clone());
            Some((name, dtype, dims))
        };
        reader.names().into_iter().filter_map(described).collect()
    }

    /// Returns a tensor of samples, f32 of shape (samples, features), with at least one sample.
    ///
    /// # Errors
    /// Those of [`tensor`](Self::tensor); no samples.
    pub fn samples(&self, name: &str, features: usize, device: &Device) -> Result<Tensor> {
        let samples = self.tensor(name, &[None, Some(features)], DType::F32, device)?;
        match samples.elem_count() {
            0 => Err(FileError::tensor(&self.path, name, "it has no samples; give at least 1")),
            _ => Ok(samples),
        }
    }

    /// Returns the class of each of `samples` samples, stored as i64; each must be below `count`.
    ///
    /// # Errors
    /// Those of [`tensor`](Self::tensor); a class that is not below `count`.
    pub fn classes(&self, name: &str, samples: usize, count: usize) -> Result<Vec<u32>> {
        let classes = self.tensor(name, &[Some(samples)], DType::I64, &Device::Cpu)?;
        let classes = classes.to_vec1::<i64>().map_err(|error| FileError::tensor(&self.path, name, error))?;
        let known = |class: &i64| usize::try_from(*class).is_ok_and(|class| class < count);
        if let Some(place) = classes.iter().position(|class| !known(class)) {
            let reason = format!("number {place} is {}; the classes are 0 to {}", classes[place], count - 1);
            return Err(FileError::tensor(&self.path, name, reason));
        }
        Ok(classes.into_iter().map(|class| class as u32).collect())
    }

    fn missing(&self, name: &str, expected: String, reader: &TensorReader) -> FileError {
        let mut held = listing(&reader.names());
        if reader.info(&format!("module.{name}")).is_some() {
            held += " (saved from a DistributedDataParallel: save model.module.state_dict() instead)";
        }
        FileError::MissingTensor { path: self.path.clone(), name: name.to_string(), expected, held }
    }

    fn describe(&self, name: &str) -> String {
        self.reader().info(name).map(describe_info).unwrap_or_default()
    }
}

/// Sets every variable of `vars` to the tensor of the same name in a file. All must fit, and the file may hold no
/// others but PyTorch's counters of batches; otherwise nothing is changed.
///
/// # Errors
/// One line that names the file, the first tensor that does not fit, what was expected and what was found.
pub fn load_weights(path: &Path, vars: &VarMap) -> Result<()> {
    let (file, vars) = (TensorFile::open(path)?, named_vars(vars));
    let values = file.values(&vars)?;
    file.only_of_model(&vars.iter().map(|(name, _)| &**name).collect::<Vec<_>>())?;
    for ((name, var), value) in vars.iter().zip(values) {
        var.set(&value).map_err(|error| FileError::tensor(path, name, error))?;
    }
    Ok(())
}

/// Writes all variables to a safetensors file under their names (PyTorch's, if the model uses them).
///
/// The file appears complete or not at all: see [`AtomicFile`].
///
/// # Errors
/// [`FileError::Write`] with the path and the reason; an older file is then unchanged.
pub fn save_weights(path: &Path, vars: &VarMap) -> Result<()> {
    let vars = named_vars(vars);
    let tensors: HashMap<&str, Tensor> =
        vars.iter().map(|(name, var)| (&**name, var.as_detached_tensor())).collect();
    let written = || -> std::io::Result<()> {
        let mut file = AtomicFile::create(path)?;
        write_tensors(&mut file, &tensors, Some("pt"))?;
        file.commit()
    };
    written().map_err(|error| FileError::write(path, error))
}

/// Checks whether [`save_weights`] will be able to write there, without changing an existing file.
///
/// # Errors
/// [`FileError::Write`] with the path and the reason.
pub fn check_writable(path: &Path) -> Result<()> {
    AtomicFile::check(path).map_err(|error| FileError::write(path, error))
}

/// `F32 [10, 20]`, with `*` for any size.
fn describe(dtype: DType, shape: &[Option<usize>]) -> String {
    let dims: Vec<_> = shape.iter().map(|dim| dim.map_or("*".to_string(), |dim| dim.to_string())).collect();
    format!("{dtype:?} [{}]", dims.join(", "))
}

fn describe_info(info: &TensorInfo) -> String {
    format!("{:?} {:?}", info.dtype, info.shape)
}

/// Whether a tensor of a file is the counter of a PyTorch batch norm, which only those without a momentum use.
fn is_count_of_batches(name: &str, info: &TensorInfo) -> bool {
    name.rsplit('.').next() == Some("num_batches_tracked")
        && info.dtype == Dtype::I64
        && info.shape.is_empty()
}

/// Returns the names, or the first few of many, as a list.
fn listing<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 8;
    let joined = |names: &[S]| names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_string(),
        count if count <= SHOWN => joined(names),
        count => format!("{} and {} more", joined(&names[..SHOWN]), count - SHOWN),
    }
}

#[cfg(test)]
mod tests;
