//! Tied variables: several variables, possibly in different stages, that are one parameter, such as an embedding that is also
//! the output layer.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Tensor, Var};
use comm::{Communicator, Operation, ReduceOp, all_gather_object};
use training::internal::GradSums;

use crate::failure_reports::FailureReports;
use crate::links::Spec;
use crate::{Error, Result};

/// A set of tied variables, as far as it concerns this rank.
pub(crate) struct Tie {
    /// The variables of the set on this rank.
    vars: Vec<Var>,
    /// The ranks that have variables of the set; `None` if this rank has all of them.
    group: Option<Arc<dyn Communicator>>,
}

/// Determines which rank has which tied variables, and sets all variables of a set to the values of the first. Returns this
/// rank's ties. Every rank must call it.
pub(crate) fn tie(
    comm: &dyn Communicator,
    pairs: &[(String, String)],
    vars: &[(String, Var)],
) -> Result<Vec<Tie>> {
    let mut ties = Vec::new();
    if pairs.is_empty() {
        return Ok(ties);
    }
    let known: Vec<(String, Spec)> =
        vars.iter().map(|(name, var)| (name.clone(), Spec::of(var.as_tensor()))).collect();
    let all = all_gather_object(comm, &known)?;
    let find = |name: &str| {
        let has = |(rank, vars): (usize, &Vec<(String, Spec)>)| {
            Some((rank, vars.iter().find(|(known, _)| known == name)?.1.clone()))
        };
        all.iter().enumerate().find_map(has).ok_or_else(|| {
            let known = vars.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            Error::UnknownVariable { name: name.into(), known }
        })
    };
    for names in sets(pairs) {
        let found = names.iter().map(|name| find(name)).collect::<Result<Vec<_>>>()?;
        let spec = &found[0].1;
        if let Some(index) = found.iter().position(|(_, other)| other != spec) {
            let what = format!("tied variables {} and {}", names[0], names[index]);
            let got = format!("{spec} and {}", found[index].1);
            let help = "they must have one shape and dtype".into();
            return Err(Error::InvalidArgument { what, got, help });
        }
        // The rank that has the first variable comes first.
        let mut ranks: Vec<usize> = Vec::new();
        for (rank, _) in found {
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        if ranks.contains(&comm.rank()) {
            let own = |name: &&str| Some(vars.iter().find(|(known, _)| known == name)?.1.clone());
            ties.push(Tie::new(comm, &ranks, names.iter().filter_map(own).collect())?);
        }
    }
    Ok(ties)
}

/// Returns, for each tied variable but the first of its set, the name of the first one.
pub(crate) fn roots(pairs: &[(String, String)]) -> HashMap<String, String> {
    let of_set = |names: Vec<&str>| -> Vec<(String, String)> {
        let later = names.iter().skip(1);
        later.map(|name| (name.to_string(), names[0].to_string())).collect()
    };
    sets(pairs).into_iter().flat_map(of_set).collect()
}

/// Returns the sets of names that are connected by pairs, each in order of first mention.
fn sets(pairs: &[(String, String)]) -> Vec<Vec<&str>> {
    let mut sets: Vec<Vec<&str>> = Vec::new();
    for (first, second) in pairs {
        let has = |set: &Vec<&str>| set.contains(&&**first) || set.contains(&&**second);
        let index = sets.iter().position(has).unwrap_or(sets.len());
        let (with, without): (Vec<_>, Vec<_>) = sets.into_iter().partition(has);
        let mut joined = with.concat();
        for name in [&**first, &**second] {
            if !joined.contains(&name) {
                joined.push(name);
            }
        }
        sets = without;
        sets.insert(index, joined);
    }
    sets
}

impl Tie {
    fn new(comm: &dyn Communicator, ranks: &[usize], vars: Vec<Var>) -> Result<Self> {
        let group = (ranks.len() > 1).then(|| comm.subgroup(ranks)).transpose()?;
        if let (Some(group), Some(first)) = (&group, vars.first()) {
            group.run(Operation::Broadcast { tensor: first.as_detached_tensor(), root: 0 })?;
        }
        for pair in vars.windows(2) {
            pair[1].set(&pair[0].as_detached_tensor()).map_err(Error::during("tying variables"))?;
        }
        Ok(Self { vars, group })
    }

    /// Returns the group of the ranks that have variables of the set; `None` if this rank has all of them.
    pub(crate) fn group(&self) -> Option<&Arc<dyn Communicator>> {
        self.group.as_ref()
    }

    /// Returns this rank's variables, and the group of ranks that have variables of the set.
    pub(crate) fn local_and_group(&self) -> (&[Var], Option<&dyn Communicator>) {
        (&self.vars, self.group.as_deref())
    }

    /// Returns the sum of this rank's gradients; `None` if it has none.
    fn sum(&self, gradients: &GradSums) -> candle_core::Result<Option<Tensor>> {
        let mut own = self.vars.iter().filter_map(|var| gradients.of(var));
        let Some(first) = own.next() else { return Ok(None) };
        own.try_fold(first.clone(), |sum, gradient| sum + gradient).map(Some)
    }
}

/// Sums the gradients of each set over ranks, so that all variables stay bitwise equal.
pub(crate) fn add(ties: &[Tie], gradients: &mut GradSums, failures: &FailureReports) -> Result<()> {
    let during = || Error::during("tied gradients");
    for tie in ties {
        let mut sum = tie.sum(gradients).map_err(during())?;
        if let (Some(group), Some(var)) = (&tie.group, tie.vars.first()) {
            let is_some = sum.is_some();
            let own = sum.map_or_else(|| GradSums::zeros(var), Ok).map_err(during())?;
            // Where no rank has a gradient there is none, as in one process: an optimizer must not change the variable.
            let found = Tensor::new(&[u8::from(is_some)], var.device()).map_err(during())?;
            for (tensor, op) in [(&found, ReduceOp::Max), (&own, ReduceOp::Sum)] {
                let operation = Operation::AllReduce { tensor: tensor.clone(), op };
                group.run(operation).map_err(|error| failures.cause(error))?;
            }
            let found = found.to_vec1::<u8>().map_err(during())?;
            sum = (found[0] > 0).then_some(own);
        }
        let Some(sum) = sum else { continue };
        tie.vars.iter().for_each(|var| gradients.set(var, sum.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::sets;

    #[test]
    fn connected_pairs_are_one_set() {
        let of = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            sets(&pairs).into_iter().map(|set| set.join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(of(&[("a", "b"), ("c", "d")]), ["a b", "c d"]);
        assert_eq!(of(&[("a", "b"), ("a", "c")]), ["a b c"]);
        assert_eq!(of(&[("a", "b"), ("c", "d"), ("d", "b")]), ["a b c d"]);
        assert_eq!(of(&[("a", "b"), ("c", "d"), ("a", "e"), ("d", "b")]), ["a b e c d"]);
        assert_eq!(of(&[("a", "a")]), ["a"]);
    }
}
