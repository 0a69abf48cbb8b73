//! Training data of language models: text sources, token files, and rows of a fixed length.
//!
//! [`TextEncoder`] encodes a [`TextSource`] as tokens, [`TokenWriter`] writes them to a [`TokenFile`], [`Rows`] divides
//! one or several token files into rows. [`Data::open`] does all of that for files of any type.
//!
//! ```
//! use models::Tokenizer;
//! use models::tokens::{Rows, TokenWriter};
//!
//! # let folder = tempfile::tempdir()?;
//! let tokenizer = Tokenizer::bytes()?;
//! let mut writer = TokenWriter::create(&folder.path().join("t.tokens"), tokenizer.len(), tokenizer.end_of_text())?;
//! for text in ["hello ", "world"] {
//!     writer.push(&tokenizer.encode(text)?)?;
//!     writer.end_document()?;
//! }
//! let rows = Rows::new(vec![(writer.finish()?, 1.0)], 4)?;
//! assert_eq!(rows.len(), 2); // of 11 tokens, the last two do not fill a row
//! let row = rows.get(1)?;
//! assert_eq!(row.tokens, [b'o', b' ', b'w', b'o'].map(u32::from));
//! assert_eq!(row.targets, [b' ', b'w', b'o', b'r'].map(i64::from));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bits;
mod chat;
mod data;
mod delimited;
mod encode;
mod file;
mod input;
mod label;
mod mixture;
mod open;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod piece;
mod record;
mod rows;
mod text;
mod writer;

pub use chat::{Chat, ChatTemplate, NamedTemplate, Rendered};
pub(crate) use chat::{MORE_TEMPLATES, is_template, template_text};
pub use data::{Data, DataConfig, DataFile};
pub use encode::TextEncoder;
pub use file::TokenFile;
pub use packing::{Packing, PackingReport, TooLong};
pub use piece::Piece;
pub use rows::{IGNORE_INDEX, Row, Rows, RowsConfig};
pub use text::TextSource;
pub use writer::TokenWriter;
