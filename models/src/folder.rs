//! Reader of the tensors of a model folder's safetensors files, or of a GGUF file: whole, or ranges of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{DType, Device, Tensor};
use ops::quantized::QuantizedMatrix;
use serde_json::Value;
use training::internal::TensorHeader;

use crate::bitsandbytes::{self, Found, Weight};
use crate::entry::Entry;
use crate::files::{INDEX, SINGLE};
use crate::gguf_file::{Rows, Stored};
use crate::{Error, Family, Result, finite, names};

/// Elements in the read buffer, which is in memory in addition to the tensor that is read.
const BUFFER_ELEMENTS: usize = 1 << 18;

/// Model folder whose safetensors headers have been read.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    pub(crate) path: PathBuf,
    files: Vec<(PathBuf, Arc<File>)>,
    tensors: BTreeMap<String, Entry>,
    /// Names of tensors that the index lists and no file has.
    pub(crate) lost: Vec<String>,
    /// The weights that bitsandbytes has in few bits.
    in_bits: Found,
    is_gguf: bool,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let (names, listed) = file_names(path)?;
        let mut folder = Self::empty(path);
        for name in names {
            folder.add(&path.join(name))?;
        }
        folder.find_bits()?;
        folder.lost = listed.into_iter().filter(|name| !folder.tensors.contains_key(name)).collect();
        Ok(folder)
    }

    /// Opens a single file of a folder.
    pub(crate) fn of_file(path: &Path, file: &str) -> Result<Self> {
        let mut folder = Self::empty(path);
        folder.add(&path.join(file))?;
        Ok(folder)
    }

    /// Returns the tensors of a GGUF file, by the names that a folder has for them.
    pub(crate) fn of_gguf(path: &Path, file: Arc<File>, tensors: BTreeMap<String, Entry>) -> Self {
        Self { files: vec![(path.into(), file)], tensors, is_gguf: true, ..Self::empty(path) }
    }

    fn empty(path: &Path) -> Self {
        let (path, files, tensors) = (path.into(), Vec::new(), BTreeMap::new());
        Self { path, files, tensors, lost: Vec::new(), in_bits: Found::default(), is_gguf: false }
    }

    /// Finds the weights that bitsandbytes has in few bits: they have their own shapes, and what widens them is no tensor of the model.
    fn find_bits(&mut self) -> Result<()> {
        let read = |name: &str, from: u64, bytes: &mut [u8]| self.read_bytes(name, from, bytes);
        let found = bitsandbytes::find(&self.path, &self.tensors, &read)?;
        for (name, weight) in &found.weights {
            if let Some(entry) = self.tensors.get_mut(name) {
                (entry.stored, entry.dims) = (Stored::Bits(weight.type_name()), weight.dims.clone());
            }
        }
        self.in_bits = found;
        Ok(())
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let (file, _, header) = open(path)?;
        for (name, info) in header.metadata.tensors() {
            let (begin, end) = info.data_offsets;
            let entry = Entry {
                file: self.files.len(),
                begin: header.data + begin as u64,
                bytes: (end - begin) as u64,
                stored: Stored::Plain(info.dtype),
                dims: info.shape.clone(),
                rotated_heads: None,
            };
            if self.tensors.insert(name.clone(), entry).is_some() {
                let problem = format!("tensor {name} is in another file of the folder, too");
                return Err(Error::Format { path: path.into(), problem });
            }
        }
        self.files.push((path.into(), Arc::new(file)));
        Ok(())
    }

    /// Returns the names of all tensors, but those that others are widened with.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys().filter(|name| !self.in_bits.others.contains(*name))
    }

    /// Returns a weight that bitsandbytes has in few bits.
    pub(crate) fn in_bits(&self, name: &str) -> Option<&Weight> {
        self.in_bits.weights.get(name)
    }

    /// Reads such a weight with its codes, if layers compute with them.
    pub(crate) fn quantized(&self, name: &str) -> Result<Option<QuantizedMatrix>> {
        let read = |name: &str, from: u64, bytes: &mut [u8]| self.read_bytes(name, from, bytes);
        self.in_bits(name).map_or(Ok(None), |weight| weight.matrix(&self.path, &read))
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Whether it stores a weight, by its name in the file, as (inputs, outputs), where the model has (outputs, inputs).
    pub(crate) fn is_transposed(&self, family: Family, name: &str) -> bool {
        !self.is_gguf && self.in_bits(name).is_none() && names::is_transposed(family, name)
    }

    /// Whether two tensors of as many bytes have the same.
    pub(crate) fn have_same_bytes(&self, one: &str, other: &str) -> Result<bool> {
        let len = self.entry(one).map_or(0, Entry::bytes);
        for from in (0..len).step_by(BUFFER_ELEMENTS) {
            let mut both = [one, other].map(|_| vec![0; (len - from).min(BUFFER_ELEMENTS as u64) as usize]);
            for (name, bytes) in [one, other].iter().zip(&mut both) {
                self.read_bytes(name, from, bytes)?;
            }
            if both[0] != both[1] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the metadata of all files.
    pub(crate) fn metadata(&self) -> Result<Vec<Metadata>> {
        self.files.iter().map(|(path, file)| file.metadata().map_err(Error::io("read", path))).collect()
    }

    /// Reads bytes of a tensor as they are in the file.
    pub(crate) fn read_bytes(&self, name: &str, from: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(entry) = self.entry(name) else { return Ok(()) };
        let (path, file) = &self.files[entry.file];
        file.read_exact_at(bytes, entry.begin + from).map_err(Error::io("read", path))
    }

    /// Reads a tensor, with the shape that it has in its file, converted to this dtype.
    pub(crate) fn read(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let len = self.entry(name).map_or(0, |entry| entry.dims.iter().product());
        let whole = self.read_ranges(name, std::slice::from_ref(&(0..len)), dtype)?;
        let dims = self.entry(name).map(|entry| entry.dims.clone()).unwrap_or_default();
        Ok(whole.reshape(dims)?)
    }

    /// Reads ranges of a tensor's elements, concatenated and converted to this dtype. Apart from the result, at most
    /// `BUFFER_ELEMENTS` elements are in memory. Numbers that are NaN or infinite, in the file or in this dtype, are
    /// refused.
    pub(crate) fn read_ranges(&self, name: &str, ranges: &[Range<usize>], dtype: DType) -> Result<Tensor> {
        let Some(entry) = self.entry(name).filter(|entry| entry.is_readable()) else {
            let problem = format!("there is no tensor {name} of floats");
            return Err(Error::Format { path: self.path.clone(), problem });
        };
        let path = &self.files[entry.file].0;
        let all = entry.dims.iter().product::<usize>();
        if let Some(range) = ranges.iter().find(|range| range.end > all) {
            let problem = format!("tensor {name} has {all} numbers, and {range:?} are asked for");
            return Err(Error::Format { path: path.clone(), problem });
        }
        let reordered;
        let in_file = match entry.rotated_heads {
            None => ranges,
            Some(heads) => {
                reordered = Rows::of(&entry.dims, heads).in_file(ranges);
                &reordered[..]
            }
        };
        if let Some(weight) = self.in_bits(name) {
            return self.read_bits(weight, in_file, dtype);
        }
        match (entry.dtype(), entry.stored) {
            (Some(saved), _) => self.read_plain(name, entry, saved, in_file, dtype),
            (None, Stored::Blocks(block)) => self.read_blocks(name, entry, block, in_file, dtype),
            _ => Ok(Tensor::zeros(0, dtype, &Device::Cpu)?),
        }
    }

    /// Reads ranges of elements that are quantized in blocks.
    fn read_blocks(
        &self,
        name: &str,
        entry: &Entry,
        block: GgmlDType,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Tensor> {
        let (size, bytes_each) = (block.block_size(), block.type_size());
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let (read, mut done) = (Tensor::zeros(len, dtype, &Device::Cpu)?, 0);
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start + BUFFER_ELEMENTS);
                let (first, last) = (start / size, end.div_ceil(size));
                let mut bytes = vec![0; (last - first) * bytes_each];
                self.read_bytes(name, (first * bytes_each) as u64, &mut bytes)?;
                let count = (last - first) * size;
                let blocks = qtensor_from_ggml(block, &bytes, vec![count], &Device::Cpu)?;
                let wide = blocks.dequantize(&Device::Cpu)?.narrow(0, start - first * size, end - start)?;
                let converted = wide.to_dtype(dtype)?.contiguous()?;
                if let Some((place, number)) = finite::first_not_finite(&wide, &converted)? {
                    let problem = finite::problem(name, &entry.dims, start + place, number, dtype.as_str());
                    return Err(Error::Format { path: self.files[entry.file].0.clone(), problem });
                }
                read.slice_set(&converted, 0, done)?;
                (start, done) = (end, done + end - start);
            }
        }
        Ok(read)
    }

    /// Reads ranges of elements that bitsandbytes has in few bits.
    fn read_bits(&self, weight: &Weight, ranges: &[Range<usize>], dtype: DType) -> Result<Tensor> {
        let read = |name: &str, from: u64, bytes: &mut [u8]| self.read_bytes(name, from, bytes);
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let (all, mut done) = (Tensor::zeros(len, dtype, &Device::Cpu)?, 0);
        for range in ranges {
            for start in range.clone().step_by(BUFFER_ELEMENTS) {
                let end = range.end.min(start + BUFFER_ELEMENTS);
                let wide = Tensor::new(weight.widen(&self.path, &read, start..end)?, &Device::Cpu)?;
                all.slice_set(&wide.to_dtype(dtype)?, 0, done)?;
                done += end - start;
            }
        }
        Ok(all)
    }

    fn read_plain(
        &self,
        name: &str,
        entry: &Entry,
        saved: DType,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Tensor> {
        let (path, width) = (&self.files[entry.file].0, saved.size_in_bytes());
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let (read, mut done) = (Tensor::zeros(len, dtype, &Device::Cpu)?, 0);
        let (mut bytes, mut filled) = (vec![0; len.min(BUFFER_ELEMENTS) * width], 0);
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let count = (range.end - start).min((bytes.len() - filled) / width);
                self.read_bytes(name, (start * width) as u64, &mut bytes[filled..filled + count * width])?;
                (start, filled) = (start + count, filled + count * width);
                let have = filled / width;
                if filled == bytes.len() || done + have == len {
                    let piece = Tensor::from_raw_buffer(&bytes[..filled], saved, &[have], &Device::Cpu)?;
                    let converted = piece.to_dtype(dtype)?;
                    if let Some((place, number)) = finite::first_not_finite(&piece, &converted)? {
                        let place = element(ranges, done + place);
                        let problem = finite::problem(name, &entry.dims, place, number, dtype.as_str());
                        return Err(Error::Format { path: path.clone(), problem });
                    }
                    read.slice_set(&converted, 0, done)?;
                    (done, filled) = (done + have, 0);
                }
            }
        }
        Ok(read)
    }
}

