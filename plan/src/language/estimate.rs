//! Cost of a layout: memory and bytes sent of each rank along `pp`.

use girandole::Layout;

use super::partition::PartitionedModel;
use super::{LayoutCost, StageCost, Subject, Training};
use crate::{Error, Result};

pub(super) fn estimate(subject: &Subject, training: &Training, layout: &Layout) -> Result<LayoutCost> {
    check(training, layout)?;
    let model = PartitionedModel::new(subject, training, layout)?;
    let stages = if layout.pp > 1 { model.pipeline()? } else { vec![(model.whole(), model.sent_whole())] };
    let stage = |(stage, (memory, sent))| StageCost { stage, memory, sent };
    Ok(LayoutCost { layout: *layout, stages: stages.into_iter().enumerate().map(stage).collect() })
}

/// Checks that the layout is valid and that the rows of a step can be divided over it.
fn check(training: &Training, layout: &Layout) -> Result<()> {
    layout.check(layout.ranks()).map_err(|error| Error::layout(error.to_string()))?;
    if layout.ep > 1 {
        return Err(Error::layout("ep (divided experts) is not planned, so far: leave it out".to_string()));
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
