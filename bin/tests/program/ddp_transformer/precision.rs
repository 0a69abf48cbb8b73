//! `--precision`: reduced-precision products are reproducible, and a run says how it computes them.

use crate::common::{self, Folder, girandole, succeed, text};
use crate::ddp_transformer::TRANSFORMER;

fn losses(precision: &str) -> Vec<f32> {
    let folder = Folder::new();
    let metrics = folder.argument("metrics.jsonl");
    let sizes = ["--d-model", "64", "--num-heads", "4", "--d-ff", "128", "--length", "33", "--max-len", "32"];
    let options = ["--dropout", "0", "--epochs", "3", "--precision", precision, "--metrics", &metrics];
    TRANSFORMER.succeed(&[&sizes[..], &options].concat());
    common::losses(metrics.as_ref())
}

#[test]
fn losses_in_each_precision_are_close_and_repeat() {
    let exact = losses("f32");
    for (precision, most) in [("bf16", 0.02), ("f32-high", 1e-4)] {
        let found = losses(precision);
        assert_eq!(found, losses(precision), "{precision}");
        assert_eq!(found.len(), exact.len());
        assert!(
            found.iter().zip(&exact).all(|(a, b)| (a - b).abs() < most),
            "{precision}: {found:?}, {exact:?}"
        );
        assert!(precision != "bf16" || found != exact, "nothing was rounded");
    }
}

#[test]
fn one_line_says_how_products_are_computed_whoever_starts_the_ranks() {
    let said = |precision: &str, arguments: &[&str]| {
        let output = succeed(girandole().args(arguments).args(["--epochs", "1", "--precision", precision]));
        text(&output.stderr).matches("note: matrix products are computed ").count()
    };
    let launched =
        ["launch", "--nproc-per-node", "2", "--", env!("CARGO_BIN_EXE_girandole"), "ddp-transformer"];
    for arguments in [&launched[..], &["ddp-transformer", "--world-size", "2"]] {
        assert_eq!([said("bf16", arguments), said("f32", arguments)], [1, 0], "{arguments:?}");
    }
}
