//! Training data of any supported file type (`--data`): arguments, configuration and opening.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Error, LabelsConfig, Result, Tokenizer};

use super::input::is_standard;
use super::text::is_one_document;
use super::{
    ChatTemplate, NamedTemplate, Packing, Rows, RowsConfig, TextEncoder, TextSource, TokenFile, TokenWriter,
    TooLong,
};

/// Token files up to this size are read whole when they are opened, to verify their hash.
const VERIFIED: u64 = 1 << 30;
/// Default number of inputs of a row.
const LENGTH: usize = 1024;

/// A file to train on: `FILE`, or `FILE=WEIGHT` (see [`Rows`]).
///
/// ```
/// use models::tokens::DataFile;
///
/// let file: DataFile = "chats.jsonl=0.5".parse()?;
/// assert_eq!((file.path.to_str(), file.weight), (Some("chats.jsonl"), 0.5));
/// assert_eq!("text.txt".parse::<DataFile>()?.weight, 1.0);
/// assert!("text.txt=-1".parse::<DataFile>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct DataFile {
    /// Path of the file.
    pub path: PathBuf,
    /// How often the file's rows occur in an epoch. Default 1.
    pub weight: f64,
    /// Token file that another process made of this file, to avoid tokenizing it again: see [`TokenFile::shared`]. If
    /// it cannot be read, the file itself is used. Default none.
    pub tokens: Option<PathBuf>,
}

impl DataFile {
    /// Whether the file is one text, and not several documents, rows or tokens.
    ///
    /// # Errors
    /// A file that cannot be read or is not a regular file.
    pub fn is_plain_text(&self) -> Result<bool> {
        match is_standard(&self.path) {
            true => Ok(TextSource::open(&self.path, None)?.is_one_document()),
            false => Ok(!is_tensors(&self.path)? && is_one_document(&self.path)),
        }
    }

    /// Whether the first of the file's records is a pair of answers, `chosen` and `rejected`.
    ///
    /// # Errors
    /// A file that cannot be read, or has other columns.
    pub fn begins_with_pair(&self) -> Result<bool> {
        Ok(!is_tensors(&self.path)? && TextSource::open_pairs(&self.path)?.begins_with_pair()?)
    }
}

impl FromStr for DataFile {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let weighted = text.rsplit_once('=').filter(|_| !Path::new(text).exists());
        let Some((path, weight)) =
            weighted.filter(|(path, weight)| !path.is_empty() && !weight.contains('/'))
        else {
            return Ok(Self { path: text.into(), weight: 1.0, tokens: None });
        };
        match weight.parse() {
            Ok(weight) if f64::is_finite(weight) && weight > 0.0 => {
                Ok(Self { path: path.into(), weight, tokens: None })
            }
            _ => Err(format!("the weight {weight:?} is no number above 0; give FILE or FILE=WEIGHT")),
        }
    }
}

/// How training data is opened.
#[derive(Debug)]
pub struct DataConfig<'a> {
    /// Tokenizer for text. Default none: then only token files and files of rows can be opened.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Folder to read the chat template from. Default none.
    pub folder: Option<&'a Path>,
    /// Chat template in place of the folder's. Default none.
    pub template: Option<&'a NamedTemplate>,
    /// Field of JSON lines that holds the text or conversation. Default `text`, `messages`, or `completion` with `prompt`.
    pub field: Option<&'a str>,
    /// Number of inputs of a row. Default: that of a file of rows if there is one, else 1024 or the model's maximum if
    /// smaller.
    pub length: Option<usize>,
    /// How documents are put into rows. Default: see [`RowsConfig::packing`].
    pub packing: Option<Packing>,
    /// Whether the files have pairs of answers ([`TextSource::open_pairs`]; with [`labels`](Self::labels)
    /// [`TextSource::open_rewarded`]), which become rows of pairs ([`RowsConfig::pairs`]). Default false.
    pub pairs: bool,
    /// What is done with documents longer than a row, where documents are whole. Default: they are cut.
    pub too_long: TooLong,
    /// Whether a last row that is not full is completed with targets that do not count ([`RowsConfig::is_padded`](super::RowsConfig::is_padded)), for an
    /// evaluation. Default false: it is left out.
    pub is_padded: bool,
    /// Labels that documents are scored for: files of text then have them. Default none.
    pub labels: Option<&'a LabelsConfig>,
    /// Size of the model's vocabulary. Default no limit.
    pub vocab_size: usize,
    /// Maximum number of inputs of the model. Default no limit.
    pub max_len: usize,
}

impl Default for DataConfig<'_> {
    fn default() -> Self {
        Self {
            tokenizer: None,
            folder: None,
            template: None,
            field: None,
            length: None,
            packing: None,
            pairs: false,
            too_long: TooLong::default(),
            is_padded: false,
            labels: None,
            vocab_size: usize::MAX,
            max_len: usize::MAX,
        }
    }
}

/// Opens training data.
#[derive(Debug)]
pub struct Data;

