//! Training rows of a fixed length.

use std::fmt;

use sampler::{BoxError, Dataset};

use crate::digest::Hash;
use crate::{Error, Result};

use super::bits;
use super::file::{Layout, TokenFile};
use super::mixture::Mixture;

/// Maximum number of rows in an epoch. Shuffling that many takes about 45 seconds before the first row.
const MOST_ROWS: u128 = u32::MAX as u128;

/// Target of a token that does not count for the loss, like PyTorch's `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// Training sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Input tokens.
    pub tokens: Vec<u32>,
    /// Target of each input: the token that follows, or [`IGNORE_INDEX`].
    pub targets: Vec<i64>,
    /// Numbers of inputs of its documents, in order: attention stays within each, and its positions begin at 0. Inputs
    /// behind the last one are unused, and their targets do not count. Empty if the row is one stream of text, in which
    /// each token sees all before it.
    pub documents: Vec<u32>,
}

/// The rows of an epoch, of one or several token files. All have the same number of inputs and of targets.
///
/// - Row i of a token file starts at token i times the length, regardless of documents: each token except the first is
///   a target exactly once, except for the last ones if they do not fill a row.
/// - A file of rows is used row by row: all tokens but the last are inputs, all but the first targets.
/// - A weight of 2 takes each row of a file twice in an epoch; a weight of 1/2 takes half of its rows, evenly spread,
///   the same in every epoch.
/// - Several files are evenly interleaved.
///
/// For an evaluation, [`padded`](Self::padded) has the last tokens, too.
///
/// # Cost
/// A row is read on demand; only its tokens are in memory.
pub struct Rows {
    files: Vec<Source>,
    mixture: Mixture,
    len: usize,
}

struct Source {
    file: TokenFile,
    weight: f64,
    /// Number of rows in the file.
    rows: u64,
    /// Number of its rows in an epoch.
    taken: u64,
}

impl Rows {
    /// Creates rows of `len` inputs from these files, each with its weight.
    ///
    /// # Errors
    /// No files; a length of 0; a file too short for a row, or of rows of another length; a weight that selects no row,
    /// or that is not finite and above 0; an epoch of 2^32 rows or more.
    pub fn new(files: Vec<(TokenFile, f64)>, len: usize) -> Result<Self> {
        Self::of(files, len, false)
    }

    /// Creates rows in which each token of the files but the first is a target: the last row of a file may be shorter,
    /// and is completed with inputs 0 whose targets do not count. For an evaluation.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), but two tokens suffice.
    ///
    /// ```
    /// use models::tokens::{IGNORE_INDEX, Rows, TokenWriter};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let mut writer = TokenWriter::create(&folder.path().join("t.tokens"), 9, None)?;
    /// writer.push(&[1, 2, 3, 4, 5])?;
    /// let row = Rows::padded(vec![(writer.finish()?, 1.0)], 3)?.get(1)?;
    /// assert_eq!((row.tokens, row.targets), (vec![4, 0, 0], vec![5, IGNORE_INDEX, IGNORE_INDEX]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn padded(files: Vec<(TokenFile, f64)>, len: usize) -> Result<Self> {
        Self::of(files, len, true)
    }

    fn of(files: Vec<(TokenFile, f64)>, len: usize, is_padded: bool) -> Result<Self> {
        let refuse =
            |field, got: String, help| Err(Error::Invalid { what: "rows of tokens", field, got, help });
        if len == 0 {
            return refuse("the length", "0".into(), "give 1 or more");
        }
        if files.is_empty() {
            return refuse("the files", "none".into(), "give 1 or more");
        }
        let files = files
            .into_iter()
            .map(|(file, weight)| Source::new(file, weight, (len, is_padded)))
            .collect::<Result<Vec<_>>>()?;
        let total: u128 = files.iter().map(|source| u128::from(source.taken)).sum();
        match Mixture::new(files.iter().map(|source| source.taken).collect()) {
            Some(mixture) if total <= MOST_ROWS => Ok(Self { files, mixture, len }),
            _ => {
                let help = "give smaller weights, or longer rows: an epoch may have 4294967295";
                refuse("the rows of an epoch", total.to_string(), help)
            }
        }
    }

    /// Returns the number of rows of an epoch.
    #[allow(clippy::len_without_is_empty, reason = "there is one at least")]
    pub fn len(&self) -> usize {
        self.mixture.len() as usize
    }

    /// Returns the number of inputs of a row.
    pub fn row_len(&self) -> usize {
        self.len
    }

    /// Returns the files, each with the number of its rows in an epoch.
    pub fn files(&self) -> impl Iterator<Item = (&TokenFile, u64)> {
        self.files.iter().map(|source| (&source.file, source.taken))
    }

    /// Returns the size of the vocabulary: all tokens are below it.
    pub fn vocab_size(&self) -> usize {
        self.files.iter().map(|source| source.file.vocab_size()).max().unwrap_or_default()
    }

    /// Reads a row of the epoch.
    ///
    /// # Errors
    /// An index out of range; a file that is damaged or can no longer be read.
    pub fn get(&self, index: usize) -> Result<Row> {
        if index >= self.len() {
            let got = format!("{index} of {}", self.len());
            let (what, field, help) = ("rows of tokens", "the index", "rows are numbered from 0");
            return Err(Error::Invalid { what, field, got, help });
        }
        let (file, element) = self.mixture.at(index as u64);
        let source = &self.files[file];
        source.file.row(source.row(element), self.len)
    }

    /// Returns a hash of this data, as 64 hexadecimal digits: it depends on the files' contents, order and weights, and
    /// on the length of rows, but not on the files' names.
    pub fn fingerprint(&self) -> String {
        let mut hash = Hash::default();
        hash.add(format!("rows of {}\n", self.len).as_bytes());
        for Source { file, weight, rows, .. } in &self.files {
            hash.add(format!("{} {rows} {:016x}\n", file.fingerprint(), weight.to_bits()).as_bytes());
        }
        hash.hex()
    }
}

