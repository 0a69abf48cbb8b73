//! Output of `ddp-trainer`.

use std::collections::BTreeSet;

use crate::common::{Folder, text};
use crate::ddp_trainer::TRAINER;

#[test]
fn every_rank_says_what_it_has_to_do() {
    for (ranks, steps) in [(1, 64), (2, 32), (9, 8)] {
        let epochs = 2;
        let output = TRAINER.succeed(&["--world-size", &ranks.to_string(), "--epochs", &epochs.to_string()]);
        let printed = text(&output.stdout);
        let line = |rank, epoch| format!("[GPU: {rank}] Epoch: {epoch} | Batchsize: 32 | Steps: {steps}");
        let expected: BTreeSet<String> =
            (0..ranks).flat_map(|rank| (0..epochs).map(move |epoch| line(rank, epoch))).collect();
        assert_eq!(printed.lines().count(), expected.len(), "{printed}");
        assert_eq!(printed.lines().map(str::to_string).collect::<BTreeSet<_>>(), expected);
        let remarks = text(&output.stderr);
        assert!(
            remarks.starts_with("note: the Trainer tutorial") && remarks.lines().count() == 1,
            "{remarks}"
        );
    }
}

#[test]
fn a_first_batch_that_is_not_full_is_told() {
    let output =
        TRAINER.succeed(&["--world-size", "3", "--epochs", "1", "--samples", "50", "--loss", "document"]);
    let line = "Epoch: 0 | Batchsize: 17 | Steps: 1";
    assert_eq!(text(&output.stdout).matches(line).count(), 3, "{}", text(&output.stdout));
    assert_eq!(text(&output.stderr), "", "with the tutorial's loss there is nothing to remark");
}

#[test]
fn all_files_are_written_together() {
    let folder = Folder::new();
    let names = ["trace.json", "report.html", "m.jsonl", "w.safetensors"].map(|name| folder.argument(name));
    let [trace, report, metrics, save] = &names;
    let files = ["--trace", trace, "--report", report, "--metrics", metrics, "--save", save];
    TRAINER.succeed(&[&["--epochs", "2"], &files[..]].concat());
    let report = std::fs::read_to_string(report).unwrap();
    for (name, value) in [("samples", "2048"), ("epochs", "2"), ("learning rate", "0.001"), ("seed", "42")] {
        assert!(
            report.contains(&format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>")),
            "{name}"
        );
    }
    assert!(report.contains("<svg") && report.contains("DDP, 2 ranks"));
    let trace = std::fs::read_to_string(trace).unwrap();
    for span in ["forward", "backward", "optimizer", "collective"] {
        assert!(trace.contains(&format!("\"name\":\"{span}\"")), "{span}");
    }
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 4);
}
