//! `--loss-scale`: its effect on losses and skipped steps.

use crate::common::{Folder, losses, text};
use crate::fsdp_mlp::FSDP;

/// Returns the losses, and the line about the loss scale.
fn run(folder: &Folder, more: &[&str]) -> (Vec<f32>, String) {
    let lines = folder.argument("m.jsonl");
    let size = ["--features", "24", "--hidden", "50", "--batch-size", "4", "--world-size", "3"];
    let output = FSDP.succeed(&[&size[..], &["--metrics", &lines], more].concat());
    let printed = text(&output.stdout);
    let line = printed.lines().find(|line| line.starts_with("Loss scale ")).unwrap_or_default();
    (losses(lines.as_ref()), line.to_string())
}

/// f32 has range for a power of two in both directions, so scaling changes nothing.
#[test]
fn a_factor_leaves_no_trace_where_numbers_bear_it() {
    let folder = Folder::new();
    let size = ["--steps", "12", "--param-dtype", "f32"];
    let (plain, none) = run(&folder, &size);
    let (scaled, line) = run(&folder, &[&size[..], &["--loss-scale", "1024"]].concat());
    assert_eq!(plain, scaled);
    assert_eq!((none.as_str(), line.as_str()), ("", "Loss scale 1024 at the end; no step was skipped"));
}

#[test]
fn steps_are_skipped_until_gradients_are_finite() {
    let folder = Folder::new();
    let size = ["--steps", "30", "--param-dtype", "f16"];
    let first = 2f64.powi(28);
    let (scaled, line) = run(&folder, &[&size[..], &["--loss-scale", &first.to_string()]].concat());
    let (standing, _) = run(&folder, &[&size[..], &["--lr", "0"]].concat());
    let words: Vec<&str> = line.split_whitespace().collect();
    let (factor, skipped): (f64, i32) = (words[2].parse().unwrap(), words[6].parse().unwrap());
    assert!((5..25).contains(&skipped), "{line}");
    assert_eq!(factor, first / 2f64.powi(skipped), "{line}");
    // Until the first step that is not skipped, the model is unchanged. One batch may pass where the next one does not.
    let same = scaled.iter().zip(&standing).take_while(|(scaled, standing)| scaled == standing).count();
    assert!((6..=skipped as usize + 1).contains(&same), "{line}: {same}");
}

#[test]
fn a_resumed_run_goes_on_with_the_factor() {
    let folder = Folder::new();
    let dir = folder.argument("checkpoints");
    let size = ["--param-dtype", "f16", "--loss-scale", "1000000000"];
    let (whole, line) = run(&folder, &[&size[..], &["--steps", "30"]].concat());
    let keep = [&size[..], &["--checkpoint-dir", &dir]].concat();
    run(&folder, &[&keep[..], &["--steps", "7"]].concat());
    let resumed = run(&folder, &[&keep[..], &["--steps", "30", "--resume"]].concat());
    assert_eq!(resumed, (whole, line));
    let other = ["--steps", "31", "--resume", "--param-dtype", "f16", "--features", "24", "--hidden", "50"];
    let other = [&other[..], &["--batch-size", "4", "--world-size", "3", "--checkpoint-dir", &dir]].concat();
    let refused = FSDP.refuse(&other);
    assert!(refused.starts_with("error: --loss-scale: got none; the run in"), "{refused}");
    for wrong in ["0", "-1", "inf", "much"] {
        assert!(FSDP.refuse(&["--loss-scale", wrong]).contains("greater than 0"), "{wrong}");
    }
}
