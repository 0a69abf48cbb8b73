//! The second half of document 002: data-parallel ranks.

use std::path::Path;
use std::sync::Arc;

use candle_nn::{Module, Optimizer, loss};
use comm::{Communicator, TcpConfig, all_gather_object};
use ddp::{Ddp, DdpConfig};
use sampler::{DistributedSampler, DistributedSamplerConfig};
use serde::{Deserialize, Serialize};
use training::{Sgd, SgdConfig};

use crate::console::say;
use crate::error::Result;
use crate::file_error::FileError;
use crate::metrics::MetricsWriter;
use crate::models::linear::SimpleModel;
use crate::report::peak_rss_bytes;
use crate::start;
use crate::trace::{self, TraceRecorder};
use crate::weights::save_weights;

use super::data::Setup;
use super::options::DdpLinearOptions;
use super::training::{Log, train};

/// What rank 0 knows in the end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DdpResult {
    pub(super) seconds: f64,
    pub(super) steps_per_epoch: usize,
    pub(super) losses: Vec<f32>,
    /// By rank.
    pub(super) ranks: Vec<RankSummary>,
}

/// What each rank tells of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankSummary {
    pub(super) seconds: f64,
    /// In collectives.
    pub(super) communication_s: f64,
    pub(super) peak_rss_bytes: Option<u64>,
}

/// Trains as one rank.
pub(super) fn run(
    options: &DdpLinearOptions,
    config: &TcpConfig,
    metrics: Option<&mut MetricsWriter>,
    recorder: Option<TraceRecorder>,
) -> Result<DdpResult> {
    let comm = start::join(config)?;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let setup = Setup::new(options)?;
    let sampler = DistributedSampler::new(DistributedSamplerConfig {
        dataset_len: setup.len(),
        num_replicas: world_size,
        rank,
        ..DistributedSamplerConfig::default()
    })?;
    let mut loader = setup.loader(Box::new(sampler), options.rank_batch_size(world_size))?;
    let ddp = Ddp::new(comm.clone(), setup.builder(), &DdpConfig::default(), SimpleModel::new)?;
    let lr = options.ddp_lr(world_size);
    let mut optimizer = Sgd::new(ddp.vars(), SgdConfig { learning_rate: lr, ..SgdConfig::default() })?;

    let mut log = Log::new("ddp", rank == 0, metrics);
    let before = comm.stats().busy_ns;
    let seconds = train(&mut loader, options.epochs, &mut log, |(x, y)| {
        let loss = loss::mse(&ddp.model()?.forward(x)?, y)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        Ok(loss)
    })?;
    let communication_s = (comm.stats().busy_ns - before) as f64 * 1e-9;

    let own = RankSummary { seconds, communication_s, peak_rss_bytes: peak_rss_bytes() };
    let ranks = all_gather_object(&*comm, &own)?;
    if rank == 0 {
        let peaks: Vec<u64> = ranks.iter().filter_map(|rank| rank.peak_rss_bytes).collect();
        log.summary(seconds, world_size, &peaks)?;
        say(format_args!("DDP training done, total time: {seconds:.2} s"))?;
        let (weight, bias) = setup.parameters()?;
        say(format_args!("linear.weight: {weight:.4}\nlinear.bias: {bias:.4}"))?;
        if let Some(path) = &options.common.save {
            save_weights(path, &setup.vars)?;
        }
    }
    if let (Some(recorder), Some(path)) = (recorder, &options.common.trace) {
        write_trace(&comm, recorder, path)?;
    }
    Ok(DdpResult { seconds, steps_per_epoch: loader.len(), losses: log.losses, ranks })
}

/// Brings the traces of all ranks together in one file.
fn write_trace(comm: &Arc<dyn Communicator>, recorder: TraceRecorder, path: &Path) -> Result<()> {
    let host = start::host_name();
    let traces = all_gather_object(&**comm, &recorder.finish(comm.rank(), &host))?;
    if comm.rank() == 0 {
        std::fs::write(path, trace::merge(&traces)?).map_err(|error| FileError::write(path, error))?;
    }
    Ok(())
}
