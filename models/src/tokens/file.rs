//! Token file reader.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::digest::Hash;
use crate::{Error, Result};

/// Bytes read at a time when a whole file is read.
pub(super) const CHUNK: usize = 1 << 20;

/// Value of `format` in the file's metadata.
pub(super) const FORMAT: &str = "girandole-tokens-1";

/// Token file, read on demand: written by [`TokenWriter`](super::TokenWriter), or a safetensors file with a tensor
/// `tokens`, i64 (rows, length), whose rows are training rows.
///
/// # Cost
/// [`Rows::get`](super::Rows::get) and [`read`](Self::read) read their tokens with one or two system calls, through the
/// page cache. The file is not memory-mapped: if another program truncates it, that is an error and does not kill the
/// process.
#[derive(Debug, Clone)]
pub struct TokenFile {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    pub(super) layout: Layout,
    pub(super) vocab_size: usize,
    pub(super) end_of_text: Option<u32>,
    pub(super) fingerprint: String,
    /// Whether it has no name, and is deleted when the last process that has it open closes it.
    pub(super) is_unnamed: bool,
}

/// Where the parts of the file are, as byte offsets.
#[derive(Debug, Clone)]
pub(super) enum Layout {
    /// Concatenated documents.
    Stream {
        width: u64,
        tokens: u64,
        begin: u64,
        documents: (u64, u64),
        counted: Option<u64>,
        /// And how many numbers each document has.
        labels: Option<(u64, u64)>,
        end: u64,
    },
    /// Rows of i64.
    Table { rows: u64, length: u64, begin: u64 },
}

