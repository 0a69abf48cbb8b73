//! Options of commands that run a model of a folder on one rank, or on several.

use std::sync::Arc;

use candle_core::{DType, Device};
use clap::Args;
use comm::{Communicator, Local, LocalConfig, TcpConfig};
use girandole::{Layout, ParallelConfig};

use crate::error::Result;
use crate::language::{layout_of, ranks_of};
use crate::options::{DeviceKind, RankOptions};
use crate::rank::Rank;
use crate::start::Start;

/// The layout, the ranks and their device.
#[derive(Debug, Clone, Args)]
pub(super) struct SpreadOptions {
    /// Layout of ranks, such as dp=2,tp=2 [default: copies]
    ///
    /// Sizes of the axes pp (pipeline stages), dp (copies), shard (FSDP) and tp (divided layers); an axis left out has size 1.
    #[arg(long, value_name = "AXES", help_heading = "Ranks")]
    mesh: Option<Layout>,
    /// How its ranks come together.
    #[command(flatten)]
    ranks: RankOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "cpu", help_heading = "Ranks")]
    device: DeviceKind,
}

impl SpreadOptions {
    fn ranks(&self) -> RankOptions {
        ranks_of(&self.ranks, self.mesh.as_ref())
    }

    /// What this process is.
    ///
    /// # Errors
    /// Those of [`Start::find`]; a device that is not there.
    pub(super) fn find(&self, command: &str) -> Result<Start> {
        let ranks = self.ranks();
        ranks.check_device(self.device)?;
        Start::find(&ranks, command, 1)
    }

    /// The layout of so many ranks.
    pub(super) fn layout(&self, world_size: usize) -> Result<Layout> {
        layout_of(self.mesh, world_size)
    }

    /// Where this process's tensors are.
    pub(super) fn device(&self) -> Result<Device> {
        self.ranks().device(self.device)
    }

    /// This process as a rank.
    pub(super) fn join(&self, config: &TcpConfig) -> Result<Rank> {
        Rank::join(self.ranks.backend, &self.device()?, config)
    }
}

/// A group of this process alone.
pub(super) fn alone() -> Result<Arc<dyn Communicator>> {
    Ok(Arc::new(Local::group(1, &LocalConfig::default())?.remove(0)))
}

/// How a model is built that only computes: nothing is trained, so that nothing is kept for backward.
pub(super) fn config(dtype: DType, device: Device) -> ParallelConfig {
    ParallelConfig { dtype, device, is_trained: Some(Arc::new(|_: &str| false)), ..ParallelConfig::default() }
}
