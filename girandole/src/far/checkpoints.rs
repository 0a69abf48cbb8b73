//! Checkpoints of a layout with `far`: groups that train on their own have a folder each.

use std::path::{Path, PathBuf};

use training::{CheckpointConfig, Checkpoints, Contents};

use crate::Result;

/// The folder of a group's checkpoints: the given one for the first, and one in it for each other.
pub(crate) fn folder(dir: &Path, group: usize) -> PathBuf {
    if group == 0 { dir.into() } else { dir.join(format!("far-{group}")) }
}

/// Returns the latest checkpoint of which every one of `groups` groups has written its own, in a folder of checkpoints. A group that has
/// written none can go on from any; if no checkpoint will do for all, it is the latest of the first group.
///
/// # Errors
/// A folder that cannot be read; a latest checkpoint whose manifest is damaged.
pub fn latest(checkpoints: &Checkpoints, groups: usize) -> training::Result<Option<Contents>> {
    let Some(latest) = checkpoints.latest()? else { return Ok(None) };
    let Some(dir) = latest.folder.parent() else { return Ok(Some(latest)) };
    let others = (1..groups).map(|group| steps(&folder(dir, group)));
    let others: Vec<Vec<u64>> = others.collect::<training::Result<_>>()?;
    let is_of_all =
        |contents: &Contents| others.iter().all(|steps| steps.is_empty() || steps.contains(&contents.step));
    if is_of_all(&latest) {
        return Ok(Some(latest));
    }
    let all = checkpoints.list()?.into_iter().rev();
    let found = all.filter_map(|folder| checkpoints.contents(&folder).ok()).find(is_of_all);
    Ok(Some(found.unwrap_or(latest)))
}

/// Returns the checkpoint that a group has written at the same step as the first one has; `None` if it has none, or is the first.
pub(crate) fn own(of_first: &Contents, group: usize) -> Result<Option<Contents>> {
    let dir = of_first.folder.parent().filter(|_| group > 0).map(|dir| folder(dir, group));
    let Some(checkpoints) = dir.map_or(Ok(None), |dir| opened(&dir))? else { return Ok(None) };
    for folder in checkpoints.list()?.into_iter().rev() {
        let contents = checkpoints.contents(&folder)?;
        if contents.step == of_first.step {
            return Ok(Some(contents));
        }
    }
    Ok(None)
}

/// The steps of the checkpoints in a folder, which may be missing.
fn steps(dir: &Path) -> training::Result<Vec<u64>> {
    let Some(checkpoints) = opened(dir)? else { return Ok(Vec::new()) };
    let all = checkpoints.list()?.into_iter();
    Ok(all.filter_map(|folder| Some(checkpoints.contents(&folder).ok()?.step)).collect())
}

fn opened(dir: &Path) -> training::Result<Option<Checkpoints>> {
    let config = CheckpointConfig { dir: dir.into(), ..CheckpointConfig::default() };
    dir.is_dir().then(|| Checkpoints::open(config)).transpose()
}
