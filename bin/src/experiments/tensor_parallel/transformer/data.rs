//! Rows of tokens: from a file, or counting up in steps.

use candle_core::{DType, Device, Tensor};
use sampler::Generator;

use crate::error::Result;
use crate::file_error::FileError;
use crate::weights::TensorFile;

use super::TensorParallelTransformerOptions;

/// Row i begins at `start[i]` and goes up by `stride[i]`, from 1 to 4, modulo the vocabulary: `start` is drawn first, then
/// `stride`.
pub(super) fn rows(
    options: &TensorParallelTransformerOptions,
    generator: &mut Generator,
) -> Result<Vec<Vec<u32>>> {
    if let Some(path) = &options.common.data {
        return read(&TensorFile::open(path)?, options);
    }
    let vocabulary = options.vocab_size as i64;
    let starts = generator.randint(options.samples, 0, vocabulary)?;
    let strides = generator.randint(options.samples, 1, 5)?;
    let row = |(start, stride): (i64, i64)| {
        (0..options.length as i64).map(|place| ((start + place * stride) % vocabulary) as u32).collect()
    };
    Ok(starts.into_iter().zip(strides).map(row).collect())
}

fn read(file: &TensorFile, options: &TensorParallelTransformerOptions) -> Result<Vec<Vec<u32>>> {
    let tokens = file.tensor("tokens", &[None, None], DType::I64, &Device::Cpu)?;
    file.only(&["tokens"])?;
    let refuse = |reason: String| Err(FileError::tensor(file.path(), "tokens", reason).into());
    let (rows, length) = tokens.dims2()?;
    if rows == 0 {
        return refuse("it has no rows; give at least 1".into());
    }
    if let Err(help) = options.check_length(length) {
        return refuse(format!("its rows have {length} tokens; {help}"));
    }
    let mut all = Vec::with_capacity(rows);
    for (number, row) in tokens.to_vec2::<i64>()?.into_iter().enumerate() {
        let known = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < options.vocab_size);
        if let Some(token) = row.iter().find(|token| !known(token)) {
            let vocabulary = options.vocab_size;
            return refuse(format!(
                "row {number} has token {token}; with --vocab-size {vocabulary} there are 0 to {}",
                vocabulary - 1
            ));
        }
        all.push(row.into_iter().map(|token| token as u32).collect());
    }
    Ok(all)
}

/// Tokens and the tokens after them, both (samples, length - 1).
pub(super) fn batch(rows: &[Vec<u32>], samples: &[usize]) -> Result<(Tensor, Tensor)> {
    let length = rows[samples[0]].len() - 1;
    let part = |start: usize| {
        let tokens = samples.iter().flat_map(|&row| &rows[row][start..start + length]).copied();
        Tensor::from_vec(tokens.collect::<Vec<u32>>(), (samples.len(), length), &Device::Cpu)
    };
    Ok((part(0)?, part(1)?))
}
