//! A rank is killed or stopped, while each rank is in two groups: the ranks that share its layers, and those with
//! copies of its part.

use crate::common::all_name_the_culprit;
use crate::tensor_parallel::{MLP, SMALL_MLP, TRANSFORMER};

#[test]
fn all_others_name_it() {
    all_name_the_culprit(&MLP, &[&SMALL_MLP[..], &["--tp", "2", "--dp", "2"]].concat(), 1, 4);
}

#[test]
fn all_others_name_it_in_a_transformer() {
    let small =
        ["--d-model", "16", "--num-heads", "4", "--d-ff", "24", "--vocab-size", "32", "--length", "9"];
    all_name_the_culprit(&TRANSFORMER, &[&small[..], &["--tp", "2", "--dp", "2"]].concat(), 2, 4);
}
