//! Fuzz target: decoding a checkpoint's manifest from arbitrary bytes.

use super::manifest::{Manifest, first_line, is_name};

/// Decodes the bytes as they are, and again with a valid hash put before them.
pub fn fuzz_manifest(data: &[u8]) {
    check_decoding(data);
    let rest = data.strip_prefix(b"{\n").unwrap_or(data);
    check_decoding(&[first_line(rest).as_bytes(), b"\n", rest].concat());
}

fn check_decoding(bytes: &[u8]) {
    match Manifest::decode(bytes) {
        Ok(manifest) => {
            assert!(manifest.tensors.keys().all(|name| is_name(name)));
            let text = manifest.encode().unwrap_or_default();
            assert!(Manifest::decode(text.as_bytes()).is_ok_and(|again| again.tensors == manifest.tensors));
        }
        Err(problem) => assert!(!problem.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_seed_passes() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/manifest");
        let seeds: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!seeds.is_empty());
        for seed in seeds {
            super::fuzz_manifest(&std::fs::read(seed).unwrap());
        }
    }
}
