//! `tokenize`: converts text to a token file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::console::say;
use crate::error::{Error, Result};
use crate::outputs;
use crate::progress::Progress;
use clap::{ArgGroup, Args, ValueEnum};
use models::Tokenizer;
use models::tokens::{ChatTemplate, NamedTemplate, TextEncoder, TextSource, TokenFile, TokenWriter};

use super::characters;
use crate::language::field::check_field;

/// The unit of the progress bar, in bytes.
const MEGABYTE: u64 = 1_000_000;

/// Tokenizers that need no folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MadeTokenizer {
    /// A token for each byte.
    Bytes,
    /// A token for each character that occurs in the files.
    Characters,
}

/// Options of `tokenize`.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("tokens").args(["model", "tokenizer"]).required(true))]
#[command(after_help = "\
A .jsonl, .ndjson or .json file has one JSON object per line, each a document: a text in its field
`text`, a conversation in its field `messages`, or a `prompt` with its `completion`. The chat template of --model formats conversations,
and only the assistant's answers are trained on. A .parquet file has such rows (in a build with the
feature `parquet`). Any other file is one document, text in UTF-8. Each text is followed by the
end-of-text token.

Training commands also take the text itself, and then tokenize it at each start.

  girandole tokenize book.txt --tokenizer bytes --out book.tokens")]
pub struct TokenizeOptions {
    /// Files with text
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Token file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Folder with tokenizer.json, and with a chat template for conversations
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Tokenizer to make, in place of a folder's
    #[arg(long, value_enum, value_name = "KIND")]
    tokenizer: Option<MadeTokenizer>,
    /// Folder to save that tokenizer to; required with `characters`
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    save_tokenizer: Option<PathBuf>,
    /// Field of JSON lines, or column of Parquet [default: text, or messages]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Template: chatml, or FILE [default: folder's]
    ///
    /// A file in Jinja, for conversations with a model whose folder has no template, or another one.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<NamedTemplate>,
}

impl TokenizeOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// Files, a folder or a template that cannot be used; a token file that cannot be written.
    pub fn run(&self) -> Result<()> {
        let is_there = self.save_tokenizer.as_ref().is_some_and(|folder| folder.exists());
        let written = self.check_files().and_then(|()| self.write_all());
        if let (Err(_), Some(folder), false) = (&written, &self.save_tokenizer, is_there) {
            // Removes the folder only if it is empty.
            let _ = std::fs::remove_dir(folder);
        }
        written
    }

    fn write_all(&self) -> Result<()> {
        let began = Instant::now();
        let tokenizer = self.tokenizer()?;
        let (file, bytes) = self.write(&tokenizer)?;
        if let Some(folder) = &self.save_tokenizer {
            tokenizer.save(folder)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        say(format_args!(
            "documents: {}, tokens: {}, bytes: {bytes}, seconds: {seconds:.1}, tokens/s: {:.0}",
            file.documents(),
            file.tokens(),
            file.tokens() as f64 / seconds.max(1e-3)
        ))
    }

    /// Checks for problems that would otherwise appear only after the work, or that would overwrite an input.
    fn check_files(&self) -> Result<()> {
        for path in &self.files {
            let found = outputs::file_identity(path);
            if found.is_some() && found == outputs::file_identity(&self.out) {
                let (option, other) = ("--out", "the text".to_string());
                return Err(Error::SameFile { option, other, path: self.out.clone() });
            }
            TextSource::open(path, self.field.as_deref())?;
        }
        check_field(self.field.as_deref(), self.files.iter().map(PathBuf::as_path))?;
        training::internal::check_writable(&self.out)?;
        match (&self.save_tokenizer, self.tokenizer) {
            (Some(folder), _) => {
                if let Some(file) = models::weights_in(folder) {
                    let got = folder.display().to_string();
                    let help = format!(
                        "it holds a model ({file}), whose tokenizer would be replaced: give another folder"
                    );
                    return Err(Error::Option { option: "--save-tokenizer", got, help });
                }
                Ok(outputs::make_folder(folder)?)
            }
            (None, Some(MadeTokenizer::Characters)) => Err(Error::Option {
                option: "--tokenizer",
                got: "characters".into(),
                help: "give --save-tokenizer DIR, too: without its tokenizer nobody can use the token file"
                    .into(),
            }),
            (None, _) => Ok(()),
        }
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        match (&self.model, self.tokenizer) {
            (Some(folder), _) => Ok(Tokenizer::from_folder(folder)?),
            (None, Some(MadeTokenizer::Characters)) => {
                characters(self.files.iter().map(PathBuf::as_path), self.field.as_deref())
            }
            (None, _) => Ok(Tokenizer::bytes()?),
        }
    }

    /// Writes the token file; returns it and the number of bytes of text read.
    fn write(&self, tokenizer: &Tokenizer) -> Result<(TokenFile, u64)> {
        let template = ChatTemplate::of(self.chat_template.as_ref(), self.model.as_deref())?;
        let encoder = TextEncoder::new(tokenizer, template)?;
        let sources: std::result::Result<Vec<_>, models::Error> =
            self.files.iter().map(|path| open(path, self.field.as_deref())).collect();
        let mut sources = sources?;
        let total: u64 = sources.iter().map(TextSource::bytes).sum();
        let mut progress = Progress::of_megabytes((total / MEGABYTE) as usize);
        let mut writer = TokenWriter::create(&self.out, tokenizer.len(), tokenizer.end_of_text())?;
        let mut before = 0;
        for source in &mut sources {
            encoder.write(source, &mut writer, |bytes| {
                progress.set_done(((before + bytes) / MEGABYTE) as usize)
            })?;
            before += source.bytes();
        }
        Ok((writer.finish()?, total))
    }
}

/// Opens a text file; a token file is rejected.
fn open(path: &Path, field: Option<&str>) -> std::result::Result<TextSource, models::Error> {
    match TokenFile::open(path) {
        Ok(_) => {
            Err(models::Error::Format { path: path.into(), problem: "it is a token file already".into() })
        }
        Err(_) => TextSource::open(path, field),
    }
}
