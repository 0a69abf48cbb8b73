//! The head of a GGUF file: metadata, and where each tensor is.

use std::fmt;

use super::dtype::GgufType;

pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Tensors begin at multiples of this.
pub(crate) const ALIGNMENT: usize = 32;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Strings(Vec<String>),
    /// One that is read, of a type that no model here has.
    Other,
}

/// What an error shows of it.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U32(number) => write!(f, "{number}"),
            Self::F32(number) => write!(f, "{number}"),
            Self::Bool(is_set) => write!(f, "{is_set}"),
            Self::String(text) => write!(f, "{:?}", text.chars().take(40).collect::<String>()),
            Self::I32s(numbers) if numbers.len() <= 8 => write!(f, "{numbers:?}"),
            Self::I32s(_) | Self::F32s(_) | Self::Strings(_) => f.write_str("a list"),
            Self::Other => f.write_str("of another type"),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.into())
    }
}

impl From<usize> for Value {
    /// Sizes of models and ids of tokens are far below the maximum.
    fn from(number: usize) -> Self {
        Self::U32(u32::try_from(number).unwrap_or(u32::MAX))
    }
}

/// Numbers of the types of values in a file.
pub(crate) mod kind {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const I16: u32 = 3;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const I64: u32 = 11;
    pub(crate) const F64: u32 = 12;
}

/// A tensor of a file.
#[derive(Debug)]
pub(crate) struct Info<'a> {
    pub(crate) name: &'a str,
    /// In candle's order, the outermost first.
    pub(crate) dims: &'a [usize],
    pub(crate) dtype: GgufType,
}

/// Returns the head of a file, filled up to where the first tensor begins.
pub(crate) fn bytes(metadata: &[(String, Value)], tensors: &[Info<'_>]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut out, key);
        put(&mut out, value);
    }
    let mut offset = 0u64;
    for Info { name, dims, dtype } in tensors {
        string(&mut out, name);
        out.extend((dims.len() as u32).to_le_bytes());
        // In a file the innermost dimension is first.
        dims.iter().rev().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        out.extend(dtype.number().to_le_bytes());
        out.extend(offset.to_le_bytes());
        let bytes = dtype.bytes(dims.iter().product());
        offset += (bytes + padding(bytes)) as u64;
    }
    out.resize(out.len() + padding(out.len()), 0);
    out
}

/// Returns the number of bytes up to the next multiple of the alignment.
pub(crate) fn padding(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT) - bytes
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &Value) {
    let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
        out.extend(kind::ARRAY.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Value::U32(number) => out.extend([kind::U32.to_le_bytes(), number.to_le_bytes()].concat()),
        Value::F32(number) => out.extend([kind::F32.to_le_bytes(), number.to_le_bytes()].concat()),
        Value::Bool(is_set) => {
            out.extend(kind::BOOL.to_le_bytes());
            out.push(u8::from(*is_set));
        }
        Value::String(text) => {
            out.extend(kind::STRING.to_le_bytes());
            string(out, text);
        }
        Value::I32s(numbers) => {
            array(out, kind::I32, numbers.len());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Value::F32s(numbers) => {
            array(out, kind::F32, numbers.len());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Value::Strings(texts) => {
            array(out, kind::STRING, texts.len());
            texts.iter().for_each(|text| string(out, text));
        }
        // Only read.
        Value::Other => {}
    }
}
