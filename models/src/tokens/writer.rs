//! Token file writer.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use training::internal::AtomicFile;

use crate::digest::Hash;
use crate::{Error, Result};

use super::TokenFile;
use super::bits::{self, Bits};
use super::file::FORMAT;
use super::open;

/// Size of the header in bytes. It is reserved at first and written last, when its content is known.
const HEADER: usize = 1024;

/// Writes a token file in constant memory: a safetensors file that appears atomically when it is complete
/// ([`AtomicFile`]).
///
/// # Format
/// - `tokens`: U16 if the vocabulary has at most 65,536 tokens, else U32; padded with zeros to a multiple of 8 bytes.
/// - `documents`: U64, the index of each document's first token, and last the number of tokens.
/// - `counted`, only if some tokens do not count: U8, one bit for each token, whether it counts for the loss as a
///   target. That of token t is bit t % 8 of byte t / 8.
/// - `labels`, only if documents have labels: F32, as many numbers for each document: the index of its label, whether each of
///   several applies, or what is to be predicted.
/// - Metadata: `format` "girandole-tokens-1", `vocab_size`, `end_of_text` (if there is one), `sha256` of the tensors'
///   bytes.
///
/// # Cost
/// `documents`, `labels` and `counted` are kept in unnamed temporary files until the end.
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    /// Whether the file has no name, and lies in the folder for temporary files.
    is_unnamed: bool,
    file: BufWriter<Output>,
    documents: BufWriter<File>,
    labels: BufWriter<File>,
    /// Number of documents that have labels, and of numbers of each.
    labelled: (u64, usize),
    counted: BufWriter<File>,
    bits: Bits,
    all_count: bool,
    vocab_size: usize,
    end_of_text: Option<u32>,
    tokens: u64,
    /// Index of the current document's first token.
    begun: u64,
    ended: u64,
    hash: Hash,
}

/// Output file: moved into place at the end, or without a name.
#[derive(Debug)]
enum Output {
    Named(AtomicFile),
    Unnamed(File),
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Named(file) => file.write(bytes),
            Self::Unnamed(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Named(file) => file.flush(),
            Self::Unnamed(file) => file.flush(),
        }
    }
}

impl Seek for Output {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::Named(file) => file.seek(to),
            Self::Unnamed(file) => file.seek(to),
        }
    }
}

/// Returns the error of a write: to the file, or to the folder of one without a name.
fn refuse(unnamed: bool, path: &Path, error: io::Error) -> Error {
    match unnamed {
        true => Error::io("write in", &std::env::temp_dir())(error),
        false => Error::io("write", path)(error),
    }
}

impl TokenWriter {
    /// Begins a file of tokens below `vocab_size`.
    ///
    /// # Errors
    /// A path that cannot be written; a vocabulary size of 0 or beyond 32 bits.
    pub fn create(path: &Path, vocab_size: usize, end_of_text: Option<u32>) -> Result<Self> {
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let output = AtomicFile::create(path).map(Output::Named).map_err(Error::io("write", path));
        Self::begin(path, output, folder, vocab_size, end_of_text)
    }

    /// Begins an unnamed file in the folder for temporary files: it is deleted when the last process that has it open
    /// ends, in whatever way. It stands for the text `path`.
    pub(super) fn unnamed(path: &Path, vocab_size: usize, end_of_text: Option<u32>) -> Result<Self> {
        let folder = std::env::temp_dir();
        let output = tempfile::tempfile_in(&folder).map(Output::Unnamed);
        let output = output.map_err(Error::io("write in", &folder));
        Ok(Self { is_unnamed: true, ..Self::begin(path, output, &folder, vocab_size, end_of_text)? })
    }

