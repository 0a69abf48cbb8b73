//! Fuzz target: arbitrary bytes as a safetensors file.

use candle_core::Device;

use crate::tensor_header;

/// Parses the bytes as they are, and again with a header of the right length.
pub fn fuzz_tensor_header(data: &[u8]) {
    let header = data.split(|byte| *byte == 0).next().unwrap_or_default();
    let framed = [&(header.len() as u64).to_le_bytes()[..], header, &data[header.len()..]].concat();
    look(data);
    look(&framed);
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
            super::fuzz_tensor_header(&std::fs::read(seed).unwrap());
        }
    }
}
