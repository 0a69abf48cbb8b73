//! A pipeline stage that is killed.

use crate::common::all_name_the_culprit;
use crate::pipeline_transformer::PIPELINE;

/// Each stage waits for its neighbours, and these for theirs, in groups of two ranks.
#[test]
fn a_stage_that_is_killed_or_stopped_is_named_by_all_others() {
    for (seed, schedule) in [(1, "gpipe"), (2, "1f1b"), (3, "zb-v")] {
        let arguments = ["--num-layers", "6", "--micro-batches", "4", "--schedule", schedule];
        all_name_the_culprit(&PIPELINE, &arguments, seed, 2);
    }
}

/// With two copies of each stage.
#[test]
fn a_copy_of_a_stage_that_is_killed_or_stopped_is_named_by_all_others() {
    let arguments = ["--num-layers", "4", "--micro-batches", "2", "--dp", "2", "--samples", "16"];
    all_name_the_culprit(&PIPELINE, &arguments, 4, 4);
}
