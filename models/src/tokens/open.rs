//! Opening a token file: parsing and checks of its header.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use training::internal::TensorHeader;

use crate::digest::Hash;
use crate::{Error, Result, folder};

use super::TokenFile;
use super::bits;
use super::file::{CHUNK, FORMAT, Layout};

const HELP: &str = "expected are a file of `girandole tokenize`, or a tensor `tokens` of I64 (rows, length)";

impl TokenFile {
    /// Opens a file and checks its header. All tokens of a file of rows are read once.
    ///
    /// # Errors
    /// A file that cannot be read, is not a regular file or not a complete safetensors file, or has other tensors; a
    /// negative token.
    pub fn open(path: &Path) -> Result<Self> {
        of(path, folder::open(path)?)
    }
}

/// Opens an unnamed file from its handle; errors name it `path`.
pub(super) fn open_unnamed(path: &Path, file: File) -> Result<TokenFile> {
    let file = of(path, folder::header(path, file)?)?;
    Ok(TokenFile { is_unnamed: true, ..file })
}

fn of(path: &Path, (file, bytes, header): (File, u64, TensorHeader)) -> Result<TokenFile> {
    let metadata = &header.metadata;
    let found = match metadata.info("tokens") {
        Some(tokens) if tokens.shape.len() == 2 => table(metadata, tokens, header.data),
        Some(tokens) => stream(metadata, tokens, header.data, bytes),
        None => Err(format!("there is no tensor `tokens`; {HELP}")),
    };
    let about = metadata.metadata().clone().unwrap_or_default();
    let found = found.and_then(|layout| Ok((layout, FileMetadata::of(&about)?)));
    let (layout, about) = found.map_err(|problem| Error::Format { path: path.into(), problem })?;
    let is_table = matches!(layout, Layout::Table { .. });
    let file = TokenFile {
        path: path.into(),
        file: Arc::new(file),
        layout,
        vocab_size: about.vocab_size,
        end_of_text: about.end_of_text,
        fingerprint: about.sha256,
        is_unnamed: false,
    };
    match is_table {
        true => scan_table(file),
        false => check_stream(file),
    }
}

/// Metadata of the file; empty for files of other programs.
#[derive(Default)]
struct FileMetadata {
    vocab_size: usize,
    end_of_text: Option<u32>,
    sha256: String,
}

impl FileMetadata {
    fn of(about: &HashMap<String, String>) -> std::result::Result<Self, String> {
        if about.get("format").is_none_or(|format| format != FORMAT) {
            return Ok(Self::default());
        }
        let refuse = |key: &str| {
            format!("its metadata has no usable {key}: create it again with `girandole tokenize`")
        };
        let get = |key: &str| about.get(key).map(String::as_str);
        let vocab_size = get("vocab_size").and_then(|size| size.parse().ok()).filter(|size| *size > 0);
        let is_hash = |text: &&str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        Ok(Self {
            vocab_size: vocab_size.ok_or_else(|| refuse("vocab_size"))?,
            end_of_text: match get("end_of_text") {
                Some(token) => Some(token.parse().map_err(|_| refuse("end_of_text"))?),
                None => None,
            },
            sha256: get("sha256").filter(is_hash).ok_or_else(|| refuse("sha256"))?.into(),
        })
    }
}

fn table(metadata: &Metadata, tokens: &TensorInfo, data: u64) -> std::result::Result<Layout, String> {
    let names = metadata.offset_keys();
    if let Some(other) = names.iter().find(|name| *name != "tokens") {
        return Err(format!("beside `tokens` it has `{other}`; {HELP}"));
    }
    let (rows, length) = (tokens.shape[0] as u64, tokens.shape[1] as u64);
    match (tokens.dtype, rows, length) {
        (Dtype::I64, 1.., 2..) => Ok(Layout::Table { rows, length, begin: data }),
        (Dtype::I64, ..) => Err(format!(
            "`tokens` is of shape ({rows}, {length}): it needs 1 row and 2 tokens a row at least"
        )),
        (dtype, ..) => Err(format!("`tokens` is {dtype:?} ({rows}, {length}); {HELP}")),
    }
}

