//! Safetensors files that are read and written part by part, of tensors that no process needs to hold whole.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{TensorInfo, View};

use super::{AtomicFile, TensorHeader, open_input, tensor_file_begin, tensor_header};

/// A safetensors file that is open for reading. Only its header is in memory.
#[derive(Debug)]
pub(crate) struct TensorReader {
    file: File,
    header: TensorHeader,
}

impl TensorReader {
    /// Opens a file, and reads its header.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if it is not a whole safetensors file; read errors.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut file = open_input(path)?;
        let bytes = file.metadata()?.len();
        let header = tensor_header(&mut file, bytes)?;
        Ok(Self { file, header })
    }

    /// Returns dtype and shape of a tensor.
    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.metadata.info(name)
    }

    /// Returns the names of the tensors, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = self.header.metadata.offset_keys();
        names.sort();
        names
    }

    /// Reads ranges of a tensor's elements, concatenated.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a tensor or elements that the file does not have, or a dtype that candle does not
    /// have; read errors.
    pub(crate) fn read(&mut self, name: &str, ranges: &[Range<usize>]) -> io::Result<Tensor> {
        let refuse = |problem: String| io::Error::new(ErrorKind::InvalidInput, problem);
        let Some(info) = self.header.metadata.info(name) else {
            return Err(refuse(format!("it has no tensor `{name}`")));
        };
        let dtype = DType::try_from(info.dtype).map_err(|error| refuse(error.to_string()))?;
        let (begin, size) = (self.header.data + info.data_offsets.0 as u64, dtype.size_in_bytes());
        let elements: usize = info.shape.iter().product();
        if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > elements) {
            return Err(refuse(format!("tensor `{name}` has no elements {range:?}")));
        }
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let (mut bytes, mut done) = (vec![0; len * size], 0);
        for range in ranges {
            let part = &mut bytes[done..done + range.len() * size];
            done += part.len();
            self.file.seek(SeekFrom::Start(begin + (range.start * size) as u64))?;
            self.file.read_exact(part)?;
        }
        Tensor::from_raw_buffer(&bytes, dtype, &[len], &Device::Cpu).map_err(io::Error::other)
    }
}

/// A safetensors file that is being written; it appears complete or not at all, see [`AtomicFile`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use training::internal::TensorWriter;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("w.safetensors");
/// let mut writer = TensorWriter::begin(&path, &[("w".into(), DType::U32, vec![2, 3])])?;
/// writer.write(0, &Tensor::arange(0u32, 6, &Device::Cpu)?.reshape((2, 3))?)?;
/// writer.finish()?;
/// assert_eq!(training::load_tensors(&path, &Device::Cpu)?["w"].dims(), [2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorWriter {
    file: BufWriter<AtomicFile>,
    /// Offset in the file and size of each tensor, in bytes.
    places: Vec<(u64, usize)>,
    /// Bytes of tensors that have been written.
    written: usize,
}

impl TensorWriter {
    /// Creates the file for tensors of these names, dtypes and shapes, for PyTorch.
    ///
    /// # Errors
    /// Shapes whose elements cannot be counted; write errors.
    pub fn begin(path: &Path, tensors: &[(String, DType, Vec<usize>)]) -> io::Result<Self> {
        let infos = tensors.iter().map(|(name, dtype, dims)| (name.clone(), (*dtype).into(), dims.clone()));
        let begin = tensor_file_begin(infos, Some("pt"))?;
        let mut file = BufWriter::with_capacity(1 << 18, AtomicFile::create(path)?);
        file.write_all(&begin)?;
        let mut end = begin.len();
        let mut places = Vec::with_capacity(tensors.len());
        for (_, dtype, dims) in tensors {
            let size = dims.iter().product::<usize>() * dtype.size_in_bytes();
            places.push((end as u64, size));
            end += size;
        }
        Ok(Self { file, places, written: 0 })
    }

    /// Writes a tensor, which is the `index`-th of those that the file was created for. The order of calls is free.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the file has no such tensor, or one of another size; a tensor that cannot be copied to
    /// the host; write errors.
    pub fn write(&mut self, index: usize, tensor: &Tensor) -> io::Result<()> {
        let got = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let Some(&(place, _)) = self.places.get(index).filter(|(_, size)| *size == got) else {
            let problem = format!("tensor {index} of the file has not {got} bytes");
            return Err(io::Error::new(ErrorKind::InvalidInput, problem));
        };
        self.file.seek(SeekFrom::Start(place))?;
        self.append(tensor)
    }

    /// Writes elements behind those before them, of all tensors in order: for a tensor that comes in pieces.
    ///
    /// # Errors
    /// A tensor that cannot be copied to the host; write errors.
    pub fn append(&mut self, elements: &Tensor) -> io::Result<()> {
        // safetensors panics on tensors that are not contiguous or not on the CPU.
        let elements = elements.to_device(&Device::Cpu).and_then(|elements| elements.contiguous());
        let elements = elements.map_err(io::Error::other)?;
        let bytes = View::data(&elements);
        self.written += bytes.len();
        self.file.write_all(&bytes)
    }

    /// Moves the file into place.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if not as many bytes were written as the tensors have; write errors. Nothing is left then.
    pub fn finish(self) -> io::Result<()> {
        let (written, all) = (self.written, self.places.iter().map(|(_, size)| size).sum::<usize>());
        if written != all {
            let problem = format!("its tensors have {all} bytes, and {written} were written");
            return Err(io::Error::new(ErrorKind::InvalidInput, problem));
        }
        self.file.into_inner().map_err(io::IntoInnerError::into_error).and_then(AtomicFile::commit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let numbers = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
        let mut writer = TensorWriter::begin(&path, &[("w".into(), DType::F32, vec![2, 3])]).unwrap();
        for (index, len) in [(0, 5), (0, 7), (1, 6)] {
            assert_eq!(writer.write(index, &numbers(len)).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let error = writer.finish().unwrap_err();
        assert_eq!(error.to_string(), "its tensors have 24 bytes, and 0 were written");
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);

        let mut writer = TensorWriter::begin(&path, &[("w".into(), DType::F32, vec![2, 3])]).unwrap();
        writer.write(0, &numbers(6)).unwrap();
        writer.finish().unwrap();
        let mut reader = TensorReader::open(&path).unwrap();
        for (name, range) in [("v", 0..1), ("w", 5..7), ("w", usize::MAX..usize::MAX)] {
            let error = reader.read(name, std::slice::from_ref(&range)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        assert_eq!(reader.read("w", &[]).unwrap().dims(), [0]);
    }
}
