//! Data-parallel replicas: ranks with the same stages and different data.

use candle_core::Var;
use comm::{Communicator, Operation, all_gather_object};
use strategy::ParameterGroups;

use crate::links::Spec;
use crate::{Error, Result};

/// Sets the variables of all replicas to the values of the first. Every rank must call it.
///
/// # Errors
/// Replicas whose variables differ in name, shape or dtype.
pub(crate) fn broadcast_variables(
    averaged_over: Option<&ParameterGroups>,
    vars: &[(String, Var)],
) -> Result<()> {
    let Some(averaged_over) = averaged_over else { return Ok(()) };
    let mut result = Ok(());
    for (group, copies) in averaged_over.groups().enumerate() {
        let own: Vec<_> = vars.iter().filter(|(name, _)| averaged_over.index_of(name) == group).collect();
        // Whatever is found: other ranks of the next group wait for this one.
        result = result.and(broadcast(&**copies, &own));
    }
    result
}

fn broadcast(copies: &dyn Communicator, vars: &[&(String, Var)]) -> Result<()> {
    if copies.world_size() == 1 {
        return Ok(());
    }
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
