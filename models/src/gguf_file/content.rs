//! Reader of the head of a GGUF file: metadata, and where each tensor is.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::dtype::{Stored, stored};
use super::header::{ALIGNMENT, MAGIC, Value, kind};
use crate::{Error, Result};

/// Most bytes of a text: those of a vocabulary's JSON are far fewer.
const MOST_TEXT: u64 = 1 << 28;
/// Most bytes of a name.
const LONGEST_NAME: usize = 256;
/// Most items of a list: those of vocabularies are far fewer.
const MOST_ITEMS: u64 = 1 << 24;
/// Most values of metadata, and most tensors.
const MOST_ENTRIES: u64 = 1 << 20;
/// Most dimensions of a tensor.
const MOST_DIMS: u32 = 4;
/// Most lists within lists.
const DEEPEST: usize = 4;

/// A file whose head has been read.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<File>,
    pub(crate) tensors: BTreeMap<String, Placed>,
    metadata: BTreeMap<String, Value>,
    /// Keys that have been asked for.
    asked: RefCell<BTreeSet<String>>,
}

/// A tensor, and its place in the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Placed {
    /// The outermost first.
    pub(crate) dims: Vec<usize>,
    pub(crate) stored: Stored,
    pub(crate) begin: u64,
    pub(crate) bytes: u64,
}

impl Content {
    /// Reads the head of a file, and checks that all tensors are within it.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = training::internal::open_input(path).map_err(Error::io("read", path))?;
        let left = file.metadata().map_err(Error::io("read", path))?.len();
        let mut head = Head { path, whole: left, left, file: BufReader::new(file) };
        head.check_version()?;
        let [tensors, values] = [head.count(MOST_ENTRIES, "tensors")?, head.count(MOST_ENTRIES, "values")?];
        let mut metadata = BTreeMap::new();
        for _ in 0..values {
            let (key, kind) = (head.name()?, head.u32()?);
            let value = head.value(&key, kind)?;
            metadata.insert(key, value);
        }
        let mut placed = BTreeMap::new();
        for _ in 0..tensors {
            let (name, tensor) = head.tensor()?;
            if placed.insert(name.clone(), tensor).is_some() {
                return Err(head.refuse(format!("it has two tensors {name}")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT as u64,
            Some(Value::U32(bytes)) if bytes.is_power_of_two() && *bytes <= 1 << 20 => (*bytes).into(),
            Some(other) => return Err(head.refuse(format!("general.alignment is {other:?}"))),
        };
        let data = (head.whole - head.left).next_multiple_of(alignment);
        for (name, tensor) in &mut placed {
            let end = tensor.begin.checked_add(data).and_then(|begin| begin.checked_add(tensor.bytes));
            if end.is_none_or(|end| end > head.whole) {
                let whole = head.whole;
                return Err(head.refuse(format!(
                    "it is not whole: it has {whole} bytes, and its tensor {name} is beyond them; copy or download it again"
                )));
            }
            tensor.begin += data;
        }
        let file = Arc::new(head.file.into_inner());
        Ok(Self { path: path.into(), file, tensors: placed, metadata, asked: RefCell::default() })
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key.into());
        self.metadata.get(key)
    }

    pub(crate) fn refuse(&self, problem: String) -> Error {
        Error::Format { path: self.path.clone(), problem }
    }

    fn other(&self, key: &str, found: &Value, expected: &str) -> Error {
        self.refuse(format!("{key} is {found}, and should be {expected}"))
    }

    /// Returns a value that `of` accepts; `None` if there is none.
    fn of<T>(&self, key: &str, expected: &str, of: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        of(value).map(Some).ok_or_else(|| self.other(key, value, expected))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.other(key, other, "a text")),
        }
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Strings(texts)) => Ok(Some(texts)),
            Some(other) => Err(self.other(key, other, "a list of texts")),
        }
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.of(key, "true or false", |value| match value {
            Value::Bool(is_set) => Some(*is_set),
            _ => None,
        })
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>> {
        self.of(key, "a whole number", |value| match value {
            Value::U32(size) => Some(*size as usize),
            _ => None,
        })
    }

    /// Returns a number with the fewest decimals that stand for it: what was written in a configuration.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.of(key, "a number", |value| match value {
            Value::F32(number) if number.is_finite() => number.to_string().parse().ok(),
            Value::U32(number) => Some((*number).into()),
            _ => None,
        })
    }

    /// Returns the first key of these that nobody asked for, with its value, unless that is 0, false or empty.
    pub(crate) fn unasked(&self, prefix: &str) -> Option<(&str, &Value)> {
        let asked = self.asked.borrow();
        let is_nothing = |value: &Value| match value {
            Value::U32(number) => *number == 0,
            Value::F32(number) => *number == 0.0,
            Value::Bool(is_set) => !is_set,
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        let mut own = self.metadata.iter().filter(|(key, _)| key.starts_with(prefix));
        own.find(|(key, value)| !asked.contains(*key) && !is_nothing(value))
            .map(|(key, value)| (&**key, value))
    }
}

/// A head that is being read.
struct Head<'a> {
    path: &'a Path,
    whole: u64,
    /// Bytes that have not been read yet.
    left: u64,
    file: BufReader<File>,
}

