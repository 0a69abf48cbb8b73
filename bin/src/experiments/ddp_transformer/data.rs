//! Batches of a rank's rows.

use std::sync::Arc;

use candle_core::Device;
use sampler::DistributedSampler;

use crate::error::Result;
use crate::options::LoaderOptions;
use crate::tokens::{self, Batch, Row};
use crate::trainer::Loader;

pub(super) fn loader(
    rows: Arc<Vec<Row>>,
    sampler: DistributedSampler,
    batches: (usize, &Device),
    options: LoaderOptions,
) -> Result<Loader<Vec<Row>, Batch>> {
    options.loader(rows, sampler, batches, |rows, device| tokens::batch(&rows, device))
}