    fn begin(
        path: &Path,
        output: Result<Output>,
        folder: &Path,
        vocab_size: usize,
        end_of_text: Option<u32>,
    ) -> Result<Self> {
        if vocab_size == 0 || u32::try_from(vocab_size).is_err() {
            let help = "give the number of the tokenizer's tokens";
            let got = vocab_size.to_string();
            return Err(Error::Invalid { what: "a token file", field: "the vocabulary", got, help });
        }
        let refuse = Error::io("write in", folder);
        let mut file = BufWriter::with_capacity(1 << 18, output?);
        file.write_all(&[b' '; HEADER]).map_err(&refuse)?;
        let spool = || tempfile::tempfile_in(folder).map(BufWriter::new).map_err(&refuse);
        let mut documents = spool()?;
        documents.write_all(&0u64.to_le_bytes()).map_err(&refuse)?;
        Ok(Self {
            path: path.into(),
            is_unnamed: false,
            file,
            documents,
            labels: spool()?,
            labelled: (0, 0),
            counted: spool()?,
            bits: Bits::default(),
            all_count: true,
            vocab_size,
            end_of_text,
            tokens: 0,
            begun: 0,
            ended: 0,
            hash: Hash::default(),
        })
    }

    /// Returns the number of tokens written.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of documents ended.
    pub fn documents(&self) -> u64 {
        self.ended
    }

    /// Adds tokens to the document, all of which count for the loss.
    ///
    /// # Errors
    /// A token outside the vocabulary; failures to write.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        self.push_counted(tokens, |_| true)
    }

    /// Adds tokens to the document. `counts` returns for each index in `tokens` whether that token counts for the loss
    /// as a target.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_counted(&mut self, tokens: &[u32], counts: impl Fn(usize) -> bool) -> Result<()> {
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocab_size) {
            let (got, help) = (token.to_string(), "the tokenizer has more tokens than it says");
            return Err(Error::Invalid { what: "a token file", field: "a token", got, help });
        }
        let bytes: Vec<u8> = match is_wide(self.vocab_size) {
            true => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
            false => tokens.iter().flat_map(|token| (*token as u16).to_le_bytes()).collect(),
        };
        for place in 0..tokens.len() {
            let counts = counts(place);
            self.all_count &= counts;
            self.bits.push(counts);
        }
        self.tokens += tokens.len() as u64;
        self.hash.add(&bytes);
        let written = self.file.write_all(&bytes).and_then(|()| self.counted.write_all(&self.bits.take()));
        written.map_err(|error| refuse(self.is_unnamed, &self.path, error))
    }

    /// Gives the document labels, once, before it ends: as many numbers as the other documents have, all of which have some.
    ///
    /// # Errors
    /// Another number of them, or a document before without; failures to write.
    pub fn label_document(&mut self, labels: &[f32]) -> Result<()> {
        let (documents, width) = self.labelled;
        if documents != self.ended || labels.is_empty() || (documents > 0 && width != labels.len()) {
            let got = format!(
                "{} numbers after {documents} documents with {width} of {}",
                labels.len(),
                self.ended
            );
            let help = "give each document as many, once";
            return Err(Error::Invalid { what: "a token file", field: "the labels", got, help });
        }
        self.labelled = (documents + 1, labels.len());
        let bytes: Vec<u8> = labels.iter().flat_map(|label| label.to_le_bytes()).collect();
        self.labels.write_all(&bytes).map_err(|error| refuse(self.is_unnamed, &self.path, error))
    }

    /// Ends the document. A document without tokens is ignored.
    ///
    /// # Errors
    /// Failures to write.
    pub fn end_document(&mut self) -> Result<()> {
        if self.begun == self.tokens {
            return Ok(());
        }
        (self.begun, self.ended) = (self.tokens, self.ended + 1);
        self.documents
            .write_all(&self.tokens.to_le_bytes())
            .map_err(|error| refuse(self.is_unnamed, &self.path, error))
    }

    /// Completes the file and moves it into place.
    ///
    /// # Errors
    /// No tokens; failures to write. An older file is then left unchanged.
    pub fn finish(mut self) -> Result<TokenFile> {
        self.end_document()?;
        if self.tokens == 0 {
            let (what, field) = ("a token file", "the text");
            let help = "give one with a character at least";
            return Err(Error::Invalid { what, field, got: "empty".into(), help });
        }
        if self.labelled.0 > 0 && self.labelled.0 != self.ended {
            let got = format!("those of {} documents of {}", self.labelled.0, self.ended);
            let help = "give each document some";
            return Err(Error::Invalid { what: "a token file", field: "the labels", got, help });
        }
        let (path, unnamed) = (self.path.clone(), self.is_unnamed);
        match self.close().map_err(|error| refuse(unnamed, &path, error))? {
            Some(unnamed) => open::open_unnamed(&path, unnamed),
            None => TokenFile::open(&path),
        }
    }

    /// Writes the rest of the file; returns it if it has no name.
    fn close(mut self) -> io::Result<Option<File>> {
        self.bits.fill();
        self.counted.write_all(&self.bits.take())?;
        let width = if is_wide(self.vocab_size) { 4 } else { 2 };
        let padded = (self.tokens * width).next_multiple_of(8);
        let padding = vec![0; (padded - self.tokens * width) as usize];
        self.hash.add(&padding);
        self.file.write_all(&padding)?;
        let labels = self.labelled.0 * self.labelled.1 as u64;
        let spools = [
            Some(self.documents),
            Some(self.labels).filter(|_| labels > 0),
            Some(self.counted).filter(|_| !self.all_count),
        ];
        for spool in spools.into_iter().flatten() {
            append(spool, &mut self.file, &mut self.hash)?;
        }
        let (format, sha256) = (FORMAT.to_string(), self.hash.hex());
        let mut about =
            vec![("format", format), ("vocab_size", self.vocab_size.to_string()), ("sha256", sha256)];
        about.extend(self.end_of_text.map(|token| ("end_of_text", token.to_string())));
        let (dtype, len) = (if width == 4 { Dtype::U32 } else { Dtype::U16 }, padded / width);
        let mut tensors = vec![("tokens", dtype, len), ("documents", Dtype::U64, self.ended + 1)];
        if labels > 0 {
            tensors.push(("labels", Dtype::F32, labels));
        }
        if !self.all_count {
            tensors.push(("counted", Dtype::U8, bits::bytes(self.tokens)));
        }
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header(about, tensors)?)?;
        match self.file.into_inner().map_err(io::IntoInnerError::into_error)? {
            Output::Named(file) => file.commit().map(|()| None),
            // Rewound for reading.
            Output::Unnamed(mut file) => file.rewind().map(|()| Some(file)),
        }
    }
}

