//! Weights in 4 or 8 bits as transformers saves them with bitsandbytes: a tensor of codes, and others of what widens them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use ops::nf4::{BLOCK, GROUP, Nf4Matrix};
use ops::quantized::{Format, Int8Matrix, QuantizedMatrix};
use safetensors::Dtype;
use serde::Deserialize;

use crate::entry::Entry;
use crate::gguf_file::Stored;
use crate::{Error, Result};

/// Reads bytes of a tensor by its name, from this one on.
pub(crate) type ReadBytes<'a> = dyn Fn(&str, u64, &mut [u8]) -> Result<()> + 'a;

/// Parts of the names of what widens 4 bits, appended to the weight's name; before the last one stands the quantization's name.
const ABSMAX: &str = "absmax";
const MAP: &str = "quant_map";
const NESTED_ABSMAX: &str = "nested_absmax";
const NESTED_MAP: &str = "nested_quant_map";
const STATE: &str = ".quant_state.bitsandbytes__";

/// Names of what widens 8 bits, in place of `weight`.
const ROWS: &str = "SCB";
const LAYOUT: &str = "weight_format";

/// How far the values that codes stand for may be from NF4's, and those of scales from the ones of double quantization.
const CLOSE: f32 = 1e-6;

/// The weights of files that are in few bits, and the tensors that they are widened with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Found {
    pub(crate) weights: BTreeMap<String, Weight>,
    pub(crate) others: BTreeSet<String>,
}

/// A weight in few bits.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    name: String,
    pub(crate) dims: Vec<usize>,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// A scale for each row.
    Int8,
    /// Blocks of numbers, which rows need not begin with, with a scale each.
    Bits4 { is_nf4: bool, values: [f32; 16], block: usize, double: Option<Double> },
}

/// Scales that are in 8 bits themselves.
#[derive(Debug, Clone)]
struct Double {
    values: Vec<f32>,
    group: usize,
    offset: f32,
}

/// What bitsandbytes says of a weight in 4 bits. `dtype` is that of the numbers before: they are widened to the dtype that is asked for.
#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Finds the weights of a folder that are in few bits.
///
/// # Errors
/// Tensors that are missing, or of other sizes than the weights need; types that are not known.
pub(crate) fn find(path: &Path, tensors: &BTreeMap<String, Entry>, read: &ReadBytes) -> Result<Found> {
    let mut found = Found::default();
    let finder = Finder { path, tensors, read };
    for (name, entry) in tensors {
        let in_4_bits = name.split_once(STATE);
        let in_8_bits = name.strip_suffix(ROWS).filter(|layer| layer.ends_with('.'));
        let weight = match (in_4_bits, in_8_bits) {
            (Some((weight, kind)), _) => finder.weight_4(weight, kind, name, entry)?,
            (None, Some(layer)) => finder.weight_8(layer)?,
            _ => continue,
        };
        found.others.extend(weight.others());
        found.weights.insert(weight.name.clone(), weight);
    }
    found.others.retain(|name| tensors.contains_key(name));
    Ok(found)
}

struct Finder<'a> {
    path: &'a Path,
    tensors: &'a BTreeMap<String, Entry>,
    read: &'a ReadBytes<'a>,
}

