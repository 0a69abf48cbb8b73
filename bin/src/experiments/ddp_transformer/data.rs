//! Batches of a rank's rows.

use std::sync::Arc;

use candle_core::Device;
use sampler::{BoxError, DataLoader, DataLoaderConfig, DistributedSampler};

use crate::error::Result;
use crate::tokens::{self, Batch, Row};
use crate::trainer::Loader;

pub(super) fn loader(
    rows: Arc<Vec<Row>>,
    sampler: DistributedSampler,
    batch_size: usize,
    device: &Device,
) -> Result<Loader<Vec<Row>, Batch>> {
    let device = device.clone();
    let collate =
        move |rows: Vec<Row>| -> std::result::Result<Batch, BoxError> { Ok(tokens::batch(&rows, &device)?) };
    let config = DataLoaderConfig { batch_size, ..DataLoaderConfig::default() };
    Ok(DataLoader::new(rows, sampler, collate, config)?)
}
