//! The option `--mesh`, and the number of ranks that it implies.

use crate::error::{Error, Result};
use crate::options::RankOptions;
use girandole::Layout;

/// Returns the ranks' options, with the layout's number of ranks unless the options or the environment give another.
pub(crate) fn ranks_of(ranks: &RankOptions, mesh: Option<&Layout>) -> RankOptions {
    let mut ranks = ranks.clone();
    let is_bare = std::env::var_os("WORLD_SIZE").is_none_or(|value| value.is_empty());
    if let (Some(layout), None, true) = (mesh, ranks.world_size, is_bare) {
        ranks.world_size = Some(layout.ranks());
    }
    ranks
}

/// Returns the error about a number of ranks that [`ranks_of`] took from the layout as one about `--mesh`.
pub(crate) fn in_terms_of_mesh(error: Error, ranks: &RankOptions, mesh: Option<&Layout>) -> Error {
    match (error, mesh) {
        (Error::Option { option: "--world-size", help, .. }, Some(layout)) if ranks.world_size.is_none() => {
            Error::Option { option: "--mesh", got: layout.to_string(), help }
        }
        (error, _) => error,
    }
}

/// Returns the layout of `--mesh`, or else pure data parallelism, for `world_size` ranks.
pub(crate) fn layout_of(mesh: Option<Layout>, world_size: usize) -> Result<Layout> {
    let layout = mesh.unwrap_or_else(|| Layout::copies(world_size));
    layout.check(world_size).map_err(|error| match error {
        girandole::Error::Invalid { got, help, .. } => Error::Option { option: "--mesh", got, help },
        other => other.into(),
    })?;
    Ok(layout)
}
