//! Tensors in a file.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use candle_core::Tensor;

/// Writes tensors to a safetensors file, in the place of an older one, with the rights of any new file. It may not have reached
/// the disk yet.
///
/// # Errors
/// Those of the system, such as a full disk.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use std::collections::HashMap;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("w.safetensors");
/// let tensors = HashMap::from([("w", Tensor::ones(3, DType::F32, &Device::Cpu)?)]);
/// training::save_tensors(&path, &tensors)?;
/// # assert!(path.is_file());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save_tensors<K: AsRef<str> + Ord + Display>(
    path: &Path,
    tensors: &HashMap<K, Tensor>,
) -> io::Result<()> {
    // What safetensors puts there could be read by its owner alone.
    let permissions = File::create(path)?.metadata()?.permissions();
    candle_core::safetensors::save(tensors, path).map_err(io::Error::other)?;
    fs::set_permissions(path, permissions)
}
