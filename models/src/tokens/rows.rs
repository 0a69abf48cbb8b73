//! Training rows of a fixed length.

use std::fmt;

use sampler::{BoxError, Dataset};

use crate::digest::Hash;
use crate::{Error, LabelsConfig, Problem, Result};

use super::bits;
use super::file::{Layout, TokenFile};
use super::mixture::Mixture;
use super::packing::{Packing, PackingReport, Part, TooLong, Whole};

/// Maximum number of rows in an epoch. Shuffling that many takes about 45 seconds before the first row.
const MOST_ROWS: u128 = u32::MAX as u128;

/// Target of a token that does not count for the loss, like PyTorch's `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// Training sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Input tokens.
    pub tokens: Vec<u32>,
    /// Target of each input: the token that follows, or [`IGNORE_INDEX`].
    pub targets: Vec<i64>,
    /// Numbers of inputs of its documents, in order: attention stays within each, and its positions begin at 0. Inputs
    /// behind the last one are unused, and their targets do not count. Empty if the row is one stream of text, in which
    /// each token sees all before it.
    pub documents: Vec<u32>,
    /// For a head for labels: the input of each document whose score counts, and what its label is: the index of the label; for
    /// each of several whether it applies; or numbers; in rows of pairs the margin of the pair.
    pub scored: Vec<(u32, Vec<f32>)>,
}

impl Row {
    /// Whether any of its targets or documents counts.
    pub fn counts(&self) -> bool {
        !self.scored.is_empty() || self.targets.iter().any(|target| *target != IGNORE_INDEX)
    }
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
/// That is the packing `stream`; [`packed`](Self::packed) has the others. For an evaluation, [`RowsConfig::is_padded`] has
/// the last tokens, too.
///
/// # Cost
/// A row is read on demand; only its tokens are in memory, and with whole documents 8 bytes for 4,096 of them.
pub struct Rows {
    files: Vec<Source>,
    mixture: Mixture,
    len: usize,
    labels: Option<LabelsConfig>,
}

/// How files become rows.
///
/// ```
/// use models::tokens::{Packing, Rows, RowsConfig, TokenWriter};
///
/// # let folder = tempfile::tempdir()?;
/// let mut writer = TokenWriter::create(&folder.path().join("t.tokens"), 9, None)?;
/// for document in [&[1, 2, 3][..], &[4, 5, 6, 7], &[8]] {
///     writer.push(document)?;
///     writer.end_document()?;
/// }
/// let config = RowsConfig { packing: Some(Packing::Whole), ..RowsConfig::new(4) };
/// let rows = Rows::packed(vec![(writer.finish()?, 1.0)], &config)?;
/// assert_eq!((rows.len(), rows.get(0)?.tokens, rows.get(1)?.tokens), (2, vec![1, 2, 3, 8], vec![4, 5, 6, 7]));
/// assert_eq!((rows.get(0)?.documents, rows.get(0)?.targets), (vec![3, 1], vec![2, 3, -100, -100]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct RowsConfig {
    /// Number of inputs of a row.
    pub len: usize,
    /// How documents are put into rows. A file of rows is always used row by row. Default: whole in files in which some tokens
    /// do not count, such as those of conversations, and [`Packing::Stream`] in others.
    pub packing: Option<Packing>,
    /// Whether each two documents are a pair, as [`TextEncoder`](super::TextEncoder) writes those of answers: rows have whole pairs,
    /// whatever the packing, and a pair that is longer than a row is left out unless that is an error. Default false.
    pub pairs: bool,
    /// What is done with documents longer than a row, if the others are whole. Default: they are cut.
    pub too_long: TooLong,
    /// Whether each token of a file but the first is a target, as an evaluation wants: its last row may be shorter, and is completed
    /// with inputs 0 whose targets do not count; two tokens suffice for a row. Default false.
    pub is_padded: bool,
    /// Labels that documents are scored for: files then have labels, their documents are whole, and no token is a target. Default:
    /// none.
    pub labels: Option<LabelsConfig>,
}

impl RowsConfig {
    /// Returns the defaults for rows of `len` inputs.
    pub fn new(len: usize) -> Self {
        Self {
            len,
            packing: None,
            pairs: false,
            too_long: TooLong::default(),
            is_padded: false,
            labels: None,
        }
    }
}

struct Source {
    file: TokenFile,
    packed: Packed,
    weight: f64,
    /// Number of rows in the file.
    rows: u64,
    /// Number of its rows in an epoch.
    taken: u64,
}

/// The packing of a file.
enum Packed {
    Stream,
    Documents,
    Whole(Whole),
}

impl Rows {
    /// Creates rows of `len` inputs from these files, each with its weight.
    ///
    /// # Errors
    /// No files; a length of 0; a file too short for a row, or of rows of another length; a weight that selects no row,
    /// or that is not finite and above 0; an epoch of 2^32 rows or more.
    pub fn new(files: Vec<(TokenFile, f64)>, len: usize) -> Result<Self> {
        Self::packed(files, &RowsConfig { packing: Some(Packing::Stream), ..RowsConfig::new(len) })
    }

