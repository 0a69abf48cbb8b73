//! Output of `ddp-transformer`.

use crate::common::{Folder, losses, text};
use crate::ddp_transformer::TRANSFORMER;

#[test]
fn stdout_has_what_the_document_prints_and_nothing_else() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let output = TRANSFORMER.succeed(&["--epochs", "2", "--metrics", &lines]);
    let printed = text(&output.stdout);
    let printed: Vec<&str> = printed.lines().collect();
    assert_eq!((printed[0], printed[21], printed.len()), ("Transformer(", ")", 22 + 12 + 6));
    assert_eq!(printed[1], "  (embedding): Embedding(1000, 32)");
    assert_eq!(printed[4], "    (0-1): 2 x TransformerBlock(");
    assert_eq!(printed[22], "tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 0])");
    assert_eq!(printed[33], "tensor([11, 11, 11, 11, 11, 11, 11, 11, 11, 11])");
    let losses = losses(lines.as_ref());
    for (step, (line, loss)) in printed[34..].iter().zip(&losses).enumerate() {
        let value = line.strip_prefix(&format!("Epoch {}, Batch {}, Loss: ", step / 3, step % 3)).unwrap();
        // As Python prints it: the f32 converted to f64, with as many digits as needed.
        assert_eq!(value, format!("{}", f64::from(*loss)));
    }
    let remarks = text(&output.stderr);
    assert!(
        remarks.starts_with("note: as the DDP tutorial does, this run shows each token only those after it"),
        "{remarks}"
    );
    assert!(
        remarks.contains("(--mask causal hides them)")
            && remarks.contains("(--reshuffle gives each its own)")
    );
    assert_eq!(remarks.lines().count(), 1);
}

#[test]
fn a_model_of_other_sizes_is_printed_as_it_is() {
    let tree = |arguments: &[&str]| {
        let printed = text(&TRANSFORMER.succeed(&[&["--epochs", "1"], arguments].concat()).stdout);
        printed.split_once("tensor(").unwrap().0.to_string()
    };
    let document = tree(&[]);
    assert_eq!(tree(&["--samples", "8", "--length", "5", "--mask", "causal", "--num-layers", "2"]), document);
    let printed = tree(&["--num-layers", "12", "--dropout", "0.25"]);
    let expected = document.replace("(0-1): 2 x", "(0-11): 12 x").replace("p=0.1", "p=0.25");
    let sizes = [("1000", "100"), ("64", "24"), ("32", "12")];
    let expected = sizes.iter().fold(expected, |tree, (printed, trained)| tree.replace(printed, trained));
    assert_eq!(printed, expected);
    assert!(tree(&["--num-layers", "1", "--dropout", "1"]).contains("\n    (0): TransformerBlock("));
}

#[test]
fn the_sound_way_is_not_remarked_upon() {
    let output = TRANSFORMER.succeed(&["--epochs", "1", "--mask", "causal", "--reshuffle"]);
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn reshuffled_epochs_differ() {
    let order = |arguments: &[&str]| {
        let folder = Folder::new();
        let lines = folder.argument("m.jsonl");
        let fixed = ["--epochs", "2", "--dropout", "0", "--lr", "0", "--metrics", &lines];
        TRANSFORMER.succeed(&[&fixed[..], arguments].concat());
        let losses = losses(lines.as_ref());
        let (first, second) = losses.split_at(3);
        first == second
    };
    assert!(order(&[]), "nothing is learnt, and the order is the same");
    assert!(!order(&["--reshuffle"]));
}

#[test]
fn all_files_are_written_together() {
    let folder = Folder::new();
    let names = ["trace.json", "report.html", "m.jsonl", "w.safetensors"].map(|name| folder.argument(name));
    let [trace, report, metrics, save] = &names;
    let files = ["--trace", trace, "--report", report, "--metrics", metrics, "--save", save];
    TRANSFORMER.succeed(&[&["--epochs", "2"], &files[..]].concat());
    let report = std::fs::read_to_string(report).unwrap();
    for (name, value) in [("mask", "document"), ("dropout", "0.1"), ("data", "12 rows of 10 tokens")] {
        assert!(
            report.contains(&format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>")),
            "{name}"
        );
    }
    assert!(report.contains("<svg") && report.contains("DDP, 2 ranks"));
    assert!(std::fs::read_to_string(trace).unwrap().contains("\"name\":\"bucket\""));
    // A saved file can be passed to --init.
    TRANSFORMER.succeed(&["--epochs", "1", "--init", save]);
}
