//! The manifest `checkpoint.json`: contents of a checkpoint, with the hashes of all files and of itself.

use std::collections::BTreeMap;
use std::io::Read;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::internal::open_input;

pub(super) const FILE: &str = "checkpoint.json";

/// Version of the checkpoint format (folder and manifest) that this code writes and reads.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    pub(super) epoch: u64,
    pub(super) step: u64,
    pub(super) sampler: Value,
    pub(super) extra: Value,
    /// Keyed by the name of a set of tensors.
    pub(super) tensors: BTreeMap<String, FileHash>,
}

/// Expected size and hash of a checkpoint's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
}

impl FileHash {
    /// Computes size and hash of a file by reading all of it.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of(path: &std::path::Path) -> std::io::Result<Self> {
        let (mut file, mut hasher, mut bytes) = (open_input(path)?, Sha256::new(), 0);
        let mut block = vec![0; 1 << 18];
        loop {
            let count = file.read(&mut block)?;
            if count == 0 {
                return Ok(FileHash { bytes, sha256: hex(&hasher.finalize()) });
            }
            hasher.update(&block[..count]);
            bytes += count as u64;
        }
    }
}

impl Manifest {
    pub(super) fn new(checkpoint: &super::Checkpoint, tensors: BTreeMap<String, FileHash>) -> Self {
        Self {
            format: FORMAT,
            epoch: checkpoint.epoch,
            step: checkpoint.step,
            sampler: checkpoint.sampler.clone(),
            extra: checkpoint.extra.clone(),
            tensors,
        }
    }

    /// Encodes the manifest: JSON whose first line is the hash of everything after it.
    pub(super) fn encode(&self) -> Result<String, serde_json::Error> {
        let text = serde_json::to_string_pretty(self)?;
        let rest = text.strip_prefix("{\n").unwrap_or(&text);
        Ok(format!("{}\n{rest}", first_line(rest.as_bytes())))
    }

    /// Decodes the file's bytes, or returns what is wrong with them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let end = bytes.iter().position(|&byte| byte == b'\n').ok_or("it is cut off")?;
        let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
        if line != first_line(rest).as_bytes() {
            return Err("its bytes do not have the SHA-256 in its first line".into());
        }
        let manifest: Self =
            serde_json::from_slice(&[b"{", rest].concat()).map_err(|error| error.to_string())?;
        if manifest.format != FORMAT {
            return Err(format!("it is of format {}, this program reads format {FORMAT}", manifest.format));
        }
        match manifest.tensors.keys().find(|name| !is_name(name)) {
            None => Ok(manifest),
            Some(name) => Err(format!("it names a set of tensors {name:?}")),
        }
    }
}

pub(super) fn first_line(rest: &[u8]) -> String {
    format!("{{\"sha256\":\"{}\",", sha256(rest))
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a set of tensors may have this name, which becomes the stem of a file name.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}
