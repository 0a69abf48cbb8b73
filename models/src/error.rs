//! The crate's one error type.

use std::fmt;
use std::path::{Path, PathBuf};

/// What can go wrong with a model and its folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A model that this crate does not have.
    #[error("model_type {got} is not supported; supported are {supported}")]
    Architecture {
        /// The `model_type` of the configuration, as JSON.
        got: String,
        /// Those that there are.
        supported: String,
    },
    /// A field of a configuration that is missing or cannot be used.
    #[error("{file}: {field} is {got}; {help}")]
    Config {
        /// The file, `config.json` for one.
        file: &'static str,
        /// The field.
        field: String,
        /// What it is.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// Fields of a configuration that nobody here knows.
    #[error(
        "{file}: {fields} not known for {of}, and could change what the model computes; remove a field that does not"
    )]
    UnknownFields {
        /// The file.
        file: &'static str,
        /// The fields with their values.
        fields: String,
        /// What is configured.
        of: String,
    },
    /// The tensors of a folder are not those of the model.
    #[error("{}: the tensors are not this model's: {misfits}", folder.display())]
    Tensors {
        /// The folder.
        folder: PathBuf,
        /// What does not fit.
        misfits: Box<Misfits>,
    },
    /// A LoRA target that the model has not.
    #[error("LoRA target {target:?} matches no layer of the model; layers are called {known}")]
    Target {
        /// The target.
        target: String,
        /// The layers' names.
        known: String,
    },
    /// What a caller asks for cannot be.
    #[error("{what}: {field} is {got}; {help}")]
    Invalid {
        /// What is configured.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// What it is.
        got: String,
        /// What would be accepted.
        help: &'static str,
    },
    /// Messages that are no conversation; what is wrong with them.
    #[error("no conversation: {0}; give a list of objects with `role` and `content`")]
    Conversation(String),
    /// candle's, and those of layers.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// What makes an error of a file or folder that something was tried with.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.into(), source }
    }

    /// All of a file; where its folder is missing, the error names that.
    pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
        let missing = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        training::read_input(path).map_err(Self::io("read", missing.unwrap_or(path)))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}

/// The crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// How the tensors of a folder differ from those of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Misfits {
    /// Names that the model has and the folder has not.
    pub missing: Vec<String>,
    /// Names that the folder has and the model has not.
    pub surplus: Vec<String>,
    /// Names, shapes in the folder and shapes in the model.
    pub misshapen: Vec<(String, Vec<usize>, Vec<usize>)>,
    /// Names, and dtypes that no model can be made of.
    pub unreadable: Vec<(String, String)>,
}

impl Misfits {
    /// True where all fit.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Misfits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            parts.push(format!("missing {}", self.missing.join(", ")));
        }
        if !self.surplus.is_empty() {
            parts.push(format!("surplus {}", self.surplus.join(", ")));
        }
        let misshapen = self
            .misshapen
            .iter()
            .map(|(name, got, expected)| format!("{name} is of shape {got:?} and should be of {expected:?}"));
        let unreadable = self.unreadable.iter().map(|(name, dtype)| {
            format!("{name} is of dtype {dtype} and should be of F32, BF16, F16 or F64")
        });
        parts.extend(misshapen.chain(unreadable));
        f.write_str(&parts.join("; "))
    }
}
