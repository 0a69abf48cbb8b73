//! Mesh options: `--tp`, `--dp` and `--sequence-parallel`.

use std::sync::Arc;

use clap::Args;
use cli::error::{Result, refuse};
use cli::options::count;
use comm::{Communicator, Mesh};
use report::fact;

/// How ranks are laid out.
#[derive(Debug, Clone, Args)]
pub struct MeshOptions {
    /// Ranks that share each layer [default: all]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Ranks")]
    pub tp: Option<usize>,
    /// Copies of the divided model [default: as many as the ranks allow]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Ranks")]
    pub dp: Option<usize>,
    /// Also divide each sequence over the ranks between the divided layers
    #[arg(long, help_heading = "Ranks")]
    pub sequence_parallel: bool,
}

impl MeshOptions {
    /// Returns the number of ranks that the options require; `None` if they leave it open.
    pub fn ranks(&self) -> Option<usize> {
        match (self.tp, self.dp) {
            (Some(tp), dp) => Some(tp.saturating_mul(dp.unwrap_or(1))),
            (None, Some(dp)) if dp > 2 => Some(dp),
            (None, _) => None,
        }
    }

    /// Returns the numbers of data-parallel and of tensor-parallel ranks.
    ///
    /// # Errors
    /// Numbers whose product is not the world size.
    pub fn sizes(&self, world_size: usize) -> Result<(usize, usize)> {
        let ranks = if world_size == 1 { "1 rank".to_string() } else { format!("{world_size} ranks") };
        match (self.dp, self.tp) {
            (Some(dp), Some(tp)) if dp.checked_mul(tp) == Some(world_size) => Ok((dp, tp)),
            (Some(dp), Some(tp)) => {
                refuse("--tp", tp, format!("with --dp {dp} that is not {ranks} (--world-size)"))
            }
            (None, Some(tp)) if world_size.is_multiple_of(tp) => Ok((world_size / tp, tp)),
            (None, Some(tp)) => refuse("--tp", tp, format!("it does not divide {ranks} (--world-size)")),
            (Some(dp), None) if world_size.is_multiple_of(dp) => Ok((dp, world_size / dp)),
            (Some(dp), None) => refuse("--dp", dp, format!("it does not divide {ranks} (--world-size)")),
            (None, None) => Ok((1, world_size)),
        }
    }

    /// Returns the number of data-parallel ranks. Only these affect a run's results: dividing the layers over another
    /// number of ranks gives the same numbers, except for rounding.
    pub fn copies(&self, world_size: usize) -> usize {
        self.sizes(world_size).map_or(world_size, |(dp, _)| dp)
    }

    /// Checks that the tensor-parallel ranks divide a size.
    ///
    /// # Errors
    /// The option, if they do not.
    pub fn divides(option: &'static str, size: usize, tp: usize) -> Result<()> {
        if size.is_multiple_of(tp) {
            return Ok(());
        }
        let help = format!("it is divided over {tp} tensor-parallel ranks (--tp): give a multiple of that");
        refuse(option, size, help)
    }

    /// Returns the facts about the mesh for a report.
    pub fn facts(&self, world_size: usize) -> Vec<(String, String)> {
        let (dp, tp) = self.sizes(world_size).unwrap_or((1, world_size));
        vec![
            fact("tensor-parallel ranks", tp),
            fact("data-parallel ranks", dp),
            fact("sequence parallelism", if self.sequence_parallel { "yes" } else { "no" }),
        ]
    }
}

/// Creates the mesh of these sizes.
pub(super) fn mesh(comm: &Arc<dyn Communicator>, (dp, tp): (usize, usize)) -> Result<Mesh> {
    Ok(Mesh::new(comm.clone(), &[("dp", dp), ("tp", tp)])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_size_is_what_is_left() {
        let options = |dp, tp| MeshOptions { tp, dp, sequence_parallel: false };
        assert_eq!(options(None, None).sizes(4).unwrap(), (1, 4));
        assert_eq!(options(Some(2), None).sizes(4).unwrap(), (2, 2));
        assert_eq!(options(None, Some(4)).sizes(4).unwrap(), (1, 4));
        assert_eq!((options(None, Some(4)).ranks(), options(Some(2), Some(4)).ranks()), (Some(4), Some(8)));
        for (dp, tp) in [(Some(3), None), (None, Some(3)), (Some(2), Some(4)), (Some(usize::MAX), Some(2))] {
            let line = options(dp, tp).sizes(4).unwrap_err().to_string();
            assert!(line.contains("4 ranks (--world-size)"), "{line}");
        }
    }
}