impl TokenFile {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a path at which other processes of this user and host can open a file that
    /// [`Data::open`](super::Data::open) made of text, while this process has it open: for
    /// [`DataFile::tokens`](super::DataFile). `None` for other files, and on systems without `/proc`.
    pub fn shared(&self) -> Option<PathBuf> {
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()));
        Some(path).filter(|path| self.is_unnamed && path.exists())
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> u64 {
        match self.layout {
            Layout::Stream { tokens, .. } => tokens,
            Layout::Table { rows, length, .. } => rows * length,
        }
    }

    /// Returns the number of documents, or of rows in a file of rows.
    pub fn documents(&self) -> u64 {
        match self.layout {
            Layout::Stream { documents: (_, count), .. } => count,
            Layout::Table { rows, .. } => rows,
        }
    }

    /// Returns the number of inputs of a row, one less than its tokens; `None` if it is not a file of rows.
    pub fn row_length(&self) -> Option<usize> {
        match self.layout {
            Layout::Stream { .. } => None,
            Layout::Table { length, .. } => Some(length as usize - 1),
        }
    }

    /// Returns the size of the vocabulary that the file was made with, or the highest token plus 1 in a file of rows.
    /// All tokens are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the end-of-text token, if the tokenizer had one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// Returns the SHA-256 of the content: when the file was written, or for a file of rows, when it was opened.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether all of its tokens count for the loss.
    pub(super) fn counts_all(&self) -> bool {
        !matches!(self.layout, Layout::Stream { counted: Some(_), .. })
    }

    /// Returns how many numbers the labels of a document have; `None` if documents have none.
    pub fn label_width(&self) -> Option<usize> {
        match self.layout {
            Layout::Stream { labels: Some((_, width)), .. } => Some(width as usize),
            _ => None,
        }
    }

    /// Reads the labels of the document that a token is in; none if documents have none.
    pub(super) fn labels_at(&self, token: u64) -> Result<Vec<f32>> {
        let Layout::Stream { labels: Some((begin, width)), .. } = self.layout else { return Ok(Vec::new()) };
        let document = self.next_document(token)?.saturating_sub(1);
        let bytes = self.bytes(begin + 4 * width * document..begin + 4 * width * (document + 1))?;
        let (numbers, _) = bytes.as_chunks();
        Ok(numbers.iter().copied().map(f32::from_le_bytes).collect())
    }

    /// Returns the first document that begins after a token.
    fn next_document(&self, token: u64) -> Result<u64> {
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.bounds(middle..middle + 1)?[0] <= token {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(low)
    }

    /// Returns the byte range of the tensors.
    pub(super) fn content(&self) -> Range<u64> {
        match self.layout {
            Layout::Stream { begin, end, .. } => begin..end,
            Layout::Table { begin, rows, length } => begin..begin + rows * length * 8,
        }
    }

    /// Reads the whole file and compares its content with the fingerprint.
    ///
    /// # Errors
    /// Content that has changed; failures to read.
    pub fn verify(&self) -> Result<()> {
        let Range { start: begin, end } = self.content();
        let mut hash = Hash::default();
        for from in (begin..end).step_by(CHUNK) {
            hash.add(&self.bytes(from..end.min(from + CHUNK as u64))?);
        }
        if hash.hex() != self.fingerprint {
            return Err(self.refuse("its content is not what was written: create it again".into()));
        }
        Ok(())
    }

    /// Returns the range of a document's tokens.
    ///
    /// # Errors
    /// An index out of range; a damaged file; failures to read.
    pub fn document(&self, index: u64) -> Result<Range<u64>> {
        if index >= self.documents() {
            let problem = format!("it has {} documents, and {index} is asked for", self.documents());
            return Err(self.refuse(problem));
        }
        if let Layout::Table { length, .. } = self.layout {
            return Ok(index * length..(index + 1) * length);
        }
        let bounds = self.bounds(index..index + 1)?;
        Ok(bounds[0]..bounds[1])
    }

    /// Returns the index of each document's first token, and that behind the last one's last, of a range of documents that
    /// exist.
    pub(super) fn bounds(&self, documents: Range<u64>) -> Result<Vec<u64>> {
        let Layout::Stream { documents: (begin, _), tokens, .. } = self.layout else {
            return Ok(Vec::new());
        };
        let bytes = self.bytes(begin + 8 * documents.start..begin + 8 * documents.end + 8)?;
        let (numbers, _) = bytes.as_chunks();
        let bounds: Vec<u64> = numbers.iter().copied().map(u64::from_le_bytes).collect();
        let is_wrong = |bounds: &[u64]| bounds[0] >= bounds[1] || bounds[1] > tokens;
        match bounds.windows(2).position(is_wrong) {
            Some(place) => {
                let (index, range) = (documents.start + place as u64, bounds[place]..bounds[place + 1]);
                Err(self.refuse(format!("document {index} would be the tokens {range:?} of {tokens}")))
            }
            None => Ok(bounds),
        }
    }

    /// Returns where documents begin within a range of tokens, after its first token and up to its end, included.
    pub(super) fn begins_within(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let mut low = self.next_document(range.start)?;
        let mut begins = Vec::new();
        while low < self.documents() {
            let next = (low + 64).min(self.documents());
            let bounds = self.bounds(low..next)?;
            let within = bounds[..bounds.len() - 1].iter().copied().filter(|begin| *begin <= range.end);
            let before = begins.len();
            begins.extend(within);
            if begins.len() - before < (next - low) as usize {
                break;
            }
            low = next;
        }
        Ok(begins)
    }

    /// Reads a range of tokens.
    ///
    /// # Errors
    /// Tokens outside the vocabulary; a damaged file; failures to read.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u32>> {
        if range.start > range.end || range.end > self.tokens() {
            let problem = format!("it has {} tokens, and {range:?} are asked for", self.tokens());
            return Err(self.refuse(problem));
        }
        let (begin, width) = match self.layout {
            Layout::Stream { begin, width, .. } => (begin, width),
            Layout::Table { begin, .. } => (begin, 8),
        };
        let bytes = self.bytes(begin + width * range.start..begin + width * range.end)?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let token = |(place, bytes)| match u32::try_from(number(bytes)).ok() {
            Some(token) if (token as usize) < self.vocab_size => Ok(token),
            _ => Err(self.refuse(format!(
                "token {} is {}, and there are only {}: the file is damaged",
                range.start + place as u64,
                number(bytes) as i64,
                self.vocab_size
            ))),
        };
        bytes.chunks_exact(width as usize).enumerate().map(token).collect()
    }

    pub(super) fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.file.read_exact_at(&mut bytes, range.start).map_err(Error::io("read", &self.path))?;
        Ok(bytes)
    }

    pub(super) fn refuse(&self, problem: String) -> Error {
        Error::Format { path: self.path.clone(), problem }
    }
}
