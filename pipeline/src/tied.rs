//! Variables of two stages that are one parameter, such as an embedding that is the output layer, too.

use std::sync::Arc;

use candle_core::{Tensor, Var};
use comm::{Communicator, Operation, ReduceOp, all_gather_object};

use crate::gradients::Gradients;
use crate::{Error, Result};

/// A pair of them, as far as it concerns this rank.
pub(crate) enum Tie {
    /// Both are here.
    Here(Var, Var),
    /// One is here, the other on the other rank of this group.
    Apart(Var, Arc<dyn Communicator>),
}

/// Finds out who has what, and gives each second variable the values of the first. Every rank must call it.
pub(crate) fn tie(
    comm: &dyn Communicator,
    pairs: &[(String, String)],
    vars: &[(String, Var)],
) -> Result<Vec<Tie>> {
    if pairs.is_empty() {
        return Ok(Vec::new());
    }
    let known: Vec<(String, Vec<usize>)> =
        vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
    let all = all_gather_object(comm, &known)?;
    let find = |name: &String| {
        let has = |(rank, vars): (usize, &Vec<(String, Vec<usize>)>)| {
            Some((rank, vars.iter().find(|(known, _)| known == name)?.1.clone()))
        };
        all.iter().enumerate().find_map(has).ok_or_else(|| {
            let known = vars.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            Error::UnknownVariable { name: name.clone(), known }
        })
    };
    let own = |name: &String| vars.iter().find(|(known, _)| known == name).map(|(_, var)| var.clone());
    let mut ties = Vec::new();
    for (first, second) in pairs {
        let ((a, dims), (b, others)) = (find(first)?, find(second)?);
        if dims != others {
            let what = format!("tied variables {first} and {second}");
            let (got, help) = (format!("shapes {dims:?} and {others:?}"), "they must have one shape".into());
            return Err(Error::InvalidArgument { what, got, help });
        }
        match (own(first), own(second)) {
            (Some(first), Some(second)) => {
                second.set(&first.as_detached_tensor()).map_err(Error::during("tying variables"))?;
                ties.push(Tie::Here(first, second));
            }
            (Some(var), None) | (None, Some(var)) => {
                let group = comm.subgroup(&[a, b])?;
                group.run(Operation::Broadcast { tensor: var.as_detached_tensor(), root: 0 })?;
                ties.push(Tie::Apart(var, group));
            }
            (None, None) => {}
        }
    }
    Ok(ties)
}

/// Adds the gradients of each pair, so that both stay equal to the bit.
pub(crate) fn add(ties: &[Tie], gradients: &mut Gradients) -> Result<()> {
    for tie in ties {
        match tie {
            Tie::Here(first, second) => {
                let sum = match (gradients.of(first), gradients.of(second)) {
                    (Some(a), Some(b)) => (a + b).map_err(Error::during("tied gradients"))?,
                    (Some(sum), None) | (None, Some(sum)) => sum.clone(),
                    (None, None) => continue,
                };
                gradients.set(first, sum.clone());
                gradients.set(second, sum);
            }
            Tie::Apart(var, group) => {
                let sum: Tensor = match gradients.of(var) {
                    Some(sum) => sum.clone(),
                    None => var.zeros_like().map_err(Error::during("tied gradients"))?,
                };
                group.run(Operation::AllReduce { tensor: sum.clone(), op: ReduceOp::Sum })?;
                gradients.set(var, sum);
            }
        }
    }
    Ok(())
}
