//! Output: the losses, and the table of what each rank held and sent.

use crate::common::{Folder, losses, text};
use crate::tensor_parallel::{MLP, SMALL_MLP, SMALL_TRANSFORMER, TRANSFORMER};

/// Returns the two numbers of a line of the table, in bytes.
fn figures(printed: &str, name: &str) -> (f64, f64) {
    let line =
        printed.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {printed}"));
    let numbers: Vec<f64> =
        line[name.len()..].split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (numbers[0] * 1e6, numbers[1] * 1e6)
}

/// Compares to the precision of the table's digits.
fn assert_bytes((own, other): (f64, f64), expected: (f64, f64), what: &str) {
    for (got, expected) in [(own, expected.0), (other, expected.1)] {
        assert!((got - expected).abs() <= 500.0 + 1e-6, "{what}: {got}, not {expected}");
    }
}

#[test]
fn the_mlps_losses_and_figures() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let size = ["--hidden-size", "64", "--samples", "64", "--batch-size", "16"];
    let output = MLP.succeed(&[&size[..], &["--metrics", &lines]].concat());
    let printed = text(&output.stdout);
    let losses = losses(lines.as_ref());
    assert_eq!(losses.len(), 4);
    for (line, loss) in printed.lines().zip(&losses) {
        assert_eq!(line, format!("Loss: {}", f64::from(*loss)));
    }
    assert_eq!(printed.lines().nth(5), Some("===== memory and communication of each rank, measured ====="));
    let (whole, copied) = (4.0 * (2.0 * 64.0 * 256.0 + 256.0 + 64.0), 4.0 * 64.0);
    let own = (whole - copied) / 2.0 + copied;
    assert_bytes(figures(&printed, "weights"), (own, whole), "weights");
    assert_bytes(figures(&printed, "gradients"), (own, whole), "gradients");
    // Two numbers for each parameter, and the step count of each tensor.
    assert_bytes(figures(&printed, "optimizer"), (2.0 * own + 32.0, 2.0 * whole + 32.0), "optimizer");
    // Tensor parallelism: one all-reduce of the output, as the first layer's input needs no gradient. Data
    // parallelism: all gradients.
    assert_bytes(figures(&printed, "sent in a step"), (4.0 * 16.0 * 64.0, whole), "sent");
    let remarks = text(&output.stderr);
    assert!(remarks.starts_with("note: the PyTorch handbook draws other weights on each rank"), "{remarks}");
    assert_eq!(remarks.lines().count(), 1);
}

#[test]
fn the_transformers_losses() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let output = TRANSFORMER
        .succeed(&[&SMALL_TRANSFORMER[..], &["--tp", "2", "--dp", "2", "--metrics", &lines]].concat());
    let printed = text(&output.stdout);
    let losses = losses(lines.as_ref());
    assert_eq!(losses.len(), 4);
    for (step, (line, loss)) in printed.lines().zip(&losses).enumerate() {
        assert_eq!(line, format!("Epoch {}, Batch {}, Loss: {}", step / 2, step % 2, f64::from(*loss)));
    }
    assert!(printed.contains("    tp 2, dp 2          dp 4    ratio\n"), "{printed}");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn trace_and_report() {
    let folder = Folder::new();
    let names = ["trace.json", "report.html"].map(|name| folder.argument(name));
    let [trace, report] = &names;
    let files = ["--trace", trace, "--report", report, "--sequence-parallel"];
    TRANSFORMER.succeed(&[&SMALL_TRANSFORMER[..], &files].concat());
    let trace = std::fs::read_to_string(trace).unwrap();
    for span in
        ["forward", "backward", "weight gradient", "wait for input gradient", "collective", "optimizer"]
    {
        assert!(trace.contains(&format!("\"name\":\"{span}\"")), "{span}");
    }
    let report = std::fs::read_to_string(report).unwrap();
    for (name, value) in [("tensor-parallel ranks", "2"), ("sequence parallelism", "yes")] {
        let row = format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
        assert!(report.contains(&row), "{name}");
    }
    assert!(report.contains("<svg"));
}

#[test]
fn a_launched_job_has_the_ranks_that_it_was_given() {
    let launch = crate::common::Girandole("launch");
    let program = env!("CARGO_BIN_EXE_girandole");
    let job = ["--nproc-per-node", "2", "--", program, "tensor-parallel-mlp"];
    let output = launch.succeed(&[&job[..], &SMALL_MLP].concat());
    assert!(text(&output.stdout).contains("          tp 2          dp 2    ratio"));
    let output = launch.command().args(job).args(SMALL_MLP).args(["--tp", "4"]).output().unwrap();
    let errors = text(&output.stderr);
    assert!(errors.contains("--tp: got 4; it does not divide 2 ranks (--world-size)"), "{errors}");
    assert_eq!(output.status.code(), Some(2));
}
