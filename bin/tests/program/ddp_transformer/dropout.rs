//! Dropout: losses no longer equal PyTorch's, but are reproducible, and masks differ between ranks.

use crate::common::{Folder, losses};
use crate::ddp_transformer::TRANSFORMER;

fn run(arguments: &[&str]) -> (Vec<f32>, Vec<u8>) {
    let folder = Folder::new();
    let [lines, save] = ["m.jsonl", "w.safetensors"].map(|name| folder.argument(name));
    TRANSFORMER.succeed(&[arguments, &["--metrics", &lines, "--save", &save]].concat());
    (losses(lines.as_ref()), std::fs::read(save).unwrap())
}

#[test]
fn runs_are_the_same_and_learn() {
    let arguments = ["--world-size", "3", "--epochs", "100"];
    let (first, weights) = run(&arguments);
    assert!((first.clone(), weights.clone()) == run(&arguments));
    assert!((first.clone(), weights) != run(&[&arguments[..], &["--seed", "43"]].concat()));
    let (plain, _) = run(&["--world-size", "3", "--epochs", "1", "--dropout", "0"]);
    assert_ne!(plain[0], first[0]);
    assert!(first[first.len() - 1] < 0.7 * first[0], "{first:?}");
}

#[test]
fn masks_differ_by_rank() {
    // All ranks get the same single row: without dropout, any number of ranks gives the result of one.
    let one = |ranks: &'static str, dropout: &'static str| {
        run(&["--samples", "1", "--epochs", "3", "--world-size", ranks, "--dropout", dropout]).1
    };
    assert!(one("1", "0") == one("2", "0"));
    assert!(one("1", "0.1") != one("2", "0.1"));
}

#[test]
fn dropping_everything_is_possible() {
    let (all, _) = run(&["--dropout", "1", "--epochs", "1"]);
    assert!(all.iter().all(|loss| loss.is_finite()), "{all:?}");
}
