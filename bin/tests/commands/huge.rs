//! Numbers that no machine has room for.

use crate::common::{girandole, refuse_with};

const LARGEST: &str = "18446744073709551615";
const HALF: &str = "9223372036854775808";

/// Every command, and those of its options that something is as large as.
const SIZES: [(&str, &[&str]); 12] = [
    ("ddp-linear", &["--samples", "--world-size"]),
    ("ddp-trainer", &["--samples", "--world-size"]),
    (
        "ddp-transformer",
        &["--samples", "--length", "--vocab-size", "--d-model", "--d-ff", "--num-layers", "--max-len"],
    ),
    ("ddp-mlp", &["--validation-samples", "--world-size"]),
    ("fsdp-mlp", &["--hidden", "--features", "--world-size"]),
    ("cifar10", &["--samples", "--test-samples", "--world-size"]),
    ("tensor-parallel-mlp", &["--samples", "--hidden-size", "--world-size", "--tp", "--dp"]),
    (
        "tensor-parallel-transformer",
        &[
            "--samples",
            "--length",
            "--vocab-size",
            "--d-model",
            "--num-heads",
            "--d-ff",
            "--num-layers",
            "--max-len",
            "--tp",
        ],
    ),
    (
        "pipeline-transformer",
        &[
            "--samples",
            "--length",
            "--vocab-size",
            "--d-model",
            "--num-heads",
            "--d-ff",
            "--num-layers",
            "--max-len",
            "--batch-size",
            "--micro-batches",
            "--stages-per-rank",
            "--dp",
            "--world-size",
        ],
    ),
    ("sampler", &["--world-size", "--samples", "--compared"]),
    ("comm-bench", &["--world-size"]),
    (
        "plan",
        &[
            "--ranks",
            "--batch-size",
            "--micro-batches",
            "--element-bytes",
            "--gathered-bytes",
            "--vocab-size",
            "--d-model",
            "--num-heads",
            "--d-ff",
            "--num-layers",
            "--max-len",
            "--length",
        ],
    ),
];

/// What a command says to arguments that it cannot follow.
fn refused(arguments: &[&str]) -> String {
    let (line, _) = refuse_with(&mut girandole(), arguments);
    assert!(!line.contains("panicked"), "{arguments:?}: {line}");
    line
}

#[test]
fn a_size_is_refused_in_one_line() {
    for (command, options) in SIZES {
        for option in options {
            for value in [LARGEST, HALF] {
                refused(&[command, option, value]);
            }
        }
    }
}

#[test]
fn sizes_that_are_too_large_together_are_refused_in_one_line() {
    for (arguments, part) in [
        (&["pipeline-transformer", "--world-size", "4", "--dp", "2", "--batch-size", HALF][..], "--samples"),
        (&["pipeline-transformer", "--num-layers", "1000000000000"], "make the model smaller"),
        (
            &["pipeline-transformer", "--micro-batches", "100000000", "--batch-size", "100000000"],
            "--micro-batches: got 100000000; give at most 524288 with 2 stages",
        ),
        (&["pipeline-transformer", "--world-size", LARGEST, "--show-schedule"], "give 1 to 4096 ranks"),
        (&["ddp-transformer", "--max-len", LARGEST], "--max-len: got 18446744073709551615; with the other"),
        (&["fsdp-mlp", "--hidden", "100000000"], "--hidden: got 100000000; with the other sizes"),
        (&["tensor-parallel-transformer", "--num-layers", "100000000"], "--num-layers: got 100000000; with"),
        (&["tensor-parallel-mlp", "--hidden-size", "1000000"], "--hidden-size: got 1000000; with"),
        (
            &[
                "plan",
                "--d-model",
                "16777216",
                "--num-heads",
                "4",
                "--max-len",
                "16777216",
                "--length",
                "1000000",
            ],
            "parameters: make the model smaller",
        ),
        (
            &["plan", "ddp-transformer", "--num-layers", "16777216"],
            "--num-layers: got 16777216; give at most",
        ),
        (&["plan", "ddp-mlp", "--sizes", "16777216,16777216"], "parameters: make the model smaller"),
    ] {
        let line = refused(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn large_numbers_that_need_no_room_are_taken() {
    // With a learning rate of 0 nothing overflows in the model itself.
    let short = ["--epochs", "1", "--samples", "64", "--lr", "0"];
    for value in [LARGEST, HALF, "4294967296"] {
        let output =
            girandole().arg("ddp-linear").args(short).args(["--batch-size", value]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let total = 2 * value.parse::<u128>().unwrap();
        assert!(output.status.success() && said.contains(&format!("total batch size {total}")), "{said}");
    }
}

#[test]
fn a_plan_of_very_much_says_that_it_does_not_fit() {
    let model = ["--d-model", "8192", "--num-heads", "64", "--num-layers", "80", "--vocab-size", "131072"];
    let rows = ["--max-len", "1048576", "--length", "1048577", "--batch-size", "1024", "--ranks", "1"];
    let machine = ["--bandwidth", "1GB/s", "--latency", "10us", "--flops", "1TFLOP/s", "--memory", "80GB"];
    let output = girandole().arg("plan").args(model).args(rows).args(machine).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    // 64 heads x 2^20 x 2^20 scores in each of 80 layers, of 1024 rows, in 4 bytes: 2.3e19.
    let row = said.lines().find(|line| line.starts_with("one process")).unwrap();
    assert!(row.contains(" no ") && row.contains("23119 PB"), "{said}");
}
