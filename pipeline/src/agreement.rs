//! Whether all ranks were told the same, before any of them waits for another.

use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::Tensor;
use comm::{Communicator, all_gather_object};

use crate::links::Spec;
use crate::{Error, Modules, PipelineConfig, Result, Table};

/// Compares what the ranks of a pipeline were given, and refuses what could not work. Every rank must call it.
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
    if let Some(error) = all.iter().enumerate().find_map(differs) {
        return Err(error);
    }
    // Variables go by their modules' names.
    let Some(name) = modules.ambiguous() else { return Ok(()) };
    let (what, help) = ("the modules of a pipeline".to_string(), "give each a name of its own".to_string());
    Err(Error::InvalidArgument { what, got: format!("{name} twice"), help })
}
