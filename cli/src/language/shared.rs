//! Sharing of token files: the launcher tokenizes the text once, and the ranks on this machine open its files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use models::tokens::{DataFile, Rows};

use crate::error::{Error, Result};

/// Environment variable with the paths of the token files, one for each file of `--data` and one for that of
/// `--evaluate`.
const VARIABLE: &str = "GIRANDOLE_TOKENS";

/// Returns the variable for the ranks' environment; `None` if there are no shared files. They exist as long as the rows are
/// open.
pub(super) fn variable(rows: &Rows, evaluation: Option<&Rows>) -> Option<(OsString, OsString)> {
    let files = |rows: &Rows| rows.files().map(|(file, _)| file.shared()).collect::<Vec<_>>();
    let all: Vec<Option<PathBuf>> =
        files(rows).into_iter().chain(evaluation.into_iter().flat_map(files)).collect();
    if all.iter().all(Option::is_none) {
        return None;
    }
    let all: Vec<OsString> =
        all.into_iter().map(|path| path.map(OsString::from).unwrap_or_default()).collect();
    Some((VARIABLE.into(), all.join(OsString::from(":").as_os_str())))
}

/// Returns the files of `--data` and that of `--evaluate`, with the token files that the launcher made of them.
///
/// # Errors
/// Standard input, on a rank that another process started, without that process's token file.
pub(super) fn with_shared_tokens(
    data: &[DataFile],
    evaluate: Option<&DataFile>,
) -> Result<(Vec<DataFile>, Option<DataFile>)> {
    let (mut data, mut evaluate) = (data.to_vec(), evaluate.cloned());
    let variable = std::env::var(VARIABLE).ok().filter(|_| launch::is_worker());
    let paths = variable.iter().flat_map(|paths| paths.split(':'));
    for (file, path) in data.iter_mut().chain(&mut evaluate).zip(paths) {
        file.tokens = (!path.is_empty()).then(|| path.into());
    }
    let unread =
        data.iter().chain(&evaluate).find(|file| file.path == Path::new("-") && file.tokens.is_none());
    match unread.filter(|_| launch::is_worker()) {
        Some(_) => {
            let help = "only the process that starts the ranks has standard input, and these ranks cannot read what it made of it: give a file, or one that `tokenize` made of standard input";
            Err(Error::Option { option: "--data", got: "-".into(), help: help.into() })
        }
        None => Ok((data, evaluate)),
    }
}
