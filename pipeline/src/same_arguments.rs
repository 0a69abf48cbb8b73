//! Consistency check: all ranks of a pipeline must have the same arguments, before any of them waits for another.

use std::sync::Arc;

use candle_core::Tensor;
use comm::internal::{Digest, odd_one};
use comm::{Communicator, all_gather_object};

use crate::groups::Groups;
use crate::links::Spec;
use crate::{Error, Modules, PipelineConfig, Result, Table};

const EXAMPLE: &str = "the example";
const ROWS: &str = "the number of rows of the example";

/// Compares the arguments of all ranks of a pipeline and its data-parallel replicas, and refuses those that cannot work.
/// Every rank must call it.
pub(crate) fn check(
    groups: &Groups,
    table: &Table,
    modules: &Modules,
    config: &PipelineConfig,
    example: Option<&Tensor>,
) -> Result<()> {
    // Group sizes first: the second comparison runs over these groups.
    let others = |group: Option<&Arc<dyn Communicator>>| group.map_or(1, |group| group.world_size());
    let sizes = [
        ("the number of copies", others(groups.same_stages()).to_string()),
        ("the number of ranks that share a layer", others(groups.tp.as_ref()).to_string()),
        (EXAMPLE, example.map_or_else(|| "none".to_string(), |example| Spec::of(example).to_string())),
    ];
    let pp = &*groups.pp;
    compare(&sizes, |own| Ok(all_gather_object(pp, &own)?), pp.world_ranks()[pp.rank()])?;
    let actions = Digest::new().text(&format!("{:?}", table.actions));
    let own = [
        ("the number of stages", table.stages().to_string()),
        ("the number of micro-batches", table.micro_batches.to_string()),
        ("the rank of each stage", format!("{:?}", table.owners)),
        ("the list of modules", modules.names().join(", ")),
        ("the split", format!("{:?}", config.split)),
        (ROWS, rows_of(example)),
        ("the list of tied variables", format!("{:?}", config.tied)),
        ("the check for missing gradients", format!("{:?}", config.audit)),
        ("the bytes of a bucket", config.bucket_bytes.to_string()),
        ("the schedule", format!("{}, its actions {:08x}", config.schedule, actions.value() as u32)),
    ];
    compare(&own, |own| groups.gather(own), pp.world_ranks()[pp.rank()])?;
    // Variables are named after their modules.
    let Some(name) = modules.ambiguous() else { return Ok(()) };
    let (what, help) = ("the modules of a pipeline".to_string(), "give each a name of its own".to_string());
    Err(Error::InvalidArgument { what, got: format!("{name} twice"), help })
}

/// Compares the examples of all ranks. Every rank must call it.
pub(crate) fn check_example(groups: &Groups, example: &Tensor) -> Result<()> {
    let (pp, rank) = (&*groups.pp, groups.pp.world_ranks()[groups.pp.rank()]);
    compare(&[(EXAMPLE, Spec::of(example).to_string())], |own| Ok(all_gather_object(pp, &own)?), rank)?;
    compare(&[(ROWS, rows_of(Some(example)))], |own| groups.gather(own), rank)
}

/// Copies have as many rows each, which may be parts of other lengths (context parallelism).
fn rows_of(example: Option<&Tensor>) -> String {
    let rows = |example: &Tensor| example.dims().first().copied().unwrap_or(1).to_string();
    example.map_or_else(|| "none".to_string(), rows)
}

/// A rank in the whole job, and its arguments.
type Given = (usize, Vec<String>);

fn compare(
    own: &[(&str, String)],
    gather: impl FnOnce(Given) -> Result<Vec<Given>>,
    rank: usize,
) -> Result<()> {
    let all = gather((rank, own.iter().map(|(_, value)| value.clone()).collect()))?;
    for (index, (what, _)) in own.iter().enumerate() {
        let values: Vec<&String> = all.iter().map(|(_, values)| &values[index]).collect();
        if let Some((first, odd)) = odd_one(&values) {
            return Err(Error::Disagreement {
                what: (*what).into(),
                rank: all[odd].0,
                got: values[odd].clone(),
                first: all[first].0,
                expected: values[first].clone(),
            });
        }
    }
    Ok(())
}