/// Returns the element at a place among concatenated ranges.
fn element(ranges: &[Range<usize>], mut place: usize) -> usize {
    for range in ranges {
        if place < range.len() {
            return range.start + place;
        }
        place -= range.len();
    }
    place
}

/// Says what a folder without safetensors has, and how it is converted.
fn without_weights(path: &Path) -> String {
    const OTHERS: [&str; 4] = ["bin", "pt", "pth", "gguf"];
    let names = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let other = names.filter_map(|name| name.into_string().ok()).filter(|name| {
        let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| OTHERS.contains(&ending)) && name != "training_args.bin"
    });
    let has = other.min().map_or(String::new(), |other| format!(", but {other}"));
    let folder = path.display();
    format!(
        "there is neither {SINGLE} nor {INDEX}{has}; with PyTorch and transformers, `python -c \"from transformers import \
         AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\"` writes them"
    )
}

/// Returns the names of a folder's weight files, and of the tensors that its index lists.
fn file_names(path: &Path) -> Result<(BTreeSet<String>, Vec<String>)> {
    let index = path.join(INDEX);
    if path.join(SINGLE).exists() {
        return Ok((BTreeSet::from([SINGLE.to_string()]), Vec::new()));
    }
    if !index.exists() {
        return Err(Error::Format { path: path.into(), problem: without_weights(path) });
    }
    let bytes = Error::read(&index)?;
    let refuse = |problem: String| Error::Format { path: index.clone(), problem };
    let json: Value = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(refuse("it has no weight_map".into()));
    };
    let mut files = BTreeSet::new();
    for (tensor, file) in map {
        // Only files in this folder itself.
        match file.as_str().filter(|file| !file.is_empty() && !file.contains(['/', '\\']) && *file != "..") {
            Some(file) => files.insert(file.to_string()),
            None => {
                return Err(refuse(format!("tensor {tensor} is in {file}, which is no file of this folder")));
            }
        };
    }
    Ok((files, map.keys().cloned().collect()))
}

