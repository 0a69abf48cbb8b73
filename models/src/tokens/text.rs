//! Reader of text and conversations, piece by piece, from text, JSON lines and tables.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use minijinja::Value;

use crate::{Error, Result};

use super::input::{Input, is_standard, uncompressed};
use super::piece::Piece;
use super::{delimited, record};

/// Approximate bytes of text in a piece.
const PIECE: usize = 1 << 18;
/// Maximum length of a piece in which the end of a line is looked for.
const LONGEST_PIECE: usize = 64 * PIECE;
/// Maximum bytes of the text before a piece that are kept as its context.
const CONTEXT: usize = 1 << 10;
/// UTF-8 byte order mark, which is not part of the text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Maximum bytes of a line of JSON.
const LONGEST_LINE: u64 = 256 << 20;

/// Text file, read in constant memory:
///
/// - `.jsonl`, `.ndjson` and `.json`: one JSON object a line, each a document. Its field `text` holds a text, or its
///   field `messages` a conversation (a list of objects with `role` and `content`; a field `tools`, a list of objects or
///   a string that has one as JSON, is passed to the template), or its fields `prompt` and `completion` two strings or two such
///   lists, of which the second is trained on; another field can be named. An answer whose message has a `weight` of 0 or
///   `train` that is false is not trained on.
/// - `.csv` and `.tsv`: a document for each row, from the column `text` or `messages` (JSON), or from `prompt` and `completion`;
///   the first line names the columns.
/// - `.parquet`, in a build with the feature `parquet`: a document for each row, from the same columns.
/// - Any other: UTF-8 text, one document. A long text is cut at line ends that are not followed by white space: most
///   tokenizers never make a token that spans such a line end, and [`TextEncoder`](super::TextEncoder) shows each piece to its
///   tokenizer with a little of what is around it.
///
/// All but Parquet may be compressed with zstd or gzip, and then have `.zst` or `.gz` behind their name. `-` is standard input: JSON
/// lines if it begins with `{`, else one text.
#[derive(Debug)]
pub struct TextSource {
    path: PathBuf,
    /// What is read, but for tables, which read it themselves.
    input: Option<Input>,
    bytes: u64,
    done: u64,
    kind: Kind,
    records: Records,
}

/// What is read of each record.
#[derive(Debug, Clone, Copy)]
enum Records {
    /// A document.
    Documents,
    /// A document with its label.
    Labelled,
    /// A prompt and two answers.
    Pairs,
    /// Two whole documents with their margin.
    Rewarded,
}

#[derive(Debug)]
enum Kind {
    Plain {
        rest: Vec<u8>,
        begun: bool,
        /// The end of the piece before.
        before: String,
    },
    Lines {
        line: u64,
        field: Option<String>,
    },
    Delimited {
        table: delimited::Table,
        field: Option<String>,
    },
    #[cfg(feature = "parquet")]
    Table {
        table: super::parquet::Table,
        field: Option<String>,
    },
}

/// Location in a file, for error messages.
#[derive(Debug, Clone)]
pub(super) struct FileLocation {
    path: PathBuf,
    /// "line" or "row", and its number from 1.
    part: Option<(&'static str, u64)>,
}

impl FileLocation {
    /// Returns an error at this location.
    pub(super) fn refuse(&self, problem: impl std::fmt::Display) -> Error {
        let problem = match self.part {
            Some((what, number)) => format!("{what} {number}: {problem}"),
            None => problem.to_string(),
        };
        Error::Format { path: self.path.clone(), problem }
    }
}

impl TextSource {
    /// Opens a file. `field` is the field or column that holds the text or conversation.
    ///
    /// # Errors
    /// A file that cannot be read or is not a regular file; a Parquet file in a build without the feature, or without
    /// the column.
    pub fn open(path: &Path, field: Option<&str>) -> Result<Self> {
        let names = field.map_or(record::NAMES.to_vec(), |field| vec![field]);
        Self::with_names(path, field, &names)
    }

    /// Opens JSON lines or a table of pairs of answers: fields `chosen` and `rejected`, two strings or two lists of messages, and
    /// usually `prompt`, as they are; without one, the prompt is what both begin with. They are read as [`Piece::Pair`].
    ///
    /// # Errors
    /// Those of [`open`](Self::open); a plain text.
    pub fn open_pairs(path: &Path) -> Result<Self> {
        Self::of_pairs(path, &record::OF_PAIRS, Records::Pairs)
    }

