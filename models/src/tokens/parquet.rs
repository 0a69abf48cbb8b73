//! Parquet reader: texts and conversations of one column.

use std::fmt;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::Value;
use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::record::{COMPLETION, OF_TEMPLATES, PROMPT, column_help, listed};

/// Parquet file, of which only the needed columns are read.
pub(super) struct Table {
    rows: RowIter<'static>,
    /// Number of rows in the file; `row` is the number of rows read.
    count: u64,
    row: u64,
}

impl Table {
    /// Opens a file, with those of these columns that it has, and those that say how conversations are written.
    pub(super) fn open(file: File, names: &[&str]) -> Result<Self, String> {
        let bytes = file.metadata().map_err(|error| error.to_string())?.len();
        let reader = SerializedFileReader::new(file).map_err(|error| one_line(&error))?;
        let about = reader.metadata().file_metadata();
        let (schema, count) = (about.schema(), about.num_rows());
        let column = |name: &str| schema.get_fields().iter().find(|column| column.name() == name).cloned();
        let found: Vec<Arc<Type>> = names.iter().filter_map(|name| column(name)).collect();
        if found.is_empty() {
            let held: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
            let (listed, held, help) = (listed(names), held.join(", "), column_help(names));
            return Err(format!("there is no column {listed}, but {held}; {help}"));
        }
        let is_found = |name: &str| found.iter().any(|found| found.name() == name);
        let prompt = column(PROMPT).filter(|_| is_found(COMPLETION) && !is_found(PROMPT));
        let others =
            OF_TEMPLATES.into_iter().filter(|name| !is_found(name)).filter_map(column).collect::<Vec<_>>();
        check(reader.metadata(), bytes)?;
        let columns: Vec<Arc<Type>> = found.into_iter().chain(prompt).chain(others).collect();
        let columns = Type::group_type_builder(schema.name()).with_fields(columns).build();
        let rows =
            columns.and_then(|columns| RowIter::from_file_into(Box::new(reader)).project(Some(columns)));
        let rows = rows.map_err(|error| one_line(&error))?;
        Ok(Self { rows, count: u64::try_from(count).unwrap_or_default(), row: 0 })
    }

    /// Returns the next row as a map; `None` at the end.
    pub(super) fn next_row(&mut self) -> Result<Option<Value>, String> {
        // The reader panics at some damage that its checks do not find.
        let next = catch_unwind(AssertUnwindSafe(|| self.rows.next()));
        let Some(row) = next.map_err(|_| "it is damaged, or no Parquet file".to_string())? else {
            return match self.row == self.count {
                true => Ok(None),
                false => Err(format!("it ends there, and has {} rows by its footer", self.count)),
            };
        };
        if self.row == self.count {
            return Err(format!("more rows follow, and it has {} by its footer", self.count));
        }
        self.row += 1;
        row.map(|row| Some(map(&row))).map_err(|error| one_line(&error))
    }

    /// Returns the number of the last row read, from 1.
    pub(super) fn row(&self) -> u64 {
        self.row
    }

    /// Returns the share of `bytes` that corresponds to the rows read.
    pub(super) fn part_of(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.row) / u128::from(self.count.max(1))) as u64
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table(row {} of {})", self.row, self.count)
    }
}

/// Checks that the columns listed in the footer are within the file, and that their compression is supported.
fn check(metadata: &ParquetMetaData, bytes: u64) -> Result<(), String> {
    for column in metadata.row_groups().iter().flat_map(RowGroupMetaData::columns) {
        let compression = column.compression();
        if !matches!(
            compression,
            Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_)
        ) {
            return Err(format!(
                "it is compressed as {compression:?}; write it with snappy, gzip, zstd or without"
            ));
        }
        let begin = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
        let end = u64::try_from(begin).ok().zip(u64::try_from(column.compressed_size()).ok());
        if end.and_then(|(begin, size)| begin.checked_add(size)).is_none_or(|end| end > bytes) {
            return Err(format!("it is damaged: column {} would not lie in the file", column.column_path()));
        }
    }
    Ok(())
}

fn map(row: &Row) -> Value {
    Value::from_pairs(row.get_column_iter().map(|(name, field)| (name.clone(), value(field))))
}

/// Converts a value as it would be in JSON.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float(value) => Value::from(*value),
        Field::Double(value) => Value::from(*value),
        Field::Str(text) => Value::from(text.as_str()),
        // Older programs do not mark which byte arrays are text.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            Err(_) => Value::from_bytes(bytes.data().to_vec()),
        },
        Field::Group(row) => map(row),
        Field::ListInternal(list) => Value::from(list.elements().iter().map(value).collect::<Vec<_>>()),
        other => Value::from(other.to_string()),
    }
}

fn one_line(error: &parquet::errors::ParquetError) -> String {
    format!("it is no whole Parquet file: {}", error.to_string().lines().collect::<Vec<_>>().join(" "))
}
