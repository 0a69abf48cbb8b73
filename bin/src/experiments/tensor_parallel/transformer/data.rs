//! Rows of tokens, read from a file or generated as arithmetic sequences.

use candle_core::Device;
use experiment::error::Result;
use models::tutorials::tokens::{self, Batch, Row};
use sampler::Generator;

use super::TensorParallelTransformerOptions;

/// Reads or generates the rows. A generated row i starts at `start[i]` and increases by `stride[i]`, 1 to 4, modulo
/// the vocabulary size; all of `start` is drawn first, then `stride`.
pub(super) fn rows(
    options: &TensorParallelTransformerOptions,
    generator: &mut Generator,
) -> Result<Vec<Row>> {
    if let Some(path) = &options.common.data {
        return Ok(tokens::read(path, options.vocab_size, options.max_len)?);
    }
    let vocabulary = options.vocab_size as i64;
    let starts = generator.randint(options.samples, 0, vocabulary)?;
    let strides = generator.randint(options.samples, 1, 5)?;
    let row = |(start, stride): (i64, i64)| {
        (0..options.length as i64).map(|place| ((start + place * stride) % vocabulary) as u32).collect()
    };
    Ok(starts.into_iter().zip(strides).map(row).collect())
}

/// Returns the samples with these indices as a batch.
pub(super) fn batch(rows: &[Row], samples: &[usize], device: &Device) -> Result<Batch> {
    let rows: Vec<&Row> = samples.iter().map(|&sample| &rows[sample]).collect();
    Ok(tokens::batch(&rows, device)?)
}