impl Finder<'_> {
    fn refuse<T>(&self, problem: String) -> Result<T> {
        Err(Error::Format { path: self.path.into(), problem })
    }

    /// Returns a tensor that a weight is widened with, of one of these types.
    fn part(&self, weight: &str, name: &str, types: &[Dtype]) -> Result<&Entry> {
        match self.tensors.get(name) {
            Some(entry) if types.iter().any(|dtype| entry.stored == Stored::Plain(*dtype)) => Ok(entry),
            Some(entry) => self.refuse(format!(
                "tensor {name} is of {}, and bitsandbytes widens {weight} with {}",
                entry.dtype_name(),
                types.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ")
            )),
            None => self.refuse(format!(
                "there is no tensor {name}, which {weight} in few bits is widened with: the folder is not whole"
            )),
        }
    }

    /// Checks that a tensor has so many numbers.
    fn count(&self, weight: &str, name: &str, entry: &Entry, expected: usize) -> Result<()> {
        let count = entry.dims.iter().product::<usize>();
        match count == expected {
            true => Ok(()),
            false => self.refuse(format!(
                "tensor {name} has {count} numbers, and {weight} in few bits is widened with {expected}"
            )),
        }
    }

    fn numbers(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let mut bytes = vec![0; count * size_of::<f32>()];
        (self.read)(name, 0, &mut bytes)?;
        floats(self.path, name, &bytes)
    }

    fn weight_4(&self, weight: &str, kind: &str, name: &str, entry: &Entry) -> Result<Weight> {
        if !matches!(kind, "nf4" | "fp4") {
            return self
                .refuse(format!("{weight} is of {kind}, which is not supported; supported are nf4 and fp4"));
        }
        let mut json = vec![0; entry.bytes() as usize];
        (self.read)(name, 0, &mut json)?;
        let state: State = match serde_json::from_slice(&json) {
            Ok(state) => state,
            Err(error) => {
                return self.refuse(format!("tensor {name} does not say how {weight} is quantized: {error}"));
            }
        };
        let (count, part) = (checked_count(&state.shape), |part: &str| format!("{weight}.{part}"));
        let is_sane = state.quant_type == kind && state.blocksize > 0 && state.nested_blocksize != Some(0);
        let Some(count) = count.filter(|_| is_sane) else {
            return self.refuse(format!("tensor {name} describes no weight of {kind}: {state:?}"));
        };
        let Some(codes) = self.tensors.get(weight) else {
            return self.refuse(format!(
                "there are scales of {weight}, and no such tensor: the folder is not whole"
            ));
        };
        if codes.bytes() != count.div_ceil(2) as u64 {
            let (bytes, shape) = (codes.bytes(), &state.shape);
            return self.refuse(format!(
                "tensor {weight} has {bytes} bytes, and should have {shape:?} numbers of 4 bits"
            ));
        }
        let map = part(MAP);
        self.count(weight, &map, self.part(weight, &map, &[Dtype::F32])?, 16)?;
        let mut values = [0.0; 16];
        values.copy_from_slice(&self.numbers(&map, 16)?);
        let (scales, absmax) = (count.div_ceil(state.blocksize), part(ABSMAX));
        let is_double = self.tensors.contains_key(&part(NESTED_ABSMAX)) || state.nested_blocksize.is_some();
        let dtype = if is_double { Dtype::U8 } else { Dtype::F32 };
        self.count(weight, &absmax, self.part(weight, &absmax, &[dtype])?, scales)?;
        let double = match (is_double, state.nested_blocksize, state.nested_offset) {
            (false, ..) => None,
            (true, Some(group), Some(offset)) => {
                let (nested, map) = (part(NESTED_ABSMAX), part(NESTED_MAP));
                let groups = scales.div_ceil(group);
                self.count(weight, &nested, self.part(weight, &nested, &[Dtype::F32])?, groups)?;
                self.count(weight, &map, self.part(weight, &map, &[Dtype::F32])?, 256)?;
                Some(Double { values: self.numbers(&map, 256)?, group, offset })
            }
            _ => {
                return self
                    .refuse(format!("tensor {name} does not say how the scales of {weight} are quantized"));
            }
        };
        let kind = Kind::Bits4 { is_nf4: kind == "nf4", values, block: state.blocksize, double };
        Ok(Weight { name: weight.into(), dims: state.shape, kind })
    }

    fn weight_8(&self, layer: &str) -> Result<Weight> {
        let (name, scales, layout) =
            (format!("{layer}weight"), format!("{layer}{ROWS}"), format!("{layer}{LAYOUT}"));
        let dims = self.part(&name, &name, &[Dtype::I8])?.dims.clone();
        if checked_count(&dims).is_none() {
            return self.refuse(format!("tensor {name} is of shape {dims:?}, and no matrix of 8 bits"));
        }
        self.count(
            &name,
            &scales,
            self.part(&name, &scales, &[Dtype::F32])?,
            dims.first().copied().unwrap_or(0),
        )?;
        if self.tensors.contains_key(&layout) {
            let mut order = [0];
            self.count(&name, &layout, self.part(&name, &layout, &[Dtype::U8])?, 1)?;
            (self.read)(&layout, 0, &mut order)?;
            if order != [0] {
                let [order] = order;
                return self.refuse(format!(
                    "{name} is in order {order} of bitsandbytes ({layout}); supported is 0, row by row"
                ));
            }
        }
        Ok(Weight { name, dims, kind: Kind::Int8 })
    }
}

