//! The crate's error type.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Error with a model or its folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file that is malformed.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A model type that is not supported.
    #[error("model_type {got} is not supported; supported are {supported}")]
    Architecture {
        /// The `model_type` of the configuration, as JSON.
        got: String,
        /// The supported model types.
        supported: String,
    },
    /// A field of a configuration that is missing or has an unsupported value.
    #[error("{file}: {field} is {got}; {help}")]
    Config {
        /// The file, for example `config.json`.
        file: &'static str,
        /// The field.
        field: String,
        /// Its value.
        got: String,
        /// Which values are accepted.
        help: String,
    },
    /// Unknown fields of a configuration.
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
    /// The tensors of a folder do not match the model.
    #[error("{}: the tensors are not this model's: {misfits}", folder.display())]
    Tensors {
        /// The folder.
        folder: PathBuf,
        /// The differences.
        misfits: Box<TensorMismatches>,
    },
    /// A LoRA target, or a pattern of ranks or alphas, that matches no layer of the model.
    #[error("{what} {target:?} matches no layer of the model; layers are called {known}")]
    Target {
        /// What was given: a target, or the field of the pattern.
        what: &'static str,
        /// The target, or the pattern.
        target: String,
        /// Names of the model's layers.
        known: String,
    },
    /// A pattern of ranks or alphas that matches only layers without an adapter.
    #[error("{what} {target:?} matches only layers without an adapter; layers with one are called {known}")]
    WithoutAdapter {
        /// The field of the pattern.
        what: &'static str,
        /// The pattern.
        target: String,
        /// Names of the layers with adapters.
        known: String,
    },
    /// An invalid argument or configuration value of the caller.
    #[error("{what}: {field} is {got}; {help}")]
    Invalid {
        /// What is configured.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        got: String,
        /// Which values are accepted.
        help: &'static str,
    },
    /// Messages that are not a valid conversation, and why.
    #[error("no conversation: {0}; give a list of objects with `role` and `content`")]
    Conversation(String),
    /// What stands in place of a document's label.
    #[error("field `label`: {0}")]
    Label(String),
    /// Error of candle or of a layer.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// Returns a function that wraps an I/O error with the attempted action and the path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.into(), source }
    }

    /// Reads a whole file; if its folder is missing, the error names the folder.
    pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
        let missing = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        if let Some((folder, (of, name))) = missing.and_then(|folder| Some((folder, name_on_hub(folder)?))) {
            let problem = format!(
                "there is no such folder; if it is a model's name on the Hugging Face Hub, get it with `hf download {of}/{name} --local-dir {name}`"
            );
            return Err(Self::Format { path: folder.into(), problem });
        }
        training::internal::read_input(path).map_err(|error| {
            match (error.kind(), path.parent(), path.file_name()) {
                (ErrorKind::NotADirectory, Some(folder), Some(name)) => {
                    let problem = format!("it is a file: give the folder that has {}", name.display());
                    Self::Format { path: folder.into(), problem }
                }
                _ => Self::io("read", missing.unwrap_or(path))(error),
            }
        })
    }
}

/// Returns the owner and the name of a model if a path looks like both.
fn name_on_hub(folder: &Path) -> Option<(&str, &str)> {
    let is_name = |name: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        !name.starts_with('.') && !name.is_empty() && name.bytes().all(is_plain)
    };
    let (of, name) = folder.to_str()?.trim_end_matches('/').split_once('/')?;
    (is_name(of) && is_name(name) && !Path::new(of).exists()).then_some((of, name))
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Differences between the tensors of a folder and those of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorMismatches {
    /// Names of tensors that the model has and the folder does not.
    pub missing: Vec<String>,
    /// Names of tensors that the folder has and the model does not.
    pub surplus: Vec<String>,
    /// Name, shape in the folder and shape in the model of tensors of another shape.
    pub misshapen: Vec<(String, Vec<usize>, Vec<usize>)>,
    /// Name and dtype of tensors whose dtype is not supported.
    pub unreadable: Vec<(String, String)>,
}

impl TensorMismatches {
    /// Returns true if there are no differences.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for TensorMismatches {
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
