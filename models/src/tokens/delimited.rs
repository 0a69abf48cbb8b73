//! Reader of tables of text: CSV, and TSV with tabs.

use std::fmt;
use std::io::BufRead;
use std::path::Path;

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use minijinja::Value;

use super::input::Input;
use super::record::{column_help, listed};

/// Maximum bytes of a row.
const LONGEST_ROW: usize = 256 << 20;

/// Table of text whose first line names the columns. Quotes are those of RFC 4180: a field in quotes can hold separators, line
/// ends and doubled quotes.
pub(super) struct Table {
    input: Input,
    parser: Box<Reader>,
    names: Vec<String>,
    /// Line that the last row began in, from 1.
    line: u64,
    done: u64,
    /// Whether the parser has been given the line end behind the file.
    is_ended: bool,
}

/// Returns the separator of a file with such a name, if it is a table.
pub(super) fn separator(path: &Path) -> Option<u8> {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let known = [("csv", b','), ("tsv", b'\t')];
    known.into_iter().find(|(known, _)| ending.eq_ignore_ascii_case(known)).map(|(_, separator)| separator)
}

impl Table {
    /// Opens a file, which needs one of these columns.
    pub(super) fn open(input: Input, separator: u8, wanted: &[&str]) -> Result<Self, String> {
        let parser = Box::new(ReaderBuilder::new().delimiter(separator).build());
        let mut table = Self { input, parser, names: Vec::new(), line: 1, done: 0, is_ended: false };
        table.names = table.row()?.unwrap_or_default();
        let count = |wanted: &&str| table.names.iter().filter(|name| name == wanted).count();
        if let Some(twice) = wanted.iter().find(|wanted| count(wanted) > 1) {
            return Err(format!("its first line has several columns `{twice}`; rename all but one"));
        }
        if !table.names.is_empty() && !table.names.iter().any(|name| wanted.contains(&&**name)) {
            let (listed, held, help) = (listed(wanted), table.names.join(", "), column_help(wanted));
            return Err(format!("its first line has no column {listed}, but {held}; {help}"));
        }
        Ok(table)
    }

    /// Returns the next row as a map; `None` at the end.
    pub(super) fn next_row(&mut self) -> Result<Option<Value>, String> {
        let Some(row) = self.row()? else { return Ok(None) };
        let (found, expected) = (row.len(), self.names.len());
        if found != expected {
            return Err(format!(
                "it has {found} columns, and the first line has {expected}; put fields with separators in quotes"
            ));
        }
        Ok(Some(Value::from_pairs(self.names.iter().cloned().zip(row))))
    }

    fn row(&mut self) -> Result<Option<Vec<String>>, String> {
        self.line = self.parser.line();
        let (mut text, mut ends) = (vec![0; 1 << 12], vec![0; 1 << 6]);
        let (mut filled, mut fields) = (0, 0);
        loop {
            let input = self.input.bytes.fill_buf().map_err(|error| error.to_string())?;
            let at_end = input.is_empty();
            // One line end more ends the last row, unless it is within quotes.
            let input = if at_end && !self.is_ended { b"\n" } else { input };
            let (result, read, written, ended) =
                self.parser.read_record(input, &mut text[filled..], &mut ends[fields..]);
            match at_end {
                true => self.is_ended |= read > 0,
                false => {
                    self.input.bytes.consume(read);
                    self.done += read as u64;
                }
            }
            (filled, fields) = (filled + written, fields + ended);
            match result {
                ReadRecordResult::InputEmpty if at_end && self.is_ended && filled + fields > 0 => {
                    return Err("a quote is opened that is not closed before the end of the file".into());
                }
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull if text.len() < LONGEST_ROW => text.resize(2 * text.len(), 0),
                ReadRecordResult::OutputFull => return Err(format!("it is longer than {LONGEST_ROW} bytes")),
                ReadRecordResult::OutputEndsFull => ends.resize(2 * ends.len(), 0),
                ReadRecordResult::Record => break,
                ReadRecordResult::End => return Ok(None),
            }
        }
        let mut begin = 0;
        let field = |end: &usize| {
            let bytes = text[begin..*end].to_vec();
            begin = *end;
            String::from_utf8(bytes).map_err(|_| "it is no text in UTF-8".to_string())
        };
        ends[..fields].iter().map(field).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the line that the last row began in, from 1.
    pub(super) fn line(&self) -> u64 {
        self.line
    }

    /// Returns the number of bytes read.
    pub(super) fn bytes_read(&self) -> u64 {
        self.input.bytes_read(self.done)
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table(line {})", self.line)
    }
}