    /// Creates rows of documents, as the configuration says.
    ///
    /// With documents, a target is never the token of another document; the last token of one has none. With whole documents
    /// each token but a document's first is a target exactly once, also where a document is cut.
    ///
    /// # Cost
    /// With whole documents, the bounds of all are read, and all are packed once: about 0.1 s for a million, on one thread.
    /// They are packed again, 4,096 at a time, when a row of theirs is read and is not among the last 64 such windows.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), but two tokens suffice for a padded row; a document longer than a row under [`TooLong::Error`];
    /// only such documents under [`TooLong::Drop`].
    pub fn packed(files: Vec<(TokenFile, f64)>, config: &RowsConfig) -> Result<Self> {
        let len = config.len;
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
            .map(|(file, weight)| Source::new(file, weight, config))
            .collect::<Result<Vec<_>>>()?;
        let total: u128 = files.iter().map(|source| u128::from(source.taken)).sum();
        match Mixture::new(files.iter().map(|source| source.taken).collect()) {
            Some(mixture) if total <= MOST_ROWS => {
                Ok(Self { files, mixture, len, labels: config.labels.clone() })
            }
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

    /// Returns the labels that documents are scored for, if they are.
    pub fn labels(&self) -> Option<&LabelsConfig> {
        self.labels.as_ref()
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
        source.read(source.row(element), self.len, self.labels.as_ref())
    }

    /// Whether the rows are of whole pairs ([`RowsConfig::pairs`]).
    pub fn has_pairs(&self) -> bool {
        let of_pairs = |source: &Source| matches!(&source.packed, Packed::Whole(whole) if whole.has_pairs());
        self.files.iter().any(of_pairs)
    }

    /// Returns what became of the documents, or pairs, that are packed whole; `None` if none are.
    pub fn packing(&self) -> Option<PackingReport> {
        let whole = |source: &'_ Source| match &source.packed {
            Packed::Whole(whole) => Some((whole.units(&source.file), whole.cut, whole.dropped)),
            _ => None,
        };
        let all: Vec<_> = self.files.iter().filter_map(whole).collect();
        let sum = |of: fn(&(u64, u64, u64)) -> u64| all.iter().map(of).sum();
        // Of each file, as many of its rows as an epoch has.
        let padding = self.files.iter().map(|source| match &source.packed {
            Packed::Whole(whole) => whole.padding as f64 * source.taken as f64 / source.rows as f64,
            _ => 0.0,
        });
        let padding = padding.sum::<f64>() / (self.mixture.len() as f64 * self.len as f64);
        (!all.is_empty()).then(|| PackingReport {
            documents: sum(|(documents, ..)| *documents),
            cut: sum(|(_, cut, _)| *cut),
            dropped: sum(|(.., dropped)| *dropped),
            padding,
        })
    }

    /// Returns the mean over the tokens of about `sample` rows, evenly spread, of the length of each one's document; in a row that
    /// is one stream of text, that of the row. An unused place counts as a token of none.
    ///
    /// # Errors
    /// Those of [`get`](Self::get).
    pub fn document_len(&self, sample: usize) -> Result<f64> {
        let (mut rows, mut sum) = (0, 0.0);
        for index in (0..self.len()).step_by(self.len().div_ceil(sample.max(1))) {
            let documents = self.get(index)?.documents;
            let of_row = if documents.is_empty() { vec![self.len as u32] } else { documents };
            sum += of_row.into_iter().map(|len| f64::from(len).powi(2)).sum::<f64>();
            rows += 1;
        }
        Ok(sum / (rows * self.len) as f64)
    }

    /// Returns a hash of this data, as 64 hexadecimal digits: it depends on the files' contents, order and weights, and
    /// on the length of rows, but not on the files' names.
    pub fn fingerprint(&self) -> String {
        let mut hash = Hash::default();
        hash.add(format!("rows of {}\n", self.len).as_bytes());
        for Source { file, packed, weight, rows, .. } in &self.files {
            let packing = match packed {
                Packed::Stream => String::new(),
                Packed::Documents => " documents".into(),
                Packed::Whole(whole) => {
                    format!(" whole {}{}", whole.too_long(), if whole.has_pairs() { " pairs" } else { "" })
                }
            };
            hash.add(
                format!("{} {rows} {:016x}{packing}\n", file.fingerprint(), weight.to_bits()).as_bytes(),
            );
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

    /// Adds some of its tokens to a row as inputs, with the tokens that follow as targets. The target of the last one counts
    /// only if it `goes_on`.
    fn add_to(&self, row: &mut Row, Part { tokens: range, goes_on }: Part) -> Result<()> {
        let (from, to) = (range.start + 1, range.end + u64::from(goes_on));
        let mut tokens = self.read(range.start..to)?;
        let mut targets: Vec<i64> = tokens[1..].iter().map(|token| i64::from(*token)).collect();
        if let Layout::Stream { counted: Some(counted), .. } = self.layout {
            let bytes = self.bytes(counted + from / 8..counted + bits::bytes(to))?;
            for (target, token) in targets.iter_mut().zip(from..) {
                if !bits::get(&bytes, from, token) {
                    *target = IGNORE_INDEX;
                }
            }
        }
        tokens.truncate((range.end - range.start) as usize);
        targets.resize(tokens.len(), IGNORE_INDEX);
        row.tokens.extend(tokens);
        row.targets.extend(targets);
        Ok(())
    }
}

/// Checks that a file's documents have the labels that are asked for, and are packed so that each has one.
fn check_labels(file: &TokenFile, config: &RowsConfig) -> Result<()> {
    let Some(labels) = &config.labels else { return Ok(()) };
    let width = if labels.problem == Problem::SingleLabel { 1 } else { labels.names.len() };
    match file.label_width() {
        None => {
            return Err(
                file.refuse("its documents have no labels: give JSON lines with `text` and `label`".into())
            );
        }
        Some(found) if found != width => {
            return Err(file.refuse(format!(
                "its documents have {found} numbers as labels, and the model needs {width}"
            )));
        }
        Some(_) => {}
    }
    let refuse =
        |field, got: String, help| Err(Error::Invalid { what: "documents with labels", field, got, help });
    match (config.packing, config.too_long) {
        (Some(packing @ (Packing::Stream | Packing::Documents)), _) => {
            refuse("the packing", packing.to_string(), "they are whole: leave it out, or give whole")
        }
        (_, TooLong::Cut) if !config.pairs => refuse(
            "those longer than a row",
            "cut".into(),
            "pieces would have no label: give truncate, drop or error",
        ),
        _ => Ok(()),
    }
}

impl Source {
    fn new(file: TokenFile, weight: f64, config: &RowsConfig) -> Result<Self> {
        let RowsConfig { len, is_padded, .. } = *config;
        if let Some(found) = file.row_length().filter(|found| *found != len) {
            let problem = format!(
                "its rows have {} tokens, for {found} inputs; rows of {len} are asked for",
                found + 1
            );
            return Err(file.refuse(problem));
        }
        check_labels(&file, config)?;
        let is_whole = config.labels.is_some() || !file.counts_all();
        let default = if is_whole { Packing::Whole } else { Packing::Stream };
        let packing = if config.pairs { Packing::Whole } else { config.packing.unwrap_or(default) };
        let packed = match (packing, file.row_length()) {
            (Packing::Stream, _) | (_, Some(_)) => Packed::Stream,
            (Packing::Documents, None) => Packed::Documents,
            (Packing::Whole, None) => {
                Packed::Whole(Whole::new(&file, len as u64, config.too_long, config.pairs)?)
            }
        };
        let rows = match &packed {
            Packed::Whole(whole) => whole.rows(),
            _ => file.rows(len, is_padded),
        };
        if rows == 0 {
            let tokens = file.tokens();
            return Err(file.refuse(match (&packed, is_padded) {
                (Packed::Whole(whole), _) => {
                    format!("each of its {} has more than {len} tokens, and is left out: give longer rows", whole.unit())
                }
                (_, true) => format!("its {tokens} tokens are too few: it needs one to predict from, and one to predict"),
                (_, false) => format!(
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
        Ok(Self { file, packed, weight, rows, taken: taken as u64 })
    }

    /// Reads a row of the file, of `len` inputs; what the file does not have of it is padding.
    fn read(&self, index: u64, len: usize, labels: Option<&LabelsConfig>) -> Result<Row> {
        let mut row = Row {
            tokens: Vec::with_capacity(len),
            targets: Vec::with_capacity(len),
            documents: Vec::new(),
            scored: Vec::new(),
        };
        let file = &self.file;
        for part in self.parts(index, len as u64)? {
            if !matches!(self.packed, Packed::Stream) {
                row.documents.push((part.tokens.end - part.tokens.start) as u32);
            }
            let (first, of_document) = (row.tokens.len(), part.tokens.start);
            file.add_to(&mut row, part)?;
            if let Some(labels) = labels {
                let place = first + labels.scored_place(&row.tokens[first..]);
                row.scored.push((place as u32, file.labels_at(of_document)?));
            }
        }
        if labels.is_some() {
            row.targets.fill(IGNORE_INDEX);
        }
        row.tokens.resize(len, 0);
        row.targets.resize(len, IGNORE_INDEX);
        Ok(row)
    }

    /// Returns what is in a row of the file.
    fn parts(&self, index: u64, len: u64) -> Result<Vec<Part>> {
        let file = &self.file;
        if let Packed::Whole(whole) = &self.packed {
            return whole.row(file, index);
        }
        let first = match file.layout {
            Layout::Stream { .. } => index * len,
            Layout::Table { length, .. } => index * length,
        };
        let end = first + len.min(file.tokens() - 1 - first);
        if let Packed::Stream = self.packed {
            return Ok(vec![Part { tokens: first..end, goes_on: true }]);
        }
        let mut bounds = file.begins_within(first..end)?;
        let goes_on = bounds.last() != Some(&end);
        bounds.extend(goes_on.then_some(end));
        let mut begin = first;
        let part = |bound: u64| {
            let tokens = std::mem::replace(&mut begin, bound)..bound;
            Part { tokens, goes_on: goes_on && bound == end }
        };
        Ok(bounds.into_iter().map(part).collect())
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
