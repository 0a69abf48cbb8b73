//! Record of the files that a program has written to a model's folder: only those may it remove when it replaces the
//! model. What else is there may be the user's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use training::internal::write_output;

use crate::digest::Hash;
use crate::files::{ADAPTER_FILES, TOKENIZER_FILES, is_weight_file};
use crate::tokens::{MORE_TEMPLATES, NamedTemplate, is_template};
use crate::{Error, Result, reading, tokenizer};

/// Name of the record in the folder.
const RECORD: &str = ".written-by-girandole.json";

/// The names of written files, with a hash of those of the tokenizer.
type Files = BTreeMap<String, Option<String>>;

/// A folder to which a model is written, and the files of the tokenizer in it.
#[derive(Debug)]
pub struct WrittenFiles {
    folder: PathBuf,
    /// Names of those that are written.
    own: BTreeSet<String>,
    /// Names of those that were there before, and stay.
    stay: Vec<String>,
}

impl WrittenFiles {
    /// Looks at the folder before a model is written to it, with the tokenizer of another folder, or else a newly made
    /// one. With `replaces`, files of the tokenizer and of generation that an earlier model brought, and that are as they
    /// were written, are removed: programs that load the new model would use them. A `template` is written in place of those of
    /// that folder.
    ///
    /// # Errors
    /// A folder or template that cannot be read; a file that cannot be removed.
    pub fn begin(
        folder: &Path,
        tokenizer_of: Option<&Path>,
        template: Option<&NamedTemplate>,
        replaces: bool,
    ) -> Result<Self> {
        let mut own: BTreeSet<String> = match tokenizer_of {
            Some(from) => tokenizer_files(from)?.into_keys().collect(),
            None => [tokenizer::FILE, tokenizer::CONFIG].map(String::from).into(),
        };
        if let Some(template) = template {
            own.retain(|name| !is_template(name));
            own.extend(template.files()?.into_iter().map(|(name, _)| name));
        }
        let (recorded, mut stay) = (recorded(folder)?, Vec::new());
        for (name, hash) in tokenizer_files(folder)? {
            let is_recorded = recorded.get(&name) == Some(&hash);
            if !own.contains(&name) && is_recorded && replaces {
                let path = folder.join(&name);
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            } else if !own.contains(&name) && !is_recorded {
                stay.push(name);
            }
        }
        Ok(Self { folder: folder.into(), own, stay })
    }

    /// Records the files of the model that has been written. Returns the names of files of the tokenizer that no program
    /// has written there: those that load the model use them.
    ///
    /// # Errors
    /// A folder that cannot be read or written.
    pub fn finish(self) -> Result<Vec<String>> {
        let mut own = tokenizer_files(&self.folder)?;
        own.retain(|name, _| self.own.contains(name));
        let weights = entries(&self.folder)?.into_iter().filter(|name| is_weight_file(name));
        own.extend(weights.map(|name| (name, None)));
        let (path, text) = (self.folder.join(RECORD), serde_json::to_string_pretty(&own).unwrap_or_default());
        write_output(&path, format!("{text}\n").as_bytes()).map_err(Error::io("write", &path))?;
        Ok(self.stay)
    }
}

/// Returns the name of a file of adapters in a folder that no program has recorded there; `None` if there is none.
///
/// # Errors
/// A record that cannot be read.
pub fn foreign_adapters_in(folder: &Path) -> Result<Option<&'static str>> {
    let own = recorded(folder)?;
    Ok(ADAPTER_FILES.into_iter().find(|name| folder.join(name).exists() && !own.contains_key(*name)))
}

fn recorded(folder: &Path) -> Result<Files> {
    let path = folder.join(RECORD);
    match fs::read(&path) {
        // A damaged record is none: nothing is removed then.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).unwrap_or_default()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Files::new()),
        Err(error) => Err(Error::io("read", &path)(error)),
    }
}

/// Returns the files of tokenizer and generation in a folder, with their hashes.
fn tokenizer_files(folder: &Path) -> Result<Files> {
    let more = if folder.is_file() { Vec::new() } else { entries(&folder.join(MORE_TEMPLATES))? };
    let more = more.into_iter().filter(|name| name.ends_with(".jinja"));
    let more = more.map(|name| format!("{MORE_TEMPLATES}/{name}"));
    let mut files = Files::new();
    for name in TOKENIZER_FILES.iter().map(ToString::to_string).chain(more) {
        if let Some(bytes) = reading::text(folder, &name)? {
            let mut hash = Hash::default();
            hash.add(&bytes);
            files.insert(name, Some(hash.hex()));
        }
    }
    Ok(files)
}

/// Returns the names in a folder; none if there is no folder.
fn entries(folder: &Path) -> Result<Vec<String>> {
    let refuse = Error::io("look through", folder);
    match fs::read_dir(folder) {
        Ok(all) => {
            let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
            all.map(|entry| entry.map(name).map_err(&refuse)).collect()
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(refuse(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_written_and_is_unchanged_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        let left = || {
            let mut left = entries(folder).unwrap();
            left.sort();
            left.retain(|name| name != RECORD);
            left
        };
        let model = tempfile::tempdir().unwrap();
        write("chat_template.jinja", "the user's");
        let names = ["tokenizer.json", "generation_config.json", "vocab.json"];
        names.iter().for_each(|name| fs::write(model.path().join(name), "written").unwrap());
        let written = WrittenFiles::begin(folder, Some(model.path()), None, true).unwrap();
        names.iter().for_each(|name| write(name, "written"));
        write("model.safetensors", "weights");
        assert_eq!(written.finish().unwrap(), ["chat_template.jinja"]);
        // The same once more.
        let written = WrittenFiles::begin(folder, Some(model.path()), None, true).unwrap();
        assert_eq!((written.finish().unwrap(), left().len()), (vec!["chat_template.jinja".to_string()], 5));
        write("vocab.json", "changed by the user");
        write("notes.txt", "the user's");
        // A save that does not replace the model removes nothing.
        drop(WrittenFiles::begin(folder, None, None, false).unwrap());
        assert_eq!(left().len(), 6);
        let written = WrittenFiles::begin(folder, None, None, true).unwrap();
        let kept = ["chat_template.jinja", "model.safetensors", "notes.txt", "tokenizer.json", "vocab.json"];
        assert_eq!(left(), kept);
        assert_eq!(written.finish().unwrap(), ["chat_template.jinja", "vocab.json"]);
        assert_eq!(foreign_adapters_in(folder).unwrap(), None);
        write("adapter_config.json", "the user's");
        assert_eq!(foreign_adapters_in(folder).unwrap(), Some("adapter_config.json"));
        fs::create_dir(folder.join(MORE_TEMPLATES)).unwrap();
        write(&format!("{MORE_TEMPLATES}/rag.jinja"), "the user's");
        // A record that cannot be understood says nothing.
        write(RECORD, "{");
        WrittenFiles::begin(folder, None, None, true).unwrap();
        assert_eq!(left().len(), 7);
    }
}
