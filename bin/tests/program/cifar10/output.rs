//! Output, and that it is reproducible.

use std::io::BufReader;

use crate::cifar10::{CIFAR10, SHORT};
use crate::common::{Folder, text};

/// Returns what is printed after the end of training.
fn tested(arguments: &[&str]) -> String {
    let printed = text(&CIFAR10.succeed(arguments).stdout);
    let (_, rest) = printed.split_once("finish\n").unwrap_or_else(|| panic!("{printed}"));
    rest.to_string()
}

#[test]
fn stdout_has_what_the_document_prints_and_stderr_the_remarks() {
    let output = CIFAR10.succeed(&[&SHORT[..], &["--print-every", "2"]].concat());
    let printed = text(&output.stdout);
    let lines: Vec<&str> = printed.lines().collect();
    // Five steps on each of two ranks.
    for (line, begin) in lines.iter().zip(["[1,     2] loss: 2.", "[1,     4] loss: 2.", "finish"]) {
        assert!(line.starts_with(begin), "{printed}");
    }
    assert!(lines[3].starts_with("GroundTruth:  ") && lines[4].starts_with("Predicted:    "), "{printed}");
    assert_eq!(lines[3].len(), "GroundTruth:  ".len() + 4 * 6 - 1, "{printed}");
    assert!(lines[5].starts_with("Accuracy on the 21 test pictures: "), "{printed}");
    assert_eq!(lines.len(), 16, "{printed}");
    let remarks = text(&output.stderr);
    assert_eq!(remarks.lines().count(), 2, "{remarks}");
    assert!(remarks.starts_with("note: no --data-dir with CIFAR-10: "), "{remarks}");
    assert!(
        remarks.contains("the sum of the batches' means, never divided by how many there are"),
        "{remarks}"
    );
}

#[test]
fn the_test_is_one_processs_on_any_number_of_ranks() {
    let folder = Folder::new();
    let weights = folder.argument("weights");
    CIFAR10.succeed(&["--samples", "600", "--test-samples", "9", "--momentum", "0.9", "--save", &weights]);
    // With a learning rate of 0 the weights do not change.
    let fixed = ["--lr", "0", "--init", &weights, "--samples", "8", "--epochs", "1", "--test-samples", "223"];
    let on = |ranks: &str| tested(&[&fixed[..], &["--world-size", ranks]].concat());
    let alone = on("1");
    assert!(alone.contains("Accuracy on the 223 test pictures: ") && !alone.contains("100.0 % (loss"));
    for ranks in ["2", "3", "4", "7"] {
        assert_eq!(on(ranks), alone, "{ranks} ranks");
    }
}

#[test]
fn two_runs_are_equal_to_the_bit() {
    let run = |seed: &str| {
        let folder = Folder::new();
        let (save, picture) = (folder.argument("w"), folder.argument("p.png"));
        let files = ["--save", &save, "--picture", &picture, "--seed", seed, "--world-size", "3"];
        let printed = CIFAR10.succeed(&[&SHORT[..], &files].concat()).stdout;
        (printed, std::fs::read(save).unwrap(), std::fs::read(picture).unwrap())
    };
    let first = run("1");
    assert!(first == run("1"));
    assert!(first.1 != run("2").1);
}

#[test]
fn what_is_tested_is_what_was_saved() {
    let folder = Folder::new();
    let save = folder.argument("w.safetensors");
    let longer = ["--samples", "200", "--test-samples", "61", "--momentum", "0.9"];
    assert_eq!(tested(&longer), tested(&[&longer[..], &["--save", &save]].concat()));
}

#[test]
fn all_files_are_written_together() {
    let folder = Folder::new();
    let names = ["t.json", "r.html", "m.jsonl", "w.safetensors", "p.png"].map(|name| folder.argument(name));
    let [trace, report, metrics, save, picture] = &names;
    let files = [
        "--trace", trace, "--report", report, "--metrics", metrics, "--save", save, "--picture", picture,
        "--pictures", "11",
    ];
    CIFAR10.succeed(&[&SHORT[..], &files].concat());
    let report = std::fs::read_to_string(report).unwrap();
    for (name, value) in [("data", "40 drawn pictures"), ("momentum", "0.1"), ("test pictures", "21")] {
        let row = format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
        assert!(report.contains(&row), "{row}");
    }
    assert!(report.contains("<svg") && report.contains("test accuracy"));
    let trace = std::fs::read_to_string(trace).unwrap();
    for span in ["forward", "backward", "optimizer", "collective"] {
        assert!(trace.contains(&format!("\"name\":\"{span}\"")), "{span}");
    }
    let file = BufReader::new(std::fs::File::open(picture).unwrap());
    let reader = png::Decoder::new(file).read_info().unwrap();
    // Eight per row, so two rows: pictures of 96 pixels, gaps of 8, and two lines of text.
    assert_eq!((reader.info().width, reader.info().height), (8 * 104 + 8, 2 * 126 + 8));
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 5, "these files and no others");
}

#[test]
fn fewer_pictures_than_there_is_room_for() {
    let folder = Folder::new();
    let picture = folder.argument("p.png");
    let few = ["--samples", "3", "--test-samples", "2", "--world-size", "4", "--picture", &picture];
    let printed = tested(&few);
    assert_eq!(printed.lines().next().unwrap().split_whitespace().count(), 3, "{printed}");
    assert_eq!(printed.matches("no test pictures").count(), 8, "{printed}");
    let file = BufReader::new(std::fs::File::open(picture).unwrap());
    assert_eq!(png::Decoder::new(file).read_info().unwrap().info().width, 2 * 104 + 8);
}