/// Opens a safetensors file; returns it with its length and header.
pub(crate) fn open(path: &Path) -> Result<(File, u64, TensorHeader)> {
    header(path, training::internal::open_input(path).map_err(unreadable(path))?)
}

fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| match source.kind() {
        ErrorKind::InvalidData => {
            Error::Format { path: path.into(), problem: format!("no whole safetensors file: {source}") }
        }
        _ => Error::Io { action: "read", path: path.into(), source },
    }
}

/// Whether the file is a Git LFS pointer, as in a folder that was cloned without Git LFS.
fn is_lfs_pointer(file: &mut File) -> bool {
    const BEGIN: &[u8] = b"version https://git-lfs";
    let mut begin = vec![0; BEGIN.len()];
    file.rewind().and_then(|()| file.read_exact(&mut begin)).is_ok() && begin == BEGIN
}

/// As [`open`], for a file that is already open.
pub(crate) fn header(path: &Path, mut file: File) -> Result<(File, u64, TensorHeader)> {
    let refuse = unreadable(path);
    let bytes = file.metadata().map_err(&refuse)?.len();
    let found = training::internal::tensor_header(&mut file, bytes);
    if found.is_err() && is_lfs_pointer(&mut file) {
        let problem =
            "it is a pointer of Git LFS in the place of the file: `git lfs pull` gets the file itself";
        return Err(Error::Format { path: path.into(), problem: problem.into() });
    }
    let header = found.map_err(&refuse)?;
    Ok((file, bytes, header))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_weights_are_told_with_how_to_convert_them() {
        let folder = tempfile::tempdir().unwrap();
        let line = || Folder::open(folder.path()).unwrap_err().to_string();
        assert!(
            line().contains(&format!(
                "{}: there is neither {SINGLE} nor {INDEX}; with",
                folder.path().display()
            )),
            "{}",
            line()
        );
        for name in
            ["training_args.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin"]
        {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let line = line();
        let parts = [
            ", but pytorch_model-00001-of-00002.bin; ",
            "save_pretrained('",
            &folder.path().display().to_string(),
        ];
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\n'), "{line}");
    }

    #[test]
    fn parts_are_read_alone() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama");
        let folder = Folder::open(&path).unwrap();
        let name = "model.layers.0.mlp.up_proj.weight";
        let whole = folder.read(name, DType::F32).unwrap().flatten_all().unwrap();
        let whole: Vec<f32> = whole.to_vec1().unwrap();
        let part = folder.read_ranges(name, &[5..8, 0..1, 9..9], DType::F32).unwrap();
        assert_eq!(part.to_vec1::<f32>().unwrap(), [&whole[5..8], &whole[..1]].concat());
        assert_eq!(folder.read_ranges(name, &[], DType::F64).unwrap().dims(), [0]);
        let line = folder.read_ranges(name, &[0..1, 0..48 * 32 + 1], DType::F32).unwrap_err().to_string();
        assert!(line.contains("has 1536 numbers"), "{line}");
    }

    #[test]
    fn numbers_that_are_not_finite_are_named_with_tensor_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut numbers = vec![0.5f32; 40];
        (numbers[13], numbers[27]) = (70_000.0, f32::NAN);
        let tensor = Tensor::from_vec(numbers, (4, 10), &Device::Cpu).unwrap();
        let tensors = std::collections::HashMap::from([("a.weight".to_string(), tensor)]);
        candle_core::safetensors::save(&tensors, dir.path().join(SINGLE)).unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        let read = |ranges: &[Range<usize>], dtype| folder.read_ranges("a.weight", ranges, dtype);
        assert!(read(&[0..27, 28..40], DType::F32).is_ok());
        let said = read(&[0..3, 20..30], DType::F32).unwrap_err().to_string();
        assert!(said.contains("model.safetensors: tensor a.weight has NaN at [2, 7]: the file is"), "{said}");
        let said = read(&[5..20, 1..2], DType::F16).unwrap_err().to_string();
        assert!(said.contains("tensor a.weight has 70000 at [1, 3], which f16 cannot hold"), "{said}");
    }

    /// Ranges that are longer than one piece, read in another dtype than the file's.
    #[test]
    fn long_parts_come_in_pieces() {
        let (dir, len) = (tempfile::tempdir().unwrap(), 3 * BUFFER_ELEMENTS + 5);
        let number = |place: usize| (place % 251) as f32;
        let all = Tensor::from_iter((0..len).map(number), &Device::Cpu).unwrap();
        let tensors =
            std::collections::HashMap::from([("a".to_string(), all.to_dtype(DType::BF16).unwrap())]);
        candle_core::safetensors::save(&tensors, dir.path().join(SINGLE)).unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        for ranges in
            [vec![0..len, 0..0], vec![7..8, 1..BUFFER_ELEMENTS, BUFFER_ELEMENTS - 1..len, 3..3, 2..9]]
        {
            let read: Vec<f32> = folder.read_ranges("a", &ranges, DType::F32).unwrap().to_vec1().unwrap();
            assert!(read == ranges.into_iter().flatten().map(number).collect::<Vec<_>>());
        }
    }
}
