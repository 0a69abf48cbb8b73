//! The option `--field`, for files that have fields.

use std::path::Path;

use models::tokens::DataFile;

use crate::error::{Error, Result};

/// Refuses a field (`--field`) where all files are plain text, without any.
pub(crate) fn check_field<'a>(field: Option<&str>, files: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let Some(field) = field else { return Ok(()) };
    // Of standard input it is known once it is read; a file that cannot be read is refused where it is.
    let is_plain = |path: &Path| {
        let file = DataFile { path: path.into(), weight: 1.0, tokens: None };
        path != Path::new("-") && file.is_plain_text().unwrap_or(false)
    };
    if !files.into_iter().all(is_plain) {
        return Ok(());
    }
    let help = "all files are plain text, without fields: leave it out".into();
    Err(Error::Option { option: "--field", got: field.into(), help })
}
