//! Setup of a group: checks that all ranks have the same model, and broadcasts rank 0's values.

use std::sync::Arc;

use candle_core::Var;
use comm::internal::line_difference;
use strategy::ParameterGroups;
use training::AuditConfig;

use crate::hook::ReducerRef;
use crate::parameter::{Kinds, Parameter};
use crate::reducer::Reducer;
use crate::{CommHook, DdpConfig, Error, Result, initial, lock};

/// What all ranks of a group have of a model.
pub(crate) struct ModelState<'a> {
    pub(crate) parameters: &'a [Parameter],
    pub(crate) buffers: &'a [(String, Var)],
    /// Synchronised like parameters, and never changed.
    pub(crate) integers: &'a [(String, Var)],
}

/// Checks that all ranks over which a parameter is averaged have the same, broadcasts the first rank's values, and creates the
/// reducer.
pub(crate) fn set_up_group(
    averaged_over: ParameterGroups,
    state: &ModelState<'_>,
    config: &DdpConfig,
    link: &ReducerRef,
) -> Result<Arc<Reducer>> {
    let groups: Vec<_> = averaged_over.groups().enumerate().collect();
    if groups.len() > 1 && !matches!(config.hook, CommHook::AllReduce) {
        let help = "leave it out: where ranks have different parameters, gradients are averaged as they are";
        let hook = format!("{:?}", config.hook);
        return Err(strategy::Error::invalid("DdpConfig::hook", hook, help).into());
    }
    let mut difference = None;
    for (group, comm) in &groups {
        let found = line_difference(&***comm, 0, &describe(state, config, &averaged_over, *group))?;
        difference = difference.or(found);
    }
    let checked = difference.map_or(Ok(()), |difference| Err(Error::ModelMismatch(difference)));
    match groups.len() {
        1 => checked?,
        _ => strategy::all_agree([&**averaged_over.all()], checked)?,
    }
    let &ModelState { parameters, buffers, integers } = state;
    for (group, comm) in groups.into_iter().filter(|(_, comm)| comm.world_size() > 1) {
        let parameters =
            parameters.iter().filter(|parameter| averaged_over.index_of(parameter.name()) == group);
        let others = buffers.iter().chain(integers).filter(|_| group == 0).map(|(_, var)| var);
        let vars: Vec<&Var> = parameters.map(Parameter::var).chain(others).collect();
        initial::broadcast(&**comm, &vars, config.bucket_bytes)?;
    }
    let reducer = Arc::new(Reducer::new(averaged_over, parameters, buffers, config));
    *lock(link) = Arc::downgrade(&reducer);
    Ok(reducer)
}

/// Describes what must be equal on all ranks of a group, one line per item.
fn describe(
    state: &ModelState<'_>,
    config: &DdpConfig,
    averaged_over: &ParameterGroups,
    group: usize,
) -> Vec<String> {
    let &ModelState { parameters, buffers, integers } = state;
    let DdpConfig {
        bucket_bytes, first_bucket_bytes, tune_bucket_bytes, hook, broadcast_buffers, audit, ..
    } = config;
    let mut first = format!("buckets of {bucket_bytes} bytes, the first of {first_bucket_bytes}");
    if *tune_bucket_bytes {
        first += ", sizes measured";
    }
    if !matches!(hook, CommHook::AllReduce) {
        first += &format!(", averaged by {hook:?}");
    }
    if !broadcast_buffers {
        first += ", buffers left as they are";
    }
    if *audit != AuditConfig::default() {
        first += &format!(", missing gradients: {audit:?}");
    }
    let mut lines = vec![first];
    let mut kinds = Kinds::default();
    let mut line = |what: &str, name: &str, var: &Var| {
        let kind = kinds.item(var, 0).kind;
        lines.push(format!("{what} {name} {:?} {:?} (kind {kind})", var.dims(), var.dtype()));
    };
    let own = parameters.iter().filter(|parameter| averaged_over.index_of(parameter.name()) == group);
    own.for_each(|parameter| line("parameter", parameter.name(), parameter.var()));
    if group == 0 {
        buffers.iter().for_each(|(name, buffer)| line("buffer", name, buffer));
        integers.iter().for_each(|(name, var)| line("integers", name, var));
    }
    lines
}
