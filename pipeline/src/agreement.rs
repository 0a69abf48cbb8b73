//! Whether all ranks were told the same, before any of them waits for another.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, all_gather_object, broadcast_object};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::links::Spec;
use crate::{Error, Modules, PipelineConfig, Result, Table};

/// Compares what the ranks of a pipeline were given. Every rank must call it.
pub(crate) fn check(
    comm: &dyn Communicator,
    table: &Table,
    modules: &Modules,
    config: &PipelineConfig,
    example: &Tensor,
) -> Result<()> {
    let mut actions = DefaultHasher::new();
    format!("{:?}", table.actions).hash(&mut actions);
    let copies = config.data_parallel.as_ref().map_or(1, |copies| copies.world_size());
    let own = [
        ("the number of stages", table.stages().to_string()),
        ("the number of micro-batches", table.micro_batches.to_string()),
        ("the rank of each stage", format!("{:?}", table.owners)),
        ("the list of modules", modules.names().join(", ")),
        ("the split", format!("{:?}", config.split)),
        ("the example", Spec::of(example).to_string()),
        ("the list of tied variables", format!("{:?}", config.tied)),
        ("the number of copies", copies.to_string()),
        ("the schedule", format!("{}, its actions {:08x}", config.schedule, actions.finish() as u32)),
    ];
    let values: Vec<String> = own.iter().map(|(_, value)| value.clone()).collect();
    let all = all_gather_object(comm, &values)?;
    let differs = |(rank, values): (usize, &Vec<String>)| {
        let place = values.iter().zip(&all[0]).position(|(value, first)| value != first)?;
        let name = |rank: usize| comm.world_ranks()[rank];
        Some(Error::Disagreement {
            what: own[place].0.into(),
            rank: name(rank),
            got: values[place].clone(),
            first: name(0),
            expected: all[0][place].clone(),
        })
    };
    all.iter().enumerate().find_map(differs).map_or(Ok(()), Err)
}

/// What the first rank of all has: of this pipeline, of its copies, and of those that share its layers. Every rank must call it.
pub(crate) fn of_first<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    config: &PipelineConfig,
    mut own: T,
) -> Result<T> {
    let groups = [&config.tensor_parallel, &config.data_parallel];
    for group in groups.into_iter().flatten().map(Arc::as_ref).chain([comm]) {
        own = broadcast_object(group, &own, 0)?;
    }
    Ok(own)
}