impl Head<'_> {
    fn refuse(&self, problem: String) -> Error {
        Error::Format { path: self.path.into(), problem }
    }

    fn cut(&self) -> Error {
        let whole = self.whole;
        self.refuse(format!(
            "it is not whole: its {whole} bytes end within its head; copy or download it again"
        ))
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>> {
        self.left = self.left.checked_sub(count).ok_or_else(|| self.cut())?;
        let mut bytes = vec![0; count as usize];
        self.file.read_exact(&mut bytes).map_err(Error::io("read", self.path))?;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(&self.bytes(N as u64)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, most: u64, of: &str) -> Result<u64> {
        match self.u64()? {
            count if count > self.left => Err(self.cut()),
            count if count > most => Err(self.refuse(format!("it says that it has {count} {of}"))),
            count => Ok(count),
        }
    }

    fn text(&mut self) -> Result<String> {
        let len = self.count(MOST_TEXT, "bytes of a text")?;
        Ok(String::from_utf8_lossy(&self.bytes(len)?).into_owned())
    }

    /// Reads the name of a value or of a tensor.
    fn name(&mut self) -> Result<String> {
        match self.text()? {
            name if name.len() <= LONGEST_NAME && !name.contains(char::is_control) => Ok(name),
            _ => Err(self.refuse(
                "a name in its head is no name: the file is damaged; copy or download it again".into(),
            )),
        }
    }

    fn check_version(&mut self) -> Result<()> {
        if self.left < 8 || self.array()? != *MAGIC {
            return Err(self.refuse("it is no GGUF file: it does not begin with GGUF".into()));
        }
        match self.u32()? {
            2 | 3 => Ok(()),
            version if version.swap_bytes() <= 3 => {
                Err(self.refuse("its numbers are big-endian; supported are little-endian ones".into()))
            }
            version => {
                let problem = format!(
                    "it is of version {version} of GGUF; supported are 2 and 3: convert the model again"
                );
                Err(self.refuse(problem))
            }
        }
    }

    fn value(&mut self, key: &str, found: u32) -> Result<Value> {
        if found == kind::ARRAY {
            let (of, count) = (self.u32()?, self.count(MOST_ITEMS, "items of a list")?);
            return self.list(key, of, count, 0);
        }
        self.item(key, found)
    }

    fn item(&mut self, key: &str, found: u32) -> Result<Value> {
        let whole = |number: i128| match u32::try_from(number) {
            Ok(number) => Value::U32(number),
            Err(_) => Value::Other,
        };
        Ok(match found {
            kind::U8 => whole(u8::from_le_bytes(self.array()?).into()),
            kind::I8 => whole(i8::from_le_bytes(self.array()?).into()),
            kind::U16 => whole(u16::from_le_bytes(self.array()?).into()),
            kind::I16 => whole(i16::from_le_bytes(self.array()?).into()),
            kind::U32 => whole(self.u32()?.into()),
            kind::I32 => whole(i32::from_le_bytes(self.array()?).into()),
            kind::U64 => whole(self.u64()?.into()),
            kind::I64 => whole(i64::from_le_bytes(self.array()?).into()),
            kind::F32 => Value::F32(f32::from_le_bytes(self.array()?)),
            kind::F64 => Value::F32(f64::from_le_bytes(self.array()?) as f32),
            kind::BOOL => Value::Bool(self.array::<1>()? != [0]),
            kind::STRING => Value::String(self.text()?),
            other => return Err(self.refuse(format!("{key} is of type {other}, which GGUF does not have"))),
        })
    }

    /// Reads a list; one of another type than those of a model's metadata is passed over.
    fn list(&mut self, key: &str, of: u32, count: u64, depth: usize) -> Result<Value> {
        match of {
            kind::ARRAY if depth == DEEPEST => Err(self.refuse(format!("{key} has lists within lists"))),
            kind::ARRAY => {
                for _ in 0..count {
                    let (of, count) = (self.u32()?, self.count(MOST_ITEMS, "items of a list")?);
                    self.list(key, of, count, depth + 1)?;
                }
                Ok(Value::Other)
            }
            kind::STRING => Ok(Value::Strings((0..count).map(|_| self.text()).collect::<Result<_>>()?)),
            kind::F32 => {
                let one = |_| Ok(f32::from_le_bytes(self.array()?));
                Ok(Value::F32s((0..count).map(one).collect::<Result<_>>()?))
            }
            _ => {
                let mut all = Some(Vec::new());
                for _ in 0..count {
                    let item = match self.item(key, of)? {
                        Value::U32(number) => i32::try_from(number).ok(),
                        _ => None,
                    };
                    all = all.zip(item).map(|(mut all, item)| {
                        all.push(item);
                        all
                    });
                }
                Ok(all.map_or(Value::Other, Value::I32s))
            }
        }
    }

    /// Reads where a tensor is, from the beginning of all tensors.
    fn tensor(&mut self) -> Result<(String, Placed)> {
        let (name, count) = (self.name()?, self.u32()?);
        if count > MOST_DIMS {
            return Err(self.refuse(format!("tensor {name} has {count} dimensions")));
        }
        let mut dims = Vec::new();
        for _ in 0..count {
            dims.push(self.u64()? as usize);
        }
        // In a file the innermost dimension is first.
        dims.reverse();
        let (stored, begin) = (stored(self.u32()?), self.u64()?);
        let elements = dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
        let bytes = elements.and_then(|elements| stored.bytes(elements, dims.last().copied()));
        match bytes {
            Some(bytes) => Ok((name, Placed { dims, stored, begin, bytes })),
            None => Err(self.refuse(format!("tensor {name} of {stored} cannot be of shape {dims:?}"))),
        }
    }
}
