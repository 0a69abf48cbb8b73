//! Printing lines to standard output (the tutorials' output only) and notes to standard error.

use std::io::{self, Write};

use crate::error::{Error, Result};

/// Prints one whole line to standard output.
///
/// # Errors
/// Standard output that cannot be written, such as a pipe whose reader has closed it.
pub fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(io::stdout().lock(), "{line}").map_err(Error::Output)
}

/// Prints one line, prefixed with `note: `, to standard error.
pub fn note(line: std::fmt::Arguments<'_>) {
    // A note that cannot be written is dropped.
    let _ = writeln!(io::stderr().lock(), "note: {line}");
}