    /// Opens pairs for a reward model: as [`open_pairs`](Self::open_pairs), but of messages nothing is asked except that they are some,
    /// and a pair may have a number `margin`. They are read as [`Piece::Labelled`] pairs, with the margin as label.
    ///
    /// # Errors
    /// Those of [`open_pairs`](Self::open_pairs).
    pub fn open_rewarded(path: &Path) -> Result<Self> {
        Self::of_pairs(path, &record::OF_REWARDS, Records::Rewarded)
    }

    fn of_pairs(path: &Path, names: &[&str], records: Records) -> Result<Self> {
        let source = Self::with_names(path, None, names)?;
        if source.is_one_document() {
            let problem =
                "it is plain text: pairs are JSON lines (.jsonl) or a table, with `chosen` and `rejected`";
            return Err(Error::Format { path: path.into(), problem: problem.into() });
        }
        Ok(Self { records, ..source })
    }

    /// Opens documents with labels: each record also has a field `label` or `labels`, and its document may be a `prompt` alone.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); a file of one text.
    pub fn open_labelled(path: &Path, field: Option<&str>) -> Result<Self> {
        let default = || [&record::NAMES[..], &[record::PROMPT]].concat();
        let names = field.map_or_else(default, |field| vec![field]);
        let source = Self::with_names(path, field, &[&names[..], &record::LABELS].concat())?;
        match source.is_one_document() {
            true => Err(source.refuse(
                "it is one text, without labels: give JSON lines with `text` and `label`, or a table",
            )),
            false => Ok(Self { records: Records::Labelled, ..source }),
        }
    }

    fn with_names(path: &Path, field: Option<&str>, names: &[&str]) -> Result<Self> {
        let mut input = Input::open(path)?;
        let (bytes, field) = (input.size, field.map(str::to_string));
        let begin = input.bytes.fill_buf().map_err(Error::io("read", path))?;
        let is_json = begin.trim_ascii_start().starts_with(b"{");
        // Some editors begin UTF-8 files with it.
        let mark = if begin.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        let source = |input, done, kind| Self {
            path: path.into(),
            input,
            bytes,
            done,
            kind,
            records: Records::Documents,
        };
        if is_table(path) {
            return Ok(source(None, 0, Self::parquet(path, input.read.is_some(), field, names)?));
        }
        if let Some(separator) = delimited::separator(&uncompressed(path)) {
            let table = delimited::Table::open(input, separator, names);
            let table = table.map_err(|problem| Error::Format { path: path.into(), problem })?;
            return Ok(source(None, 0, Kind::Delimited { table, field }));
        }
        // Standard input has no name.
        let kind = match is_lines(path) || (is_standard(path) && is_json) {
            true => Kind::Lines { line: 0, field },
            false => Kind::Plain { rest: Vec::new(), begun: false, before: String::new() },
        };
        input.bytes.consume(mark);
        Ok(source(Some(input), mark as u64, kind))
    }

    #[cfg(feature = "parquet")]
    fn parquet(path: &Path, is_compressed: bool, field: Option<String>, names: &[&str]) -> Result<Kind> {
        if is_compressed {
            let problem = "a table of Parquet, compressed again, cannot be read: decompress it".into();
            return Err(Error::Format { path: path.into(), problem });
        }
        let file = training::internal::open_input(path).map_err(Error::io("read", path))?;
        let table = super::parquet::Table::open(file, names);
        let table = table.map_err(|problem| Error::Format { path: path.into(), problem })?;
        Ok(Kind::Table { table, field })
    }

