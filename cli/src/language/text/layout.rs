//! Layout options of commands that run a trained model on one rank or several.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::options::{DeviceKind, PrecisionOption, RankOptions};
use crate::rank::Rank;
use crate::same_options::{agree, agree_on_options};
use crate::start::Start;
use candle_core::{DType, Device};
use clap::Args;
use comm::internal::Digest;
use comm::{Communicator, Local, LocalConfig, TcpConfig};
use girandole::settings::Setting;
use girandole::{Layout, ParallelConfig};

use crate::language::options::in_terms_of_mesh;
use crate::language::{layout_of, nothing_is_trained, ranks_of};

/// The layout, the ranks and their device.
#[derive(Debug, Clone, Args)]
pub(super) struct LayoutOptions {
    /// Layout of ranks, such as dp=2,tp=2 [default: copies]
    ///
    /// Sizes of the axes pp (pipeline stages), dp (copies), shard (FSDP), cp (rows divided by position), ep (divided
    /// experts) and tp (divided layers); an axis left out has size 1.
    #[arg(long, value_name = "AXES", help_heading = "Ranks")]
    mesh: Option<Layout>,
    /// How its ranks come together.
    #[command(flatten)]
    ranks: RankOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "cpu", help_heading = "Ranks")]
    device: DeviceKind,
}

impl LayoutOptions {
    fn ranks(&self) -> RankOptions {
        ranks_of(&self.ranks, self.mesh.as_ref())
    }

    /// Returns the value of `--grace`.
    pub(super) fn grace(&self) -> Option<Duration> {
        self.ranks.grace
    }

    /// Determines the role of this process, and says how products are computed if that is unusual.
    ///
    /// # Errors
    /// Those of [`Start::find`]; a device that does not exist.
    pub(super) fn find(&self, command: &str, products: PrecisionOption) -> Result<Start> {
        let ranks = self.ranks();
        ranks.check_device(self.device)?;
        let found = Start::find(&ranks, command, 1);
        let found = found.map_err(|error| in_terms_of_mesh(error, &self.ranks, self.mesh.as_ref()))?;
        if found.is_speaker() {
            products.note_products(self.device);
        }
        Ok(found)
    }

    /// Returns the layout for `world_size` ranks.
    pub(super) fn layout(&self, world_size: usize) -> Result<Layout> {
        let layout = layout_of(self.mesh, world_size)?;
        match layout.far {
            1 => Ok(layout),
            _ => Err(self.refuse(
                &layout,
                "far is for training: each of its groups would compute the same; leave it out",
            )),
        }
    }

    /// Returns the error about a layout, by the option that it comes from.
    pub(super) fn refuse(&self, layout: &Layout, help: &str) -> Error {
        match self.mesh {
            Some(_) => Error::Option { option: "--mesh", got: layout.to_string(), help: help.into() },
            None => {
                let help = format!("{help} (--mesh)");
                Error::Option { option: "--world-size", got: layout.ranks().to_string(), help }
            }
        }
    }

    /// Returns the device of this process's tensors.
    pub(super) fn device(&self) -> Result<Device> {
        self.ranks().device(self.device)
    }

    /// Joins the group as a rank, and checks that all ranks have the same options and the same text.
    pub(super) fn join(&self, config: &TcpConfig, text: &str) -> Result<Rank> {
        let rank = Rank::join(self.ranks.backend, &self.device()?, config)?;
        agree_on_options(&*rank.comm, &[], Vec::new)?;
        agree(&*rank.comm, &[Setting::new("a text of", text)])?;
        Ok(rank)
    }
}

/// Describes tokens so that ranks can compare them.
pub(super) fn describe(tokens: &[u32]) -> String {
    let digest = tokens.iter().fold(Digest::new(), |digest, token| digest.word(u64::from(*token)));
    format!("{} tokens ({:016x})", tokens.len(), digest.value())
}

/// Returns a group that consists of this process only.
pub(super) fn alone() -> Result<Arc<dyn Communicator>> {
    Ok(Arc::new(Local::group(1, &LocalConfig::default())?.remove(0)))
}

/// Returns a configuration for inference: no parameter is trained, so nothing is kept for backward.
pub(super) fn config(dtype: DType, device: Device) -> ParallelConfig {
    ParallelConfig { dtype, device, is_trained: nothing_is_trained(), ..ParallelConfig::default() }
}
