//! Checkpoints of a layout with `far`: groups that train on their own have a folder each.

use std::path::{Path, PathBuf};

use training::{CheckpointConfig, Checkpoints, Contents};

use crate::{Error, Result};

/// The field of [`CheckpointExtra`](crate::trainer::CheckpointExtra) with the number of groups.
const GROUPS: &str = "far";

/// The folder of a group's checkpoints: the given one for the first, and one in it for each other.
pub(crate) fn folder(dir: &Path, group: usize) -> PathBuf {
    if group == 0 { dir.into() } else { dir.join(format!("far-{group}")) }
}

/// Returns the latest checkpoint that a run of `groups` groups can go on from, in a folder of checkpoints: of which every one of the groups
/// that it was written with has its own. Groups that are new go on from the first one's.
///
/// # Errors
/// A folder that cannot be read; a latest checkpoint whose manifest is damaged.
pub fn latest(checkpoints: &Checkpoints, groups: usize) -> training::Result<Option<Contents>> {
    let Some(latest) = checkpoints.latest()? else { return Ok(None) };
    let Some(dir) = latest.folder.parent() else { return Ok(Some(latest)) };
    let others = (1..groups).map(|group| steps(&folder(dir, group)));
    let others: Vec<Vec<u64>> = others.collect::<training::Result<_>>()?;
    let is_of_all = |contents: &Contents| {
        others.iter().take(written_by(contents) - 1).all(|steps| steps.contains(&contents.step))
    };
    if is_of_all(&latest) {
        return Ok(Some(latest));
    }
    let all = checkpoints.list()?.into_iter().rev();
    Ok(all.filter_map(|folder| checkpoints.contents(&folder).ok()).find(is_of_all))
}

/// Returns the checkpoint that a group has written at the same step as the first one has; `None` if it is the first, or was not there
/// then.
///
/// # Errors
/// A group that was there then, and has no checkpoint of that step.
pub(crate) fn own(of_first: &Contents, group: usize) -> Result<Option<Contents>> {
    let dir = of_first.folder.parent().filter(|_| group > 0 && group < written_by(of_first));
    let Some(dir) = dir.map(|dir| folder(dir, group)) else { return Ok(None) };
    let checkpoints = opened(&dir)?;
    let all = checkpoints.as_ref().map_or(Ok(Vec::new()), Checkpoints::list)?;
    for (checkpoints, folder) in checkpoints.iter().cycle().zip(all.iter().rev()) {
        let contents = checkpoints.contents(folder)?;
        if contents.step == of_first.step {
            return Ok(Some(contents));
        }
    }
    let (step, of_first) = (of_first.step, of_first.folder.display());
    let problem = format!(
        "it has no checkpoint of step {step}, at which that group went on beside {of_first}: go on from another step"
    );
    Err(Error::file(&dir, problem))
}

/// The number of groups of the run that wrote a checkpoint.
fn written_by(contents: &Contents) -> usize {
    let groups = strategy::checkpoint::extra(contents).and_then(|extra| extra.get(GROUPS)?.as_u64());
    groups.map_or(1, |groups| groups.max(1) as usize)
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