    #[cfg(not(feature = "parquet"))]
    fn parquet(path: &Path, _: bool, _: Option<String>, _: &[&str]) -> Result<Kind> {
        let problem = "this build reads no Parquet: build it with `--features parquet`, or write the file as JSON lines, as `to_json` of \
                       datasets or pandas does";
        Err(Error::Format { path: path.into(), problem: problem.into() })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of its bytes that were read.
    pub fn bytes_read(&self) -> u64 {
        self.input.as_ref().map_or(self.done, |input| input.bytes_read(self.done))
    }

    /// Returns the next piece; `None` at the end. Documents without text are skipped.
    ///
    /// # Errors
    /// Text that is not UTF-8 or JSON, or does not have the field, with its location; failures to read.
    pub fn next_piece(&mut self) -> Result<Option<Piece>> {
        if self.is_one_document() {
            return self.plain();
        }
        while let Some(record) = self.next_record()? {
            if let Some(piece) = self.piece(&record)? {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Whether its first record has two answers; the next piece is then that of the second record.
    pub(super) fn begins_with_pair(&mut self) -> Result<bool> {
        Ok(!self.is_one_document() && self.next_record()?.is_some_and(|record| record::is_pair(&record)))
    }

    /// Returns the next line of JSON or row of a table; `None` at the end.
    fn next_record(&mut self) -> Result<Option<Value>> {
        let row = match &mut self.kind {
            Kind::Plain { .. } => return Ok(None),
            Kind::Lines { .. } => return self.line(),
            Kind::Delimited { table, .. } => {
                let row = table.next_row();
                self.done = table.bytes_read();
                row
            }
            #[cfg(feature = "parquet")]
            Kind::Table { table, .. } => {
                let row = table.next_row();
                self.done = table.part_of(self.bytes);
                row
            }
        };
        row.map_err(|problem| self.refuse(problem))
    }

    /// Whether all of it is one document.
    pub(super) fn is_one_document(&self) -> bool {
        matches!(self.kind, Kind::Plain { .. })
    }

    /// Returns the location of what was read last.
    pub(super) fn place(&self) -> FileLocation {
        let part = match &self.kind {
            Kind::Plain { .. } => None,
            Kind::Lines { line, .. } => (*line > 0).then_some(("line", *line)),
            Kind::Delimited { table, .. } => Some(("line", table.line())),
            #[cfg(feature = "parquet")]
            Kind::Table { table, .. } => Some(("row", table.row())),
        };
        FileLocation { path: self.path.clone(), part }
    }

    /// Returns an error at the location of what was read last.
    pub(super) fn refuse(&self, problem: impl std::fmt::Display) -> Error {
        self.place().refuse(problem)
    }

    fn plain(&mut self) -> Result<Option<Piece>> {
        let (Kind::Plain { rest, begun, before }, Some(input)) = (&mut self.kind, &mut self.input) else {
            return Ok(None);
        };
        let (mut bytes, before) = (std::mem::take(rest), std::mem::take(before));
        let (begins, kept) = (!std::mem::replace(begun, true), bytes.len());
        let (end, is_last) = loop {
            let room = (PIECE.max(bytes.len()) as u64).min(LONGEST_PIECE as u64);
            let read = (&mut input.bytes).take(room).read_to_end(&mut bytes);
            let read = read.map_err(Error::io("read", &self.path))?;
            if read == 0 || (read as u64) < room {
                break (bytes.len(), true);
            }
            if let Some(end) = cut(&bytes) {
                break (end, false);
            }
        };
        self.done += (bytes.len() - kept) as u64;
        let left = bytes.split_off(end);
        let from = self.done - (end + left.len()) as u64;
        let is_at_line_end = !is_last && bytes.ends_with(b"\n");
        // The first byte is a visible ASCII character: see `cut`.
        let after = left.first().filter(|_| is_at_line_end).map(|byte| char::from(*byte).to_string());
        if let Kind::Plain { rest, .. } = &mut self.kind {
            *rest = left;
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let place = from + error.utf8_error().valid_up_to() as u64;
            self.refuse(format!("it is no text in UTF-8 from byte {place} on"))
        })?;
        if let (Kind::Plain { before, .. }, true) = (&mut self.kind, is_at_line_end) {
            *before = text[text.floor_char_boundary(text.len().saturating_sub(CONTEXT))..].to_string();
        }
        let context = (before, after.unwrap_or_default());
        Ok((!text.is_empty()).then_some(Piece::Text { text, context, begins, ends: is_last }))
    }

    fn line(&mut self) -> Result<Option<Value>> {
        let mut bytes = Vec::new();
        loop {
            let Some(input) = &mut self.input else { return Ok(None) };
            bytes.clear();
            let read = (&mut input.bytes).take(LONGEST_LINE).read_until(b'\n', &mut bytes);
            let read = read.map_err(Error::io("read", &self.path))? as u64;
            if read == 0 {
                return Ok(None);
            }
            self.done += read;
            if let Kind::Lines { line, .. } = &mut self.kind {
                *line += 1;
            }
            if read == LONGEST_LINE && bytes.last() != Some(&b'\n') {
                return Err(self.refuse(format!("it is longer than {LONGEST_LINE} bytes")));
            }
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let record: Value = serde_json::from_slice(&bytes)
                .map_err(|error| self.refuse(format!("it is no JSON object of its own: {error}")))?;
            if let Some(kind) = record::other_kind(&record) {
                return Err(self.refuse(format!("it is no JSON object of its own, but {kind}")));
            }
            return Ok(Some(record));
        }
    }

    fn piece(&self, record: &Value) -> Result<Option<Piece>> {
        let (field, is_table) = match &self.kind {
            Kind::Plain { .. } => return Ok(None),
            Kind::Lines { field, .. } => (field, false),
            Kind::Delimited { field, .. } => (field, true),
            #[cfg(feature = "parquet")]
            Kind::Table { field, .. } => (field, true),
        };
        let is_text = matches!(self.kind, Kind::Delimited { .. });
        let found = match self.records {
            Records::Documents => record::piece(record, field.as_deref(), is_table),
            Records::Labelled => record::labelled(record, field.as_deref()).map(Some),
            Records::Pairs => record::pair(record, is_text).map(Some),
            Records::Rewarded => record::rewarded(record, is_text).map(Some),
        };
        found.map_err(|problem| self.refuse(problem))
    }
}

/// Whether a file of text is one document, and not several in JSON lines or a table.
pub(super) fn is_one_document(path: &Path) -> bool {
    !is_lines(path) && !is_table(path) && delimited::separator(&uncompressed(path)).is_none()
}

/// Whether a file is read as Parquet.
fn is_table(path: &Path) -> bool {
    uncompressed(path).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
}

/// Whether a file is read as JSON lines.
fn is_lines(path: &Path) -> bool {
    let path = uncompressed(path);
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    ["jsonl", "ndjson", "json"].iter().any(|known| ending.eq_ignore_ascii_case(known))
}

/// Returns where to cut a text: after the last line end that is followed by a visible ASCII character. A text without
/// one is cut between characters once it is too long.
fn cut(bytes: &[u8]) -> Option<usize> {
    let follows = |place: usize| !bytes[place].is_ascii_whitespace() && bytes[place].is_ascii();
    let end = (1..bytes.len()).rev().find(|place| bytes[place - 1] == b'\n' && follows(*place));
    let is_long = bytes.len() >= LONGEST_PIECE;
    end.or_else(|| (1..bytes.len()).rev().find(|place| is_long && bytes[*place] & 0xc0 != 0x80))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &mut TextSource) -> Vec<(String, bool, bool)> {
        std::iter::from_fn(|| source.next_piece().unwrap())
            .map(|piece| match piece {
                Piece::Text { text, begins, ends, .. } => (text, begins, ends),
                _ => unreachable!(),
            })
            .collect()
    }

    #[test]
    fn long_texts_are_cut_at_ends_of_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let (line, blank) = ("é".repeat(40_000) + "\n", "x\n\n  \n");
        let lines = [line.repeat(30), blank.into(), "y\n".into(), line.repeat(50), "z".into()].concat();
        for text in [lines, "é".repeat(80 * PIECE) + "end", "short".into(), "\n".repeat(3 * PIECE)] {
            std::fs::write(&path, &text).unwrap();
            let mut source = TextSource::open(&path, None).unwrap();
            let pieces = texts(&mut source);
            assert_eq!(pieces.iter().map(|(text, ..)| &**text).collect::<String>(), text);
            let last = pieces.len() - 1;
            for (place, (piece, begins, ends)) in pieces.iter().enumerate() {
                assert_eq!((*begins, *ends), (place == 0, place == last));
                assert!(piece.len() <= 2 * LONGEST_PIECE);
                if place < last && piece.contains('\n') {
                    let next = pieces[place + 1].0.chars().next().unwrap();
                    assert!(piece.ends_with('\n') && !next.is_whitespace());
                }
            }
            assert_eq!(source.bytes_read(), text.len() as u64);
        }
    }

    #[test]
    fn what_is_no_text_is_told_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let mut bytes = "line\n".repeat(PIECE).into_bytes();
        bytes.extend([b'a', 0xff, b'b']);
        std::fs::write(&path, &bytes).unwrap();
        let mut source = TextSource::open(&path, None).unwrap();
        let line = loop {
            match source.next_piece() {
                Ok(piece) => assert!(piece.is_some()),
                Err(error) => break error.to_string(),
            }
        };
        assert!(line.contains(&format!("from byte {} on", 5 * PIECE + 1)), "{line}");
    }
}
