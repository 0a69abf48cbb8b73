//! A GGUF file in place of a model's folder: the text files that the folder would have, and its tensors.
//!
//! Whatever reads a folder asks [`text_file`] for `config.json`, `tokenizer.json` and others, and [`folder`] for its weights.

mod config;
mod names;
mod vocabulary;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use candle_core::{DType, Tensor};

use crate::entry::Entry;
use crate::folder::Folder;
use crate::gguf_file::{Content, MAGIC, Placed, Value};
use crate::names::HEAD;
use crate::{Error, ModelConfig, Result, tokenizer};

pub(crate) use self::names::{
    POSITIONS, ROUTER, SHARED_GATE, architecture, llama3_factors, name_of, of_expert, rotated_heads,
};

/// Whether a model is given as a GGUF file.
pub(crate) fn is_file(model: &Path) -> bool {
    let begins = || {
        let mut begin = [0; MAGIC.len()];
        let file = training::internal::open_input(model);
        file.and_then(|mut file| file.read_exact(&mut begin)).is_ok() && begin == *MAGIC
    };
    !model.is_dir()
        && (model.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) || begins())
}

/// What tells a file, and that it has not changed: device, number, length and time of the last change.
type Identity = [i64; 5];

thread_local! {
    /// The head that was read last, with its vocabulary: configuration, tokenizer, settings and tensors are asked for one after the other.
    static LAST: RefCell<Option<(Identity, Rc<Content>)>> = const { RefCell::new(None) };
}

/// Returns the head of a file, read once for all that is asked of it.
fn content(path: &Path) -> Result<Rc<Content>> {
    let found = std::fs::metadata(path).map_err(Error::io("read", path))?;
    let identity =
        [found.dev() as i64, found.ino() as i64, found.len() as i64, found.mtime(), found.mtime_nsec()];
    let known = |(of, content): &(Identity, Rc<Content>)| {
        (*of == identity && content.path == path).then(|| content.clone())
    };
    if let Some(content) = LAST.with_borrow(|last| last.as_ref().and_then(known)) {
        return Ok(content);
    }
    let content = Rc::new(Content::open(path)?);
    LAST.set(Some((identity, content.clone())));
    Ok(content)
}

/// Returns what a file of the model's folder would have; `None` if the folder would not have it.
pub(crate) fn text_file(path: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let of = |read: fn(&Content) -> Result<Option<Vec<u8>>>| read(&*content(path)?);
    match name {
        "config.json" => Ok(Some(config::text(&*content(path)?)?)),
        tokenizer::FILE => {
            // Before its tokenizer, which is most often another one, too.
            config::check_architecture(&*content(path)?)?;
            of(vocabulary::tokenizer)
        }
        tokenizer::CONFIG => of(vocabulary::settings),
        "generation_config.json" => of(vocabulary::generation),
        _ => Ok(None),
    }
}

/// Returns the tensors of a file by the names of a model's parameters, which are of these shapes.
pub(crate) fn folder(
    path: &Path,
    config: &ModelConfig,
    shapes: &BTreeMap<String, Vec<usize>>,
) -> Result<Folder> {
    let content = content(path)?;
    let mut rest = content.tensors.clone();
    let mut all = BTreeMap::new();
    let mut used = Vec::new();
    for (name, dims) in shapes {
        let found = match of_expert(config, name) {
            Some((in_file, expert)) => {
                used.push(in_file.clone());
                rest.get(&in_file).and_then(|placed| one_of(placed, expert))
            }
            None => name_of(config, name).and_then(|in_file| {
                used.push(in_file.clone());
                rest.get(&in_file).cloned()
            }),
        };
        let Some(mut found) = found else { continue };
        // A vector may stand for a matrix of one row.
        if dims.iter().filter(|dim| **dim != 1).eq(found.dims.iter().filter(|dim| **dim != 1)) {
            found.dims.clone_from(dims);
        }
        all.insert(name.clone(), entry(found, rotated_heads(config, name)));
    }
    used.push("rope_freqs.weight".into());
    used.iter().for_each(|name| drop(rest.remove(name)));
    for (name, placed) in rest {
        // A head beside an embedding that it equals, or one that labels replace.
        let name = if name == "output.weight" { HEAD.into() } else { name };
        all.insert(name, entry(placed, None));
    }
    Ok(Folder::of_gguf(path, content.file.clone(), all))
}

fn entry(placed: Placed, rotated_heads: Option<usize>) -> Entry {
    let Placed { dims, stored, begin, bytes } = placed;
    Entry { file: 0, begin, bytes, stored, dims, rotated_heads }
}

/// Returns the matrix of one expert; `None` if the tensor has no such expert.
fn one_of(all: &Placed, expert: usize) -> Option<Placed> {
    let (count, dims) = all.dims.split_first()?;
    if dims.len() != 2 || expert >= *count {
        return None;
    }
    let bytes = all.bytes / *count as u64;
    Some(Placed { dims: dims.to_vec(), bytes, begin: all.begin + expert as u64 * bytes, ..all.clone() })
}

impl Content {
    /// Reads a tensor in f32.
    fn read(&self, name: &str) -> Result<Tensor> {
        let entries = self.tensors.get(name).map(|placed| (name.to_string(), entry(placed.clone(), None)));
        Folder::of_gguf(&self.path, self.file.clone(), entries.into_iter().collect()).read(name, DType::F32)
    }

    /// Whether the head is the embedding: there is none, or it has the embedding's bytes.
    fn is_tied(&self) -> Result<bool> {
        let (Some(head), Some(embedding)) =
            (self.tensors.get("output.weight"), self.tensors.get("token_embd.weight"))
        else {
            return Ok(true);
        };
        if head.dims != embedding.dims || head.stored != embedding.stored {
            return Ok(false);
        }
        let both = ["output.weight", "token_embd.weight"]
            .map(|name| (name.to_string(), entry(self.tensors[name].clone(), None)));
        Folder::of_gguf(&self.path, self.file.clone(), both.into())
            .have_same_bytes("output.weight", "token_embd.weight")
    }

    fn whole_numbers(&self, key: &str) -> Result<Option<&[i32]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::I32s(numbers)) => Ok(Some(numbers)),
            Some(other) => {
                Err(self.refuse(format!("{key} is {other}, and should be a list of whole numbers")))
            }
        }
    }

    fn numbers(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::F32s(numbers)) => Ok(Some(numbers)),
            Some(other) => Err(self.refuse(format!("{key} is {other}, and should be a list of numbers"))),
        }
    }
}
