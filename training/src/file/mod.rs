//! Safetensors files: reading, writing, and header validation.

mod input;
mod output;
mod parts;

use std::collections::HashMap;
use std::io::{self, BufWriter, ErrorKind, Read, Seek, Write};
use std::path::Path;

use candle_core::{Device, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};

use crate::{Error, Result};

pub use input::{open_input, read_input};
pub(crate) use output::parent;
pub use output::{AtomicFile, open_output, remove_drafts, write_output};
pub(crate) use parts::TensorReader;
pub use parts::TensorWriter;

/// Longest header that is read, the limit of safetensors itself.
const LONGEST_HEADER: u64 = 100_000_000;
/// Bytes before the header, which hold its length.
const PREFIX: u64 = 8;

/// Writes tensors to a safetensors file, atomically: see [`AtomicFile`].
///
/// # Errors
/// System errors, such as a full disk; an older file is then unchanged.
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
pub fn save_tensors<K: AsRef<str>>(path: &Path, tensors: &HashMap<K, Tensor>) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    write_tensors(&mut file, tensors, None)?;
    file.commit()
}

/// Writes a safetensors file, byte for byte as the crate `safetensors` would. `format` is stored in its metadata for
/// other programs: `pt` for PyTorch tensors.
///
/// # Errors
/// Write errors; a tensor that cannot be copied to the host.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use std::collections::HashMap;
///
/// let tensors = HashMap::from([("w", Tensor::ones(3, DType::F32, &Device::Cpu)?)]);
/// let mut bytes = Vec::new();
/// training::internal::write_tensors(&mut bytes, &tensors, Some("pt"))?;
/// let info = HashMap::from([("format".to_string(), "pt".to_string())]);
/// assert_eq!(bytes, safetensors::serialize(&tensors, Some(info))?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_tensors<K: AsRef<str>>(
    to: &mut impl Write,
    tensors: &HashMap<K, Tensor>,
    format: Option<&str>,
) -> io::Result<()> {
    let mut all: Vec<(&str, Dtype, &Tensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.dtype().into(), tensor)).collect();
    // Widest dtypes first, so that all tensors are aligned.
    all.sort_by(|(a, a_dtype, _), (b, b_dtype, _)| b_dtype.cmp(a_dtype).then(a.cmp(b)));
    let infos = all.iter().map(|(name, dtype, tensor)| (name.to_string(), *dtype, tensor.dims().to_vec()));
    let mut to = BufWriter::with_capacity(1 << 18, to);
    to.write_all(&tensor_file_begin(infos, format)?)?;
    for (_, _, tensor) in all {
        // Copied to the host here, where a failure is an error; safetensors would panic.
        let tensor = tensor.to_device(&Device::Cpu).map_err(io::Error::other)?;
        if tensor.storage_and_layout().0.dtype() != tensor.dtype() {
            let problem = "a tensor's memory is released, as that of a sharded parameter between its uses: save the model with its \
                           own methods";
            return Err(io::Error::other(problem));
        }
        to.write_all(&View::data(&tensor))?;
    }
    to.flush()
}

/// Encodes the beginning of a safetensors file: length and header, after which the tensors' elements follow in this
/// order. `format` is stored in the metadata for other programs: `pt` for PyTorch tensors.
fn tensor_file_begin(
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    format: Option<&str>,
) -> io::Result<Vec<u8>> {
    let mut end = 0;
    let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorInfo { dtype, shape, data_offsets: (begin, end) })
    };
    let infos = tensors.into_iter().map(info).collect();
    let format = format.map(|format| HashMap::from([("format".to_string(), format.to_string())]));
    let mut header = serde_json::to_vec(&Metadata::new(format, infos).map_err(io::Error::other)?)?;
    // The data must begin at a multiple of 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

/// Reads all tensors of a safetensors file.
///
/// # Errors
/// [`Error::Io`] if it cannot be read or is not a safetensors file; tensors of a dtype that candle does not support.
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
    Ok(candle_core::safetensors::load_buffer(&read_tensor_file(path).map_err(refuse)?, device)?)
}

/// Reads the bytes of a safetensors file. The header is validated first, so that no more than that is read of other
/// files.
fn read_tensor_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_input(path)?;
    let len = file.metadata()?.len();
    tensor_header(&mut file, len)?;
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    // The file may have changed between the two reads.
    tensor_header(&mut &bytes[..], bytes.len() as u64)?;
    Ok(bytes)
}

/// Header of a safetensors file.
#[derive(Debug)]
#[non_exhaustive]
pub struct TensorHeader {
    /// Names, dtypes, shapes and data offsets of the tensors.
    pub metadata: Metadata,
    /// Offset of the tensors' data in the file, in bytes.
    pub data: u64,
}

/// Reads and validates the header of a safetensors file of size `bytes`, and reads nothing more. If it succeeds, for
/// whatever input, the file has the size that the header implies, and the strides of its shapes do not overflow. Call
/// it before `safetensors` or candle parse an untrusted file, as a crafted header makes their sums and products
/// overflow.
///
/// # Errors
/// [`ErrorKind::InvalidData`] if it is not a safetensors file, or is truncated; read errors.
///
/// ```
/// let header = r#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"ab"].concat();
/// let found = training::internal::tensor_header(&mut &file[..], file.len() as u64)?;
/// assert_eq!((found.metadata.offset_keys(), &file[found.data as usize..]), (vec!["w".to_string()], &b"ab"[..]));
/// let cut = training::internal::tensor_header(&mut &file[..], 62).map(drop);
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

/// Whether a shape's strides fit in `usize`. Dimensions of 0 are skipped: the strides of an empty tensor are computed
/// as well.
fn has_strides(shape: &[usize]) -> bool {
    shape.iter().filter(|dim| **dim > 0).try_fold(1usize, |stride, dim| stride.checked_mul(*dim)).is_some()
}
