//! Fuzz target: arbitrary bytes read as a safetensors file.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::DType;

use crate::file::ShardedFile;

/// Reads the bytes unchanged, and again with a length prefix that makes the bytes up to the first zero the header.
pub fn fuzz_tensor_file(data: &[u8]) {
    // One file for all runs of a process, in memory if `/dev/shm` exists.
    let folder = Some(PathBuf::from("/dev/shm")).filter(|folder| folder.is_dir());
    let name = format!("girandole-fuzz-tensor-parallel-{}", std::process::id());
    let path = folder.unwrap_or_else(std::env::temp_dir).join(name);
    let header = data.split(|byte| *byte == 0).next().unwrap_or_default();
    let framed = [&(header.len() as u64).to_le_bytes()[..], header, &data[header.len()..]].concat();
    for bytes in [data, &framed] {
        let written = std::fs::File::create(&path).and_then(|mut file| file.write_all(bytes));
        assert!(written.is_ok(), "{} cannot be written", path.display());
        read(&path);
    }
    // If it cannot be removed, the next run overwrites it.
    let _ = std::fs::remove_file(&path);
}

fn read(path: &Path) {
    let Ok(mut file) = ShardedFile::open(path) else { return };
    for (name, dims) in file.tensors() {
        // Candle does not support every dtype.
        let Ok(tensor) = file.whole(&name) else { continue };
        assert_eq!(tensor.dims(), dims);
        assert!(file.find(&name, &[&dims[..], &[2]].concat(), DType::F32).is_err());
    }
    assert!(file.finish().is_ok() || !file.tensors().is_empty());
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