/// Returns the number of numbers of a matrix; `None` if it is none, or empty.
fn checked_count(dims: &[usize]) -> Option<usize> {
    let count = dims.iter().try_fold(1usize, |count, size| count.checked_mul(*size))?;
    (dims.len() == 2 && count > 0).then_some(count)
}

/// Reads numbers of f32, which must be finite.
fn floats(path: &Path, name: &str, bytes: &[u8]) -> Result<Vec<f32>> {
    let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match numbers.iter().find(|number| !number.is_finite()) {
        None => Ok(numbers),
        Some(number) => {
            let problem = format!("tensor {name} has {number}: the file is damaged, or its training failed");
            Err(Error::Format { path: path.into(), problem })
        }
    }
}

impl Weight {
    /// Returns the name of its type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self.kind {
            Kind::Int8 => "int8",
            Kind::Bits4 { is_nf4: true, .. } => "nf4",
            Kind::Bits4 { .. } => "fp4",
        }
    }

    /// Returns the bits of a number.
    pub(crate) fn bits(&self) -> u8 {
        if matches!(self.kind, Kind::Int8) { 8 } else { 4 }
    }

    /// Returns the names of the tensors that it is widened with, if they are there.
    fn others(&self) -> Vec<String> {
        let layer = self.name.strip_suffix("weight").unwrap_or(&self.name);
        match &self.kind {
            Kind::Int8 => [ROWS, LAYOUT].map(|part| format!("{layer}{part}")).into(),
            Kind::Bits4 { .. } => {
                let mut all = [ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP]
                    .map(|part| format!("{}.{part}", self.name))
                    .to_vec();
                all.push(format!("{}{STATE}{}", self.name, self.type_name()));
                all
            }
        }
    }

    /// Returns the format in which layers compute with it; `None` if they do not: FP4, other blocks than of 64 numbers or such that cross
    /// rows, and other values than those of NF4.
    pub(crate) fn format(&self) -> Option<Format> {
        let Kind::Bits4 { is_nf4, values, block, double } = &self.kind else { return Some(Format::Int8) };
        let are_close =
            |ours: &[f32], theirs: &[f32]| ours.iter().zip(theirs).all(|(a, b)| (a - b).abs() <= CLOSE);
        let fits = *is_nf4
            && *block == BLOCK
            && self.dims[1].is_multiple_of(BLOCK)
            && are_close(&ops::nf4::values(), values)
            && double.as_ref().is_none_or(|double| {
                double.group == GROUP && are_close(&ops::nf4::scale_values(), &double.values)
            });
        let format = if double.is_some() { Format::Nf4 } else { Format::Nf4Wide };
        fits.then_some(format)
    }

    /// Reads the weight as layers compute with it, with the codes and scales that the file has. `None` if they do not.
    ///
    /// # Errors
    /// A file that cannot be read; scales that are not finite.
    pub(crate) fn matrix(&self, path: &Path, read: &ReadBytes) -> Result<Option<QuantizedMatrix>> {
        if self.format().is_none() {
            return Ok(None);
        }
        let (rows, columns) = (self.dims[0], self.dims[1]);
        Ok(Some(match &self.kind {
            Kind::Int8 => {
                let codes = self.bytes(read, &self.name, 0..rows * columns)?;
                QuantizedMatrix::Int8(Int8Matrix::from_codes(
                    columns,
                    codes,
                    self.floats(path, read, &self.scb(), 0..rows)?,
                )?)
            }
            Kind::Bits4 { double, .. } => {
                let (codes, scales) =
                    (self.bytes(read, &self.name, 0..rows * columns / 2)?, rows * columns / BLOCK);
                QuantizedMatrix::Nf4(match double {
                    None => {
                        let scales = self.floats(path, read, &self.part(ABSMAX), 0..scales)?;
                        Nf4Matrix::from_wide_scales(columns, &codes, scales)?
                    }
                    Some(double) => {
                        let scale_codes = self.bytes(read, &self.part(ABSMAX), 0..scales)?;
                        let groups =
                            self.floats(path, read, &self.part(NESTED_ABSMAX), 0..scales.div_ceil(GROUP))?;
                        Nf4Matrix::from_codes(columns, &codes, &scale_codes, groups, double.offset)?
                    }
                })
            }
        }))
    }

    /// Widens numbers of the matrix, row by row, in f32.
    ///
    /// # Errors
    /// A file that cannot be read; scales that are not finite.
    pub(crate) fn widen(&self, path: &Path, read: &ReadBytes, numbers: Range<usize>) -> Result<Vec<f32>> {
        if numbers.is_empty() {
            return Ok(Vec::new());
        }
        match &self.kind {
            Kind::Int8 => {
                let columns = self.dims[1];
                let rows = numbers.start / columns..numbers.end.div_ceil(columns);
                let scales = self.floats(path, read, &self.scb(), rows.clone())?;
                let codes = self.bytes(read, &self.name, rows.start * columns..rows.end * columns)?;
                let wide = Int8Matrix::from_codes(columns, codes, scales)?.widen()?.flatten_all()?;
                let first = numbers.start - rows.start * columns;
                Ok(wide.narrow(0, first, numbers.len())?.to_vec1()?)
            }
            Kind::Bits4 { values, block, double, .. } => {
                let blocks = numbers.start / block..numbers.end.div_ceil(*block);
                let scales = self.scales(path, read, double.as_ref(), blocks.clone())?;
                let bytes = numbers.start / 2..numbers.end.div_ceil(2);
                let codes = self.bytes(read, &self.name, bytes.clone())?;
                let number = |at: usize| {
                    let pair = codes[at / 2 - bytes.start];
                    let code = if at.is_multiple_of(2) { pair >> 4 } else { pair & 15 };
                    values[usize::from(code)] * scales[at / block - blocks.start]
                };
                Ok(numbers.map(number).collect())
            }
        }
    }

    /// Reads the scales of blocks of 4 bits.
    fn scales(
        &self,
        path: &Path,
        read: &ReadBytes,
        double: Option<&Double>,
        blocks: Range<usize>,
    ) -> Result<Vec<f32>> {
        let Some(Double { values, group, offset }) = double else {
            return self.floats(path, read, &self.part(ABSMAX), blocks);
        };
        let codes = self.bytes(read, &self.part(ABSMAX), blocks.clone())?;
        let of = blocks.start / group..blocks.end.div_ceil(*group);
        let groups = self.floats(path, read, &self.part(NESTED_ABSMAX), of.clone())?;
        let scale = |(block, code): (usize, &u8)| {
            values[usize::from(*code)] * groups[block / group - of.start] + offset
        };
        Ok(blocks.zip(&codes).map(scale).collect())
    }

    fn part(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }

    fn scb(&self) -> String {
        format!("{}{ROWS}", self.name.strip_suffix("weight").unwrap_or(&self.name))
    }

    fn bytes(&self, read: &ReadBytes, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        read(name, range.start as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn floats(&self, path: &Path, read: &ReadBytes, name: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let bytes = self.bytes(read, name, range.start * size_of::<f32>()..range.end * size_of::<f32>())?;
        floats(path, name, &bytes)
    }
}
