//! Fuzz target: arbitrary bytes as a safetensors file.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};

use crate::TensorFile;
use crate::file::tensor_header;

/// Reads the bytes as they are, and again with a length before them that makes the bytes up to the first zero the header.
pub fn fuzz_tensor_file(data: &[u8]) {
    let header = data.split(|byte| *byte == 0).next().unwrap_or_default();
    let framed = [&(header.len() as u64).to_le_bytes()[..], header, &data[header.len()..]].concat();
    // One file for all runs of a process, in memory if `/dev/shm` exists.
    let folder = Some(PathBuf::from("/dev/shm")).filter(|folder| folder.is_dir());
    let name = format!("girandole-fuzz-{}", std::process::id());
    let path = folder.unwrap_or_else(std::env::temp_dir).join(name);
    for bytes in [data, &framed] {
        look(bytes);
        assert!(std::fs::write(&path, bytes).is_ok(), "{} cannot be written", path.display());
        read(&path);
    }
    // If it cannot be removed, the next run overwrites it.
    let _ = std::fs::remove_file(&path);
}

fn read(path: &Path) {
    let Ok(file) = TensorFile::open(path) else { return };
    for (name, dtype, dims) in file.tensors() {
        let Ok(tensor) = file.whole(&name) else { continue };
        assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &dims[..]));
        assert!(file.read(&name, 0..tensor.elem_count() + 1).is_err());
        assert!(file.check(&name, &[&dims[..], &[2]].concat(), DType::F32).is_err());
    }
    assert!(file.only_of_model(&[]).is_ok() || !file.names().is_empty());
}

fn look(bytes: &[u8]) {
    match tensor_header(&mut &bytes[..], bytes.len() as u64) {
        // Candle may still refuse a dtype.
        Ok(header) => {
            assert!(header.metadata.data_len() as u64 == bytes.len() as u64 - header.data);
            let _ = candle_core::safetensors::load_buffer(bytes, &Device::Cpu);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_seed_passes() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/tensor-file");
        let seeds: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!seeds.is_empty());
        for seed in seeds {
            super::fuzz_tensor_file(&std::fs::read(seed).unwrap());
        }
    }
}
