//! Rows of tokens, as the tutorials of Transformers train on: one token repeated, or a sequence to be continued.

use std::borrow::Borrow;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use sampler::{Generator, SamplerError};
use training::{FileError, TensorFile};

/// A row of tokens.
pub type Row = Vec<u32>;

/// Inputs and targets (the tokens that follow them), both of shape (rows, length - 1).
pub type Batch = (Tensor, Tensor);

/// Returns rows of `length` tokens each: row i is token i, repeated.
///
/// # Errors
/// More rows than there is memory for.
pub fn repeated(samples: usize, length: usize) -> Result<Vec<Row>, SamplerError> {
    let mut rows = Vec::new();
    let too_many = |_| SamplerError::OutOfMemory { what: "rows of tokens", len: samples };
    rows.try_reserve_exact(samples).map_err(too_many)?;
    for token in 0..samples {
        let mut row = Vec::new();
        row.try_reserve_exact(length).map_err(too_many)?;
        row.resize(length, token as u32);
        rows.push(row);
    }
    Ok(rows)
}

/// Generates rows of `length` tokens each: row i starts at `start[i]` and increases by `stride[i]`, 1 to 4, modulo the
/// vocabulary size; all of `start` is drawn first, then `stride`.
///
/// # Errors
/// More rows than there is memory for.
pub fn sequences(
    generator: &mut Generator,
    samples: usize,
    length: usize,
    vocab_size: usize,
) -> Result<Vec<Row>, SamplerError> {
    let vocabulary = vocab_size as i64;
    let starts = generator.randint(samples, 0, vocabulary)?;
    let strides = generator.randint(samples, 1, 5)?;
    let row = |(start, stride): (i64, i64)| {
        (0..length as i64).map(|place| ((start + place * stride) % vocabulary) as u32).collect()
    };
    Ok(starts.into_iter().zip(strides).map(row).collect())
}

/// Checks the length of rows for a model that takes up to `max_len` tokens.
///
/// # Errors
/// What is wrong and what to do.
pub fn check_length(length: usize, max_len: usize) -> Result<(), String> {
    match length {
        0 | 1 => Err("the next token is predicted from those before it: a row needs 2 or more".into()),
        _ if length - 1 > max_len => {
            let most = max_len.saturating_add(1);
            Err(format!("the model takes rows of up to {most} tokens with --max-len {max_len}"))
        }
        _ => Ok(()),
    }
}

/// Reads rows from a file: i64 tokens of shape (rows, length), below the vocabulary size, of an allowed length.
///
/// # Errors
/// A file that cannot be read or does not fit.
pub fn read(path: &Path, vocab_size: usize, max_len: usize) -> Result<Vec<Row>, FileError> {
    let file = TensorFile::open(path)?;
    let tokens = file.tensor("tokens", &[None, None], DType::I64, &Device::Cpu)?;
    file.only(&["tokens"])?;
    let refuse = |reason: String| Err(FileError::tensor(file.path(), "tokens", reason));
    let unreadable = |error| FileError::read(path, error);
    let (rows, length) = tokens.dims2().map_err(unreadable)?;
    if rows == 0 {
        return refuse("it has no rows; give at least 1".into());
    }
    if let Err(help) = check_length(length, max_len) {
        return refuse(format!("its rows have {length} tokens; {help}"));
    }
    let mut all = Vec::with_capacity(rows);
    for (number, row) in tokens.to_vec2::<i64>().map_err(unreadable)?.into_iter().enumerate() {
        let known = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
        if let Some(token) = row.iter().find(|token| !known(token)) {
            return refuse(format!(
                "row {number} has token {token}; with --vocab-size {vocab_size} there are 0 to {}",
                vocab_size - 1
            ));
        }
        all.push(row.into_iter().map(|token| token as u32).collect());
    }
    Ok(all)
}

/// Returns rows as a batch on a device. There must be at least one row, and all must have the same length.
///
/// # Errors
/// None known.
pub fn batch<R: Borrow<Row>>(rows: &[R], device: &Device) -> candle_core::Result<Batch> {
    let length = rows[0].borrow().len() - 1;
    let part = |start: usize| {
        let tokens = rows.iter().flat_map(|row| &row.borrow()[start..start + length]).copied();
        Tensor::from_vec(tokens.collect::<Vec<u32>>(), (rows.len(), length), device)
    };
    Ok((part(0)?, part(1)?))
}