/// Whether tokens need more than 16 bits.
fn is_wide(vocab_size: usize) -> bool {
    vocab_size > 1 << 16
}

fn append(spool: BufWriter<File>, to: &mut impl Write, hash: &mut Hash) -> io::Result<()> {
    let mut from = spool.into_inner().map_err(io::IntoInnerError::into_error)?;
    from.rewind()?;
    let (mut from, mut bytes) = (BufReader::new(from), vec![0; 1 << 16]);
    loop {
        let len = from.read(&mut bytes)?;
        if len == 0 {
            return Ok(());
        }
        hash.add(&bytes[..len]);
        to.write_all(&bytes[..len])?;
    }
}

/// Returns the header of a safetensors file of vectors, padded to [`HEADER`] bytes.
fn header(about: Vec<(&str, String)>, tensors: Vec<(&str, Dtype, u64)>) -> io::Result<Vec<u8>> {
    let mut end = 0;
    let info = |(name, dtype, len): (&str, Dtype, u64)| {
        let begin = end;
        end += len as usize * dtype.bitsize() / 8;
        (name.to_string(), TensorInfo { dtype, shape: vec![len as usize], data_offsets: (begin, end) })
    };
    let infos = tensors.into_iter().map(info).collect();
    let about: HashMap<String, String> = about.into_iter().map(|(key, value)| (key.into(), value)).collect();
    let mut header = ((HEADER - 8) as u64).to_le_bytes().to_vec();
    header.extend(serde_json::to_vec(&Metadata::new(Some(about), infos).map_err(io::Error::other)?)?);
    if header.len() > HEADER {
        return Err(io::Error::other("the header is too long"));
    }
    header.resize(HEADER, b' ');
    Ok(header)
}
