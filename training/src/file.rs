//! Tensors in a file.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use candle_core::{Device, Tensor};
use safetensors::tensor::Metadata;

use crate::{Error, Result};

/// The longest header that is read; safetensors itself allows no longer one.
const LONGEST_HEADER: u64 = 100_000_000;
/// Bytes before the header, which say how long it is.
const PREFIX: u64 = 8;

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

/// Reads a safetensors file whole.
///
/// # Errors
/// [`Error::Io`]: it cannot be read, or is no safetensors file; tensors of a dtype that candle has not.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use std::collections::HashMap;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("w.safetensors");
/// training::save_tensors(&path, &HashMap::from([("w", Tensor::ones(3, DType::F32, &Device::Cpu)?)]))?;
/// assert_eq!(training::load_tensors(&path, &Device::Cpu)?["w"].to_vec1::<f32>()?, [1.0; 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_tensors(path: &Path, device: &Device) -> Result<HashMap<String, Tensor>> {
    let refuse = |source| Error::Io { action: "read", path: path.to_path_buf(), source };
    let bytes = fs::read(path).map_err(refuse)?;
    tensor_header(&mut &bytes[..], bytes.len() as u64).map_err(refuse)?;
    Ok(candle_core::safetensors::load_buffer(&bytes, device)?)
}

/// What the header of a safetensors file says.
#[derive(Debug)]
#[non_exhaustive]
pub struct TensorHeader {
    /// The tensors: names, dtypes, shapes, and where each lies.
    pub metadata: Metadata,
    /// Where the tensors' bytes begin in the file.
    pub data: u64,
}

/// Reads the header of a safetensors file that has so many bytes, and nothing more. Whatever these are: what passes is as long
/// as it says, and its shapes can be computed with. To be called before `safetensors` or candle see a file, whose sums and
/// products overflow where a header is made for it.
///
/// # Errors
/// [`ErrorKind::InvalidData`] where it is no safetensors file, or not all of one; failures to read.
///
/// ```
/// let header = r#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"ab"].concat();
/// let found = training::tensor_header(&mut &file[..], file.len() as u64)?;
/// assert_eq!((found.metadata.offset_keys(), &file[found.data as usize..]), (vec!["w".to_string()], &b"ab"[..]));
/// let cut = training::tensor_header(&mut &file[..], 62).map(drop);
/// assert_eq!(cut.unwrap_err().to_string(), "it has 62 bytes, and by its header 63");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn tensor_header(source: &mut impl Read, bytes: u64) -> io::Result<TensorHeader> {
    let refuse = |problem: String| Err(io::Error::new(ErrorKind::InvalidData, problem));
    if bytes < PREFIX {
        return refuse(format!("it has {bytes} bytes"));
    }
    let mut prefix = [0; PREFIX as usize];
    source.read_exact(&mut prefix)?;
    let len = u64::from_le_bytes(prefix);
    if len > LONGEST_HEADER.min(bytes - PREFIX) {
        return refuse(format!("its header would have {len} bytes, the file has {bytes}"));
    }
    let mut head = vec![0; len as usize];
    source.read_exact(&mut head)?;
    let metadata: Metadata = match serde_json::from_slice(&head) {
        Ok(metadata) => metadata,
        Err(error) => return refuse(error.to_string()),
    };
    let data = PREFIX + len;
    let whole = u128::from(data) + metadata.data_len() as u128;
    if whole != u128::from(bytes) {
        return refuse(format!("it has {bytes} bytes, and by its header {whole}"));
    }
    let mut tensors = metadata.tensors().into_iter();
    match tensors.find(|(_, info)| !has_strides(&info.shape)) {
        Some((name, info)) => {
            refuse(format!("tensor `{name}` is of shape {:?}, which is too large", info.shape))
        }
        None => Ok(TensorHeader { metadata, data }),
    }
}

/// Whether the strides of a shape can be counted: also of one that has no elements, where they are of no use.
fn has_strides(shape: &[usize]) -> bool {
    shape.iter().filter(|dim| **dim > 0).try_fold(1usize, |stride, dim| stride.checked_mul(*dim)).is_some()
}
