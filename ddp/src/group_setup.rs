//! Setup of a group: checks that all ranks have the same model, and broadcasts rank 0's values.

use std::sync::Arc;

use candle_core::Var;
use comm::Communicator;
use comm::internal::line_difference;
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

/// Checks that all ranks of a group have the same model, broadcasts rank 0's values, and creates the reducer.
pub(crate) fn set_up_group(
    comm: Arc<dyn Communicator>,
    state: &ModelState<'_>,
    config: &DdpConfig,
    link: &ReducerRef,
) -> Result<Arc<Reducer>> {
    if let Some(difference) = line_difference(&*comm, 0, &describe(state, config))? {
        return Err(Error::ModelMismatch(difference));
    }
    let &ModelState { parameters, buffers, integers } = state;
    if comm.world_size() > 1 {
        let parameters = parameters.iter().map(Parameter::var);
        let others = buffers.iter().chain(integers).map(|(_, var)| var);
        let vars: Vec<&Var> = parameters.chain(others).collect();
        initial::broadcast(&*comm, &vars, config.bucket_bytes)?;
    }
    let reducer = Arc::new(Reducer::new(comm, parameters, buffers, config));
    *lock(link) = Arc::downgrade(&reducer);
    Ok(reducer)
}

/// Describes what must be equal on all ranks, one line per item.
fn describe(state: &ModelState<'_>, config: &DdpConfig) -> Vec<String> {
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
        let kind = kinds.item(var).kind;
        lines.push(format!("{what} {name} {:?} {:?} (kind {kind})", var.dims(), var.dtype()));
    };
    parameters.iter().for_each(|parameter| line("parameter", parameter.name(), parameter.var()));
    buffers.iter().for_each(|(name, buffer)| line("buffer", name, buffer));
    integers.iter().for_each(|(name, var)| line("integers", name, var));
    lines
}
