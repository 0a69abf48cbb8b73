//! Runs whose loss becomes infinite or NaN: they end normally, and their output files can be read.

use crate::common::{Folder, Girandole, metrics, text};

#[test]
fn a_run_that_diverges_has_a_result_and_a_report() {
    for (command, short) in [
        ("ddp-linear", &["--samples", "6400", "--epochs", "2"][..]),
        ("ddp-trainer", &["--epochs", "2"]),
        ("ddp-transformer", &["--epochs", "3"]),
        ("pipeline-transformer", &["--epochs", "3"]),
        ("ddp-mlp", &[]),
        ("cifar10", &["--samples", "40", "--test-samples", "9", "--print-every", "5"]),
    ] {
        let folder = Folder::new();
        let [lines, report, save, checkpoints] =
            ["m.jsonl", "r.html", "w.safetensors", "checkpoints"].map(|name| folder.argument(name));
        let files = ["--lr", "1e30", "--metrics", &lines, "--report", &report, "--save", &save];
        let keep = ["--checkpoint-dir", &checkpoints];
        let keep = if ["ddp-linear", "pipeline-transformer"].contains(&command) { &[][..] } else { &keep };
        let output = Girandole(command).succeed(&[short, &files, keep].concat());
        let printed = text(&output.stdout);
        // As Python prints it. The Trainer tutorial prints no loss.
        assert!(command == "ddp-trainer" || printed.contains("nan"), "{command}: {printed}");
        assert!(!printed.contains("NaN"), "{command}: {printed}");
        let steps = metrics(lines.as_ref());
        assert!(steps.iter().any(|step| step["event"] == "step" && step["loss"].is_null()), "{command}");
        assert_eq!(steps.last().unwrap()["event"], "summary", "{command}");
        let report = std::fs::read_to_string(&report).unwrap();
        assert!(
            report.contains("<svg") && report.contains(" losses are not finite, the first ("),
            "{command}"
        );
        if !keep.is_empty() {
            Girandole(command).succeed(&[short, &files, keep, &["--resume"]].concat());
        }
    }
}
