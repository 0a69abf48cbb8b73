//! Tensors in safetensors files that a user names: weights and data, checked, with errors of one line.
//!
//! Files are read into memory, never mapped, so that a file that is changed meanwhile does no harm.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use crate::file_error::{FileError, first_line};
use crate::{AtomicFile, named_vars, read_tensor_file, write_tensors};
use candle_core::safetensors::{BufferedSafetensors, Load};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use safetensors::tensor::TensorView;

type Result<T> = std::result::Result<T, FileError>;

/// A safetensors file in memory.
pub struct TensorFile {
    path: PathBuf,
    tensors: BufferedSafetensors,
}

impl std::fmt::Debug for TensorFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorFile").field("path", &self.path).field("names", &self.names()).finish()
    }
}

impl TensorFile {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, is no safetensors file, or is truncated.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |reason| FileError::NotSafetensors { path: path.to_path_buf(), reason };
        let bytes = read_tensor_file(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => refuse(first_line(error)),
            _ => FileError::read(path, error),
        })?;
        let tensors = BufferedSafetensors::new(bytes).map_err(|error| refuse(first_line(error)))?;
        Ok(Self { path: path.to_path_buf(), tensors })
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
        match self.names().into_iter().find(|name| !names.contains(&name.as_str())) {
            Some(name) => Err(self.extra(name, names.join(", "))),
            None => Ok(()),
        }
    }

    /// The names of its tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.tensors.tensors().into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
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
        let Ok(view) = self.tensors.get(name) else {
            return Err(self.missing(name, describe(dtype, shape)));
        };
        let fits = shape.len() == view.shape().len()
            && shape.iter().zip(view.shape()).all(|(want, got)| want.is_none_or(|want| want == *got));
        if !fits || DType::try_from(view.dtype()).ok() != Some(dtype) {
            return Err(FileError::TensorMismatch {
                path: self.path.clone(),
                name: name.to_string(),
                expected: describe(dtype, shape),
                got: describe_view(&view),
            });
        }
        view.load(device).map_err(|error| FileError::tensor(&self.path, name, error))
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

    fn missing(&self, name: &str, expected: String) -> FileError {
        let mut held = listing(&self.names());
        if self.tensors.get(&format!("module.{name}")).is_ok() {
            held += " (saved from a DistributedDataParallel: save model.module.state_dict() instead)";
        }
        FileError::MissingTensor { path: self.path.clone(), name: name.to_string(), expected, held }
    }

    fn extra(&self, name: String, wanted: String) -> FileError {
        let got = self.tensors.get(&name).map(|view| describe_view(&view)).unwrap_or_default();
        FileError::ExtraTensor { path: self.path.clone(), name, got, wanted }
    }
}

/// Sets every variable of `vars` to the tensor of the same name in a file. All must fit, and the file may hold no
/// others; otherwise nothing is changed.
///
/// # Errors
/// One line that names the file, the first tensor that does not fit, what was expected and what was found.
pub fn load_weights(path: &Path, vars: &VarMap) -> Result<()> {
    let file = TensorFile::open(path)?;
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut held: Vec<String> = vars.keys().cloned().collect();
    held.sort();
    let mut values = Vec::with_capacity(held.len());
    for name in &held {
        let var = &vars[name];
        let shape: Vec<_> = var.dims().iter().copied().map(Some).collect();
        values.push((name, var, file.tensor(name, &shape, var.dtype(), var.device())?));
    }
    if let Some(name) = file.names().into_iter().find(|name| !vars.contains_key(name)) {
        return Err(file.extra(name, listing(&held)));
    }
    for (name, var, value) in values {
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
    save_vars(path, &named_vars(vars))
}

/// Does the same for a list of variables, each with its name.
///
/// # Errors
/// As [`save_weights`].
pub fn save_vars(path: &Path, vars: &[(String, Var)]) -> Result<()> {
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

fn describe_view(view: &TensorView<'_>) -> String {
    format!("{:?} {:?}", view.dtype(), view.shape())
}

/// Returns the names, or the first few of many, as a list.
fn listing(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len() {
        0 => "none".to_string(),
        count if count <= SHOWN => names.join(", "),
        count => format!("{} and {} more", names[..SHOWN].join(", "), count - SHOWN),
    }
}

#[cfg(test)]
mod tests;
