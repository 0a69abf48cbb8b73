//! Sizes that do not fit in any machine's memory.

use crate::common::{girandole, refuse_with};

const LARGEST: &str = "18446744073709551615";
const HALF: &str = "9223372036854775808";

/// Commands, with their options that determine a size.
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
            "--samples", "--length", "--vocab-size", "--d-model", "--num-heads", "--d-ff", "--num-layers",
            "--max-len", "--tp",
        ],
    ),
    (
        "pipeline-transformer",
        &[
            "--samples", "--length", "--vocab-size", "--d-model", "--num-heads", "--d-ff", "--num-layers",
            "--max-len", "--batch-size", "--micro-batches", "--stages-per-rank", "--dp", "--world-size",
        ],
    ),
    ("sampler", &["--world-size", "--samples", "--compared"]),
    ("comm-bench", &["--world-size"]),
    (
        "plan",
        &[
            "--ranks", "--batch-size", "--micro-batches", "--element-bytes", "--gathered-bytes",
            "--vocab-size", "--d-model", "--num-heads", "--d-ff", "--num-layers", "--max-len", "--length",
        ],
    ),
];

/// Returns the error of a command with invalid arguments.
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
        (
            &["ddp-transformer", "--vocab-size", "99999999999"],
            "--vocab-size: got 99999999999; with the other",
        ),
        (&["ddp-transformer", "--d-model", "999999996"], "--d-model: got 999999996; with the other"),
        (&["ddp-transformer", "--d-ff", "999999999999"], "--d-ff: got 999999999999; with the other"),
        (&["fsdp-mlp", "--hidden", "100000000"], "--hidden: got 100000000; with the other sizes"),
        (&["fsdp-mlp", "--features", "9999999999"], "--features: got 9999999999; with the other sizes"),
        (&["tensor-parallel-transformer", "--max-len", "99999999999"], "--max-len: got 99999999999; with"),
        (
            &["tensor-parallel-transformer", "--vocab-size", "9999999998"],
            "--vocab-size: got 9999999998; with",
        ),
        (&["tensor-parallel-transformer", "--num-layers", "100000000"], "--num-layers: got 100000000; with"),
        (&["tensor-parallel-mlp", "--hidden-size", "1000000"], "--hidden-size: got 1000000; with"),
        (
            &[
                "plan", "--d-model", "16777216", "--num-heads", "4", "--max-len", "16777216", "--length",
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

/// Returns the program limited to 4 GiB of memory, so that a size that is wrongly accepted does not exhaust the
/// machine.
#[cfg(target_os = "linux")]
fn in_little_memory() -> std::process::Command {
    let mut command = std::process::Command::new("sh");
    let script = "ulimit -v 4194304 && exec \"$0\" \"$@\"";
    crate::common::clean(&mut command).args(["-c", script, env!("CARGO_BIN_EXE_girandole")]);
    command
}

/// Returns the bytes of this machine's memory.
#[cfg(target_os = "linux")]
fn memory() -> f64 {
    let lines = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = lines.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    1024.0 * line.trim().strip_suffix("kB").unwrap().trim().parse::<f64>().unwrap()
}

/// Sizes below any limit of counting or addressing, so that only the size of the memory can be the reason.
#[cfg(target_os = "linux")]
#[test]
fn data_of_ten_times_the_memory_are_refused() {
    for (arguments, option, bytes) in [
        (&["ddp-linear"][..], "--samples", 2.0 * 8.0),
        (&["ddp-linear", "--world-size", "8"], "--samples", 8.0 * 8.0),
        (&["ddp-trainer"], "--samples", 2.0 * 84.0),
        (&["ddp-mlp"], "--batch-size", 2.0 * 44.0),
        (&["ddp-mlp"], "--validation-samples", 2.0 * 44.0),
        (&["fsdp-mlp"], "--batch-size", 4.0 * 4096.0),
        (&["cifar10"], "--samples", 2.0 * 3072.0),
        (&["cifar10"], "--test-samples", 2.0 * 3072.0),
        (&["tensor-parallel-mlp", "--tp", "4"], "--samples", 4.0 * 8192.0),
        (&["tensor-parallel-transformer"], "--samples", 2.0 * 4.0 * 33.0),
        (&["sampler"], "--samples", 8.0),
        (&["sampler"], "--compared", 40.0),
        (&["comm-bench", "--ops", "all_reduce", "--dtype", "u8"], "--sizes", 2.0),
        (&["comm-bench", "--ops", "gather", "--dtype", "u8", "--world-size", "5"], "--sizes", 2.0),
    ] {
        let size = format!("{:.0}", 10.0 * memory() / bytes);
        let mut command = in_little_memory();
        let (line, code) = refuse_with(command.args(arguments), &[option, &size]);
        let begin = format!("error: {option}: got {size}; ");
        let is_told = line.starts_with(&begin) && line.contains("GiB for that, and this machine has");
        assert!(is_told && code == 2, "{arguments:?}: {line}");
    }
}

/// All ranks are on this machine; each of them alone would fit.
#[cfg(target_os = "linux")]
#[test]
fn models_of_all_ranks_together_are_refused() {
    // Takes half of the memory on one rank.
    let size = |parameters_by_square: f64, bytes: f64| {
        let size = (0.5 * memory() / bytes / parameters_by_square).sqrt();
        // Rounded to a multiple of every number of ranks used here.
        format!("{}", size as usize / 8 * 8)
    };
    let words = format!("{:.0}", 0.5 * memory() / (4.0 * 2.0 * 12.0));
    for (arguments, option, size) in [
        (&["fsdp-mlp", "--world-size", "4"][..], "--hidden", size(1.0, 12.0 / 4.0)),
        (&["tensor-parallel-mlp", "--tp", "4"], "--hidden-size", size(8.0, 12.0 / 4.0)),
        (&["tensor-parallel-transformer", "--num-layers", "1"], "--d-model", size(12.0, 12.0 / 2.0)),
        (&["ddp-transformer", "--world-size", "4"], "--vocab-size", words.clone()),
        (&["pipeline-transformer", "--world-size", "8", "--dp", "4"], "--vocab-size", words),
    ] {
        let mut command = in_little_memory();
        let (line, code) = refuse_with(command.args(arguments), &[option, &size]);
        let is_told =
            line.contains("ranks here, and this machine has") && line.contains("make the model smaller");
        assert!(is_told && code == 2, "{arguments:?} {option} {size}: {line}");
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
    // 2^30 tokens, each of which keeps 21 x 8192 + 64 numbers of 4 bytes in each of 80 layers: 59.1e15 bytes, plus 2
    // x 131072 at the end, 1.1e15. Attention scores, 2^20 for each token and head, are not kept.
    let row = said.lines().find(|line| line.starts_with("one process")).unwrap();
    assert!(row.contains(" no ") && row.contains("60.4 PB"), "{said}");
}