fn stream(
    metadata: &Metadata,
    tokens: &TensorInfo,
    data: u64,
    bytes: u64,
) -> std::result::Result<Layout, String> {
    let about = metadata.metadata().as_ref();
    let width = match (tokens.dtype, &tokens.shape[..], about.and_then(|about| about.get("format"))) {
        (Dtype::U16, [_], Some(format)) if format == FORMAT => 2,
        (Dtype::U32, [_], Some(format)) if format == FORMAT => 4,
        (dtype, shape, _) => return Err(format!("`tokens` is {dtype:?} {shape:?}; {HELP}")),
    };
    let vector = |name: &str, dtype| match metadata.info(name) {
        Some(info) if info.dtype == dtype && info.shape.len() == 1 => {
            Ok(Some((data + info.data_offsets.0 as u64, info.shape[0] as u64)))
        }
        Some(info) => {
            Err(format!("`{name}` is {:?} {:?}, and not {dtype:?} of one dimension", info.dtype, info.shape))
        }
        None => Ok(None),
    };
    let (documents, ends) = vector("documents", Dtype::U64)?.ok_or("there is no tensor `documents`")?;
    if ends < 2 {
        return Err(format!("`documents` has {ends} numbers: it holds no document"));
    }
    let room = tokens.shape[0] as u64;
    let labels = match vector("labels", Dtype::F32)? {
        Some((_, len)) if len == 0 || len % (ends - 1) != 0 => {
            return Err(format!("`labels` has {len} numbers for {} documents", ends - 1));
        }
        found => found.map(|(begin, len)| (begin, len / (ends - 1))),
    };
    let counted = vector("counted", Dtype::U8)?;
    if let Some((_, len)) = counted.filter(|(_, len)| *len > bits::bytes(room)) {
        return Err(format!("`counted` has {len} bytes for {room} tokens"));
    }
    Ok(Layout::Stream {
        width,
        // May include padding; `check_stream` sets the exact number.
        tokens: room,
        begin: data + tokens.data_offsets.0 as u64,
        documents: (documents, ends - 1),
        counted: counted.map(|(begin, _)| begin),
        labels,
        end: bytes,
    })
}

/// Checks a stream, and sets the number of its tokens, which is where the last document ends.
fn check_stream(mut file: TokenFile) -> Result<TokenFile> {
    let Layout::Stream { width, tokens: room, documents: (_, count), counted, .. } = file.layout else {
        return Ok(file);
    };
    let end = file.document(count - 1)?.end;
    if room - end >= 8 / width {
        return Err(file.refuse(format!("its documents end at token {end}, and there are {room}")));
    }
    let begins = file.document(0)?.start;
    if begins != 0 {
        return Err(file.refuse(format!("its first document begins at token {begins}")));
    }
    if counted.is_some_and(|at| at + bits::bytes(end) > file.content().end) {
        return Err(file.refuse("`counted` has too few bytes".into()));
    }
    if let Layout::Stream { tokens, .. } = &mut file.layout {
        *tokens = end;
    }
    Ok(file)
}

/// Reads a table to set its fingerprint and its highest token.
fn scan_table(mut file: TokenFile) -> Result<TokenFile> {
    let Layout::Table { length, begin, .. } = file.layout else { return Ok(file) };
    let (mut hash, mut highest) = (Hash::default(), 0);
    let end = file.content().end;
    for from in (begin..end).step_by(CHUNK) {
        let bytes = file.bytes(from..end.min(from + CHUNK as u64))?;
        hash.add(&bytes);
        for (place, bytes) in bytes.chunks_exact(8).enumerate() {
            let token = bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
            if token >= u64::from(u32::MAX) {
                let place = (from - begin) / 8 + place as u64;
                let problem = format!("row {} has token {}", place / length, token as i64);
                return Err(file.refuse(format!("{problem}; tokens are 0 or more, and below 2^32 - 1")));
            }
            highest = highest.max(token);
        }
    }
    (file.vocab_size, file.fingerprint) = (highest as usize + 1, hash.hex());
    Ok(file)
}
