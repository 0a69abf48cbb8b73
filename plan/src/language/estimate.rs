//! Cost of a layout: memory and bytes sent of each rank along `pp`.

use girandole::Layout;

use super::partition::PartitionedModel;
use super::{LayoutCost, StageCost, Subject, Training};
use crate::{Error, Result};

pub(super) fn estimate(subject: &Subject, training: &Training, layout: &Layout) -> Result<LayoutCost> {
    check(subject, training, layout)?;
    let model = PartitionedModel::new(subject, training, layout)?;
    let mut stages =
        if layout.pp > 1 { model.pipeline()? } else { vec![(model.whole(), model.sent_whole())] };
    if let Some(reference) = &subject.reference {
        let reference = PartitionedModel::new(reference, training, layout)?;
        let passes = if layout.pp > 1 { reference.passes()? } else { vec![reference.pass()] };
        for ((memory, _), pass) in stages.iter_mut().zip(passes) {
            if pass.total() > memory.total() {
                *memory = pass;
            }
        }
    }
    let stage = |(stage, (memory, sent))| StageCost { stage, memory, sent };
    Ok(LayoutCost { layout: *layout, stages: stages.into_iter().enumerate().map(stage).collect() })
}

/// Checks that the layout is valid and that the rows of a step can be divided over it.
fn check(subject: &Subject, training: &Training, layout: &Layout) -> Result<()> {
    layout.check(layout.ranks()).map_err(|error| Error::layout(error.to_string()))?;
    let experts = subject.experts();
    if layout.ep > 1 && experts < layout.ep {
        let reason = match experts {
            0 => format!("the model has no experts to divide over {} ranks", layout.ep),
            _ => format!("{experts} experts cannot be divided over {} ranks", layout.ep),
        };
        return Err(Error::layout(reason));
    }
    if layout.cp > training.length {
        let (ranks, length) = (layout.cp, training.length);
        return Err(Error::layout(format!(
            "{ranks} ranks that divide a row are more than its {length} tokens"
        )));
    }
    let (copies, micro_batches) = (layout.data_ranks(), training.micro_batches(layout));
    let rows = training.batch_size;
    if copies > rows {
        return Err(Error::layout(format!("{copies} copies are more than the {rows} rows of a step")));
    }
    if !rows.is_multiple_of(copies.saturating_mul(micro_batches).max(1)) {
        let each = match micro_batches {
            1 => String::new(),
            count => format!(" with {count} micro-batches each"),
        };
        let parts = format!("{copies} {}{each}", if copies == 1 { "rank" } else { "ranks" });
        return Err(Error::layout(format!("the {rows} rows of a step cannot be divided over {parts}")));
    }
    Ok(())
}
