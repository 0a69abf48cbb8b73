//! Output of `pipeline-transformer`.

use crate::common::{Folder, text};
use crate::pipeline_transformer::PIPELINE;

#[test]
fn the_document_and_nothing_else_is_on_standard_output() {
    let output = PIPELINE.succeed(&["--epochs", "2", "--dropout", "0"]);
    let out = text(&output.stdout);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "Transformer(");
    assert!(lines.contains(&"tensor([11, 11, 11, 11, 11, 11, 11, 11, 11, 11])"));
    let losses: Vec<&&str> = lines.iter().filter(|line| line.contains("Loss")).collect();
    assert_eq!(losses.len(), 6);
    // PyTorch's loss with seed 42.
    assert!(losses[0].starts_with("Epoch 0, Batch 0, Loss: 5.0575"), "{}", losses[0]);
    assert!(losses[5].starts_with("Epoch 1, Batch 2, Loss: "), "{}", losses[5]);
    let err = text(&output.stderr);
    assert!(err.starts_with("note: as the pipeline tutorial does") && err.lines().count() == 1, "{err}");
    // With a size that is not the tutorial's, the tree is that of the trained model.
    assert_eq!(lines[1], "  (embedding): Embedding(100, 12)");
    let printed = text(&PIPELINE.succeed(&["--epochs", "1"]).stdout);
    assert_eq!(printed.lines().nth(1), Some("  (embedding): Embedding(1000, 32)"));
    let printed = text(&PIPELINE.succeed(&["--epochs", "1", "--num-layers", "3"]).stdout);
    assert_eq!(printed.lines().nth(4), Some("    (0-2): 3 x TransformerBlock("));
}

#[test]
fn help_says_when_schedules_give_the_same_losses() {
    let help = text(&PIPELINE.succeed(&["--help"]).stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("With --dropout 0 every schedule gives the losses of one process"), "{help}");
}

#[test]
fn a_schedule_is_shown() {
    let show =
        |arguments: &[&str]| text(&PIPELINE.succeed(&[&["--show-schedule"], arguments].concat()).stdout);
    let shown = show(&[]);
    let expected = "\
time   0  1  2  3  4  5  6  7  8
rank 0 F0 F1 .  .  .  B0 B0 B1 B1
rank 1 .  F0 F1 B0 B0 B1 B1 .  .
bubble: 33.3 % of the time; activations alive, by rank: 2 2
";
    assert_eq!(shown, expected);
    let shown = show(&["--schedule", "1f1b", "--world-size", "3", "--micro-batches", "4"]);
    assert!(shown.contains("bubble: 33.3 %") && shown.contains("by rank: 3 2 1"), "{shown}");
    let shown = show(&["--schedule", "zb-v", "--micro-batches", "4"]);
    assert!(shown.contains("bubble: 4.0 %") && shown.contains("F3.0"), "{shown}");
    // Rows that the copies of the model do not divide are no mistake of a schedule.
    let shown = show(&["--world-size", "4", "--dp", "2", "--samples", "4"]);
    assert!(shown.contains("rank 1 ") && !shown.contains("rank 2 "), "{shown}");
    // Also for a model that does not fit in any machine's memory.
    let large = ["--d-model", "131072", "--num-heads", "64", "--d-ff", "1000000", "--num-layers", "1000"];
    let shown = show(&[&large[..], &["--world-size", "4"]].concat());
    assert!(shown.contains("rank 3 "), "{shown}");
}

#[test]
fn ways_to_work_are_compared_and_reported() {
    let folder = Folder::new();
    let page = folder.argument("r.html");
    let output = PIPELINE.succeed(&["--epochs", "2", "--schedule", "zb-v", "--compare", "--report", &page]);
    let out = text(&output.stdout);
    let (_, end) = out.split_once("===== use of the ranks =====\n").unwrap();
    let lines: Vec<&str> = end.lines().collect();
    assert!(
        lines[0].starts_with("naive, 1 micro-batch: ") && lines[0].ends_with("by the formula 50.0 %"),
        "{end}"
    );
    assert!(lines[1].starts_with("zb-v, 2 micro-batches: ") && lines[1].contains("rank 1 "), "{end}");
    assert!(lines[2].starts_with("speed-up: "), "{end}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("pipeline-transformer") && page.contains("zb-v"));
    assert!(page.contains("Planned, with equal times") && page.contains("Measured in one step"));
    assert!(page.contains("backward for the weights"));
}
