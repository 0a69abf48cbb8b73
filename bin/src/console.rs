//! Lines on standard output: what the tutorial prints, and nothing else.

use std::io::{self, Write};

use crate::error::{Error, Result};

/// Prints one line, whole.
///
/// # Errors
/// Standard output that cannot be written, such as a pipe that nobody reads any more.
pub fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(io::stdout().lock(), "{line}").map_err(Error::Output)
}

/// Prints one line of remark on standard error.
pub fn note(line: std::fmt::Arguments<'_>) {
    // Where nobody reads the remark, none is needed.
    let _ = writeln!(io::stderr().lock(), "note: {line}");
}