impl Data {
    /// Opens files as rows: token files, safetensors files of rows, text and JSON lines ([`TextSource`]). Text is
    /// written to an unnamed token file in the folder for temporary files, which is removed when the process ends.
    ///
    /// # Cost
    /// Text is tokenized by each process that opens it, unless [`DataFile::tokens`] names another process's token file.
    /// Token files up to 1 GiB and files of rows are read once.
    ///
    /// # Errors
    /// A file that cannot be read, is not a regular file or has no text; text without a tokenizer; a tokenizer, or
    /// tokens, beyond the model's vocabulary; a length beyond the model's maximum; those of [`Rows::packed`].
    ///
    /// ```
    /// use models::Tokenizer;
    /// use models::tokens::{Data, DataConfig};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("text.txt");
    /// std::fs::write(&path, "to be or not to be")?;
    /// let tokenizer = Tokenizer::bytes()?;
    /// let config = DataConfig { tokenizer: Some(&tokenizer), length: Some(6), vocab_size: 257, ..DataConfig::default() };
    /// let rows = Data::open(&[path.display().to_string().parse()?], &config)?;
    /// assert_eq!((rows.len(), tokenizer.decode(&rows.get(1)?.tokens)?), (3, "or not".to_string()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(files: &[DataFile], config: &DataConfig<'_>) -> Result<Rows> {
        let mut opened = Vec::with_capacity(files.len());
        for DataFile { path, weight, tokens } in files {
            let file = match tokens.as_deref().and_then(|tokens| open_shared(tokens, path, config)) {
                Some(file) => file,
                None if is_tensors(path)? && config.pairs => {
                    let problem = "token files and files of rows have no pairs: give JSON lines or a table with `chosen` and `rejected`";
                    return Err(Error::Format { path: path.clone(), problem: problem.into() });
                }
                None if is_tensors(path)? => tensors(path, config)?,
                None => text(path, config)?,
            };
            opened.push((file, *weight));
        }
        let of_rows = opened.iter().find_map(|(file, _)| Some((file.row_length()?, file)));
        let default = of_rows.as_ref().map_or(LENGTH.min(config.max_len), |(length, _)| *length);
        let length = config.length.unwrap_or(default);
        if length > config.max_len {
            let got = format!("{length} tokens for a model of {}", config.max_len);
            return match of_rows.filter(|_| config.length.is_none()) {
                Some((_, file)) => Err(file.refuse(format!("its rows have {got} positions"))),
                None => {
                    let (what, field, help) =
                        ("the data", "the length of rows", "give one that the model has positions for");
                    Err(Error::Invalid { what, field, got, help })
                }
            };
        }
        let DataConfig { packing, pairs, too_long, is_padded, .. } = *config;
        let labels = config.labels.cloned();
        Rows::packed(opened, &RowsConfig { len: length, packing, pairs, too_long, is_padded, labels })
    }
}

/// Whether a file is named as safetensors, or begins like it: with the length of a header, and the header's JSON.
fn is_tensors(path: &Path) -> Result<bool> {
    use std::io::Read;
    if is_standard(path) {
        return Ok(false);
    }
    let file = training::internal::open_input(path).map_err(Error::io("read", path))?;
    let mut begin = Vec::new();
    file.take(9).read_to_end(&mut begin).map_err(Error::io("read", path))?;
    let is_named = path.extension().is_some_and(|ending| ending == "safetensors");
    Ok(is_named || (begin.len() == 9 && begin[4..8] == [0; 4] && begin[8] == b'{'))
}

fn tensors(path: &Path, config: &DataConfig<'_>) -> Result<TokenFile> {
    let file = TokenFile::open(path)?;
    if file.vocab_size() > config.vocab_size {
        let (highest, known) = (file.vocab_size(), config.vocab_size);
        let problem = match file.row_length() {
            Some(_) => format!("it has token {}, and the model has {known} tokens", highest - 1),
            None => format!("it is of a tokenizer of {highest} tokens, and the model has {known}"),
        };
        return Err(file.refuse(problem));
    }
    let made_by = config.tokenizer.map(Tokenizer::len).filter(|_| file.row_length().is_none());
    if let Some(len) = made_by.filter(|len| *len != file.vocab_size()) {
        let of = file.vocab_size();
        let problem = format!(
            "it is of a tokenizer of {of} tokens, and the model's has {len}: create it again with the model's"
        );
        return Err(file.refuse(problem));
    }
    // Files of rows were read whole when they were opened.
    let content = file.content();
    if file.row_length().is_none() && content.end - content.start <= VERIFIED {
        file.verify()?;
    }
    Ok(file)
}

/// Opens a token file that another process made of a text; `None` if it cannot be read or is of another tokenizer.
fn open_shared(tokens: &Path, path: &Path, config: &DataConfig<'_>) -> Option<TokenFile> {
    let mut file = TokenFile::open(tokens).ok()?;
    let is_ours = config.tokenizer.is_some_and(|tokenizer| tokenizer.len() == file.vocab_size());
    file.path = path.into();
    Some(file).filter(|file| is_ours && file.vocab_size() <= config.vocab_size)
}

fn text(path: &Path, config: &DataConfig<'_>) -> Result<TokenFile> {
    let Some(tokenizer) = config.tokenizer else {
        let missing = config.folder.map_or("there is no tokenizer".into(), |folder| {
            let without = || "there is no tokenizer.json (transformers' save_pretrained writes one)".into();
            format!("in {} {}", folder.display(), Tokenizer::missing(folder).unwrap_or_else(without))
        });
        let problem = format!("it is text, which needs a tokenizer, and {missing}");
        return Err(Error::Format { path: path.into(), problem });
    };
    tokenizer.check_size(config.vocab_size)?;
    let template = ChatTemplate::of(config.template, config.folder)?;
    let mut encoder = TextEncoder::new(tokenizer, template)?;
    let mut source = match (config.pairs, config.labels) {
        (true, Some(_)) => TextSource::open_rewarded(path)?,
        (true, None) => TextSource::open_pairs(path)?,
        (false, Some(_)) => TextSource::open_labelled(path, config.field)?,
        (false, None) => TextSource::open(path, config.field)?,
    };
    if let Some(labels) = config.labels {
        encoder = encoder.with_labels(labels);
    }
    let mut writer = TokenWriter::unnamed(path, tokenizer.len(), tokenizer.end_of_text())?;
    encoder.write(&mut source, &mut writer, |_| {})?;
    writer.finish()
}