impl TokenFile {
    /// Returns the number of rows of `len` inputs, with a last one that is not full if `is_padded`.
    fn rows(&self, len: usize, is_padded: bool) -> u64 {
        match self.layout {
            Layout::Stream { tokens, .. } if is_padded => tokens.saturating_sub(1).div_ceil(len as u64),
            Layout::Stream { tokens, .. } => tokens.saturating_sub(1) / len as u64,
            Layout::Table { rows, .. } => rows,
        }
    }

    /// Reads a row of `len` inputs; what the file does not have of it is padding.
    fn row(&self, index: u64, len: usize) -> Result<Row> {
        let first = match self.layout {
            Layout::Stream { .. } => index * len as u64,
            Layout::Table { length, .. } => index * length,
        };
        let (row_len, len) = (len, (len as u64).min(self.tokens() - 1 - first));
        let mut tokens = self.read(first..first + len + 1)?;
        let mut targets: Vec<i64> = tokens[1..].iter().map(|token| i64::from(*token)).collect();
        if let Layout::Stream { counted: Some(counted), .. } = self.layout {
            let (from, to) = (first + 1, first + 1 + len);
            let bytes = self.bytes(counted + from / 8..counted + bits::bytes(to))?;
            for (target, token) in targets.iter_mut().zip(from..) {
                if !bits::get(&bytes, from, token) {
                    *target = IGNORE_INDEX;
                }
            }
        }
        tokens.truncate(len as usize);
        tokens.resize(row_len, 0);
        targets.resize(row_len, IGNORE_INDEX);
        Ok(Row { tokens, targets, documents: Vec::new() })
    }
}

impl Source {
    fn new(file: TokenFile, weight: f64, (len, is_padded): (usize, bool)) -> Result<Self> {
        if let Some(found) = file.row_length().filter(|found| *found != len) {
            let problem = format!(
                "its rows have {} tokens, for {found} inputs; rows of {len} are asked for",
                found + 1
            );
            return Err(file.refuse(problem));
        }
        let rows = file.rows(len, is_padded);
        if rows == 0 {
            let tokens = file.tokens();
            return Err(file.refuse(match is_padded {
                true => format!("its {tokens} tokens are too few: it needs one to predict from, and one to predict"),
                false => format!(
                    "its {tokens} tokens are too few for a row of {len}, which needs {}: give more text, or shorter rows",
                    len as u64 + 1
                ),
            }));
        }
        // Integers above that are not exact in f64.
        let taken = (rows as f64 * weight).round();
        if !(weight.is_finite() && weight > 0.0 && (1.0..9e15).contains(&taken)) {
            let problem = format!(
                "with the weight {weight} an epoch has {taken} of its {rows} rows; give one that takes a row at least"
            );
            return Err(file.refuse(problem));
        }
        Ok(Self { file, weight, rows, taken: taken as u64 })
    }

    /// Returns the file's row at an index among those taken: first all rows, as many times as the weight has whole
    /// repetitions, then the evenly spread rest.
    fn row(&self, place: u64) -> u64 {
        let some = self.taken % self.rows;
        let whole = self.taken - some;
        match place < whole {
            true => place % self.rows,
            false => (u128::from(place - whole) * u128::from(self.rows) / u128::from(some)) as u64,
        }
    }
}

impl Dataset for Rows {
    type Item = Row;

    fn len(&self) -> usize {
        self.len()
    }

    fn get(&self, index: usize) -> std::result::Result<Row, BoxError> {
        Ok(self.get(index)?)
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rows({} of {} tokens from {} files)", self.len(), self.len, self.files.len())
    }
}
