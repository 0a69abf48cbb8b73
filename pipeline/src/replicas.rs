//! Data-parallel replicas: ranks with the same stages and different data.

use std::sync::Arc;

use candle_core::Var;
use comm::{Communicator, Operation, all_gather_object};

use crate::groups::Groups;
use crate::links::Spec;
use crate::{Error, Result};

/// Creates a group of the ranks that have replicas of this rank's stages, which ends when its owner drops it; `None` if there
/// are no others. Every rank must call it.
pub(crate) fn group(groups: &Groups) -> Result<Option<Arc<dyn Communicator>>> {
    let Some(dp) = groups.dp.as_ref().filter(|dp| dp.world_size() > 1) else { return Ok(None) };
    Ok(Some(dp.subgroup(&(0..dp.world_size()).collect::<Vec<_>>())?))
}

/// Sets the variables of all replicas to the values of the first. Every rank must call it.
///
/// # Errors
/// Replicas whose variables differ in name, shape or dtype.
pub(crate) fn broadcast_variables(copies: Option<&dyn Communicator>, vars: &[(String, Var)]) -> Result<()> {
    let Some(copies) = copies.filter(|copies| copies.world_size() > 1) else { return Ok(()) };
    let own: Vec<String> = vars.iter().map(|(name, var)| format!("{name}: {}", Spec::of(var))).collect();
    let all = all_gather_object(copies, &own)?;
    for (copy, theirs) in all.iter().enumerate() {
        let longer = all[0].len().max(theirs.len());
        if let Some(index) = (0..longer).find(|index| theirs.get(*index) != all[0].get(*index)) {
            let line = |lines: &[String]| lines.get(index).map_or("nothing", String::as_str).to_string();
            return Err(Error::Disagreement {
                what: "a variable of the model".into(),
                rank: copies.world_ranks()[copy],
                got: line(theirs),
                first: copies.world_ranks()[0],
                expected: line(&all[0]),
            });
        }
    }
    for (_, var) in vars {
        copies.run(Operation::Broadcast { tensor: var.as_detached_tensor(), root: 0 })?;
    }
    Ok(())
}
