//! Checkpoints of a layout with `far`: groups that train on their own have a folder each.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use training::{CheckpointConfig, Checkpoints, Contents};

use crate::parallel::FarGroups;
use crate::{Error, Result};

/// What the checkpoints of a layout with `far` say of the run that wrote them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarRun {
    /// Number of groups.
    pub groups: usize,
    /// Tells the run from others, also from those that went on before or after it.
    pub run: u64,
}

impl FarRun {
    pub(crate) fn of(groups: &FarGroups) -> Self {
        Self { groups: groups.count(), run: groups.run }
    }

    /// That of a checkpoint; `None` if it was written without `far`.
    fn from(contents: &Contents) -> Option<Self> {
        // As `CheckpointExtra` has it.
        serde_json::from_value(strategy::checkpoint::extra(contents)?.get("far")?.clone()).ok()
    }
}

/// The folder of a group's checkpoints: the given one for the first, and one in it for each other.
pub(crate) fn folder(dir: &Path, group: usize) -> PathBuf {
    if group == 0 { dir.into() } else { dir.join(format!("far-{group}")) }
}

/// Returns the latest checkpoint in a folder that a run of `groups` groups can go on from. If several groups have written it, each of
/// them that goes on must have its own of the same step, by the same run. `None` if there is none, or only a first one that not all have
/// written.
///
/// # Errors
/// A folder that cannot be read; a latest checkpoint whose manifest is damaged; checkpoints that the others have not written.
pub fn latest(checkpoints: &Checkpoints, groups: usize) -> Result<Option<Contents>> {
    let Some(latest) = checkpoints.latest()? else { return Ok(None) };
    let Some(dir) = latest.folder.parent() else { return Ok(Some(latest)) };
    let others = (1..groups).map(|group| written(&folder(dir, group)));
    let others: Vec<Vec<Contents>> = others.collect::<Result<_>>()?;
    let is_of_all = |of_first: &Contents| {
        let writers = FarRun::from(of_first).map_or(1, |run| run.groups.max(1));
        others.iter().take(writers - 1).all(|other| other.iter().any(|own| is_beside(own, of_first)))
    };
    if is_of_all(&latest) {
        return Ok(Some(latest));
    }
    let all = written(dir)?;
    let count = all.len();
    if let Some(found) = all.into_iter().find(is_of_all) {
        return Ok(Some(found));
    }
    if count <= 1 {
        return Ok(None);
    }
    let step = latest.step;
    let problem = format!(
        "its checkpoints, the last of step {step}, are of several groups, and far-1 and so on in it have none of the same steps: all groups must see one folder"
    );
    Err(Error::file(dir, problem))
}

/// Returns the checkpoint that a group has written beside one of the first group; `None` if it is the first, or was not there then.
///
/// # Errors
/// A group that was there then, and has no such checkpoint.
pub(crate) fn own(of_first: &Contents, group: usize) -> Result<Option<Contents>> {
    let writers = FarRun::from(of_first).map_or(1, |run| run.groups);
    let dir = of_first.folder.parent().filter(|_| group > 0 && group < writers);
    let Some(dir) = dir.map(|dir| folder(dir, group)) else { return Ok(None) };
    let found = written(&dir)?.into_iter().find(|own| is_beside(own, of_first));
    found.map(Some).ok_or_else(|| {
        let (step, of_first) = (of_first.step, of_first.folder.display());
        let problem = format!(
            "it has no checkpoint of step {step} from the run that wrote {of_first}: go on from another"
        );
        Error::file(&dir, problem)
    })
}

/// Whether two groups of one run have written these at the same step.
fn is_beside(own: &Contents, of_first: &Contents) -> bool {
    own.step == of_first.step && FarRun::from(own) == FarRun::from(of_first)
}

/// The checkpoints in a folder, which may be missing, the newest first, without those that are damaged.
fn written(dir: &Path) -> Result<Vec<Contents>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), ..CheckpointConfig::default() })?;
    let all = checkpoints.list()?.into_iter().rev();
    Ok(all.filter_map(|folder| checkpoints.contents(&folder).ok()).collect())
}
