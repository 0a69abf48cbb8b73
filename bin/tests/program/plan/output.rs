//! Printed plans, recommendations, and rejected options.

use crate::common::text;
use crate::plan::PLAN;

/// With these values given, nothing is measured.
const MACHINE: [&str; 6] = ["--bandwidth", "10GB/s", "--latency", "10us", "--flops", "1TFLOP/s"];

fn plan(arguments: &[&str]) -> String {
    let output = PLAN.succeed(&[arguments, &MACHINE].concat());
    assert_eq!(text(&output.stderr), "");
    text(&output.stdout)
}

/// Returns whether each strategy fits.
fn fits(printed: &str) -> Vec<(String, bool)> {
    let mut lines = printed.lines().skip_while(|line| !line.starts_with("strategy"));
    let place = lines.next().unwrap().find("fits").unwrap();
    let lines = lines.take_while(|line| !line.is_empty());
    lines.map(|line| (line[..place].trim().to_string(), line[place..].starts_with("yes"))).collect()
}

#[test]
fn every_strategy_has_a_line() {
    let printed = plan(&["--ranks", "4", "--memory", "1GB"]);
    assert!(printed.starts_with(
        "tensor-parallel-transformer: 470528 parameters of 4 bytes; 16 rows of 32 tokens a step; Adam\n"
    ));
    assert!(printed.contains(
        "\n4 ranks, 1.00 GB each\n10.0 GB/s, 10.0 us a step of communication, 1.00 TFLOP/s (as given)\n"
    ));
    let names: Vec<String> = fits(&printed).into_iter().map(|(name, _)| name).collect();
    let tensor = ["tp 2, dp 2", "tp 2 sequence, dp 2", "tp 4", "tp 4 sequence"];
    let sharded = ["fsdp 4", "fsdp 4 grad-op", "fsdp 4 no-shard", "fsdp 2, dp 2"];
    assert_eq!(names, [&["dp 4"][..], &sharded, &tensor, &["pipeline 4"]].concat());
    assert!(fits(&printed).iter().all(|(_, fits)| *fits));
    assert!(printed.lines().last().unwrap().starts_with("recommended: "), "{printed}");
}

#[test]
fn nodes_and_named_networks_are_told() {
    let lines = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let output = PLAN.succeed(
            &[&["--ranks", "16", "--memory", "1GB", "--flops", "1TFLOP/s"], &arguments[..]].concat(),
        );
        text(&output.stdout)
    };
    let named = lines("--network nvlink");
    let nvlink = "450 GB/s, 3.00 us a step of communication in nodes of 8, 50.0 GB/s, 5.00 us a step of communication \
                  between them, 1.00 TFLOP/s (as given)";
    assert_eq!(named.lines().nth(2), Some(nvlink));
    let nodes =
        "--bandwidth 450GB/s --latency 3us --ranks-per-node 8 --node-bandwidth 50GB/s --node-latency 5us";
    let given = lines(nodes);
    assert_eq!(given.lines().nth(2), Some(nvlink));
    // With slow links between nodes, steps that use them take longer.
    let slow = lines(&nodes.replace("50GB/s", "1GB/s"));
    let step = |printed: &str| printed.lines().find(|line| line.starts_with("fsdp 16 ")).map(String::from);
    assert_ne!(step(&given), step(&slow));
    // Columns are aligned.
    let columns: Vec<usize> =
        named.lines().skip(4).take_while(|line| !line.is_empty()).map(str::len).collect();
    assert!(columns.iter().all(|len| *len == columns[0]), "{named}");
}

#[test]
fn the_parameters_are_the_models() {
    for (model, parameters) in [
        ("ddp-linear", 2),
        ("ddp-trainer", 21),
        ("ddp-mlp", 262),
        ("tensor-parallel-mlp", 8_393_728),
        ("fsdp-mlp", 25_185_290),
        // Without the table of positions.
        ("ddp-transformer", 5068),
    ] {
        let printed = plan(&[model, "--memory", "1GB"]);
        assert!(printed.starts_with(&format!("{model}: {parameters} parameters")), "{printed}");
    }
}

#[test]
fn a_model_that_is_too_large_for_copies_is_divided() {
    let large = ["--d-model", "4096", "--num-heads", "32", "--num-layers", "24", "--length", "129"];
    let printed = plan(&[&large[..], &["--ranks", "8", "--memory", "24GB"]].concat());
    let fits = fits(&printed);
    assert_eq!(fits[0], ("dp 8".into(), false), "{printed}");
    assert!(fits.iter().any(|(name, fits)| name == "fsdp 8" && *fits));
    let last = printed.lines().last().unwrap();
    assert!(last.starts_with("recommended: ") && !last.starts_with("recommended: dp"), "{last}");
    let printed = plan(&[&large[..], &["--ranks", "2", "--memory", "24GB"]].concat());
    let last = printed.lines().last().unwrap();
    assert!(last.starts_with("recommended: nothing, for nothing fits: "), "{last}");
    assert!(last.contains(" ranks ") && last.contains(" would fit (--ranks "), "{last}");
}

#[test]
fn copies_without_a_sample_do_not_fit() {
    let printed = plan(&["--ranks", "64", "--batch-size", "16", "--memory", "1GB"]);
    for (name, fits) in fits(&printed) {
        let copies = match name.split_once(" dp ").map(|(_, dp)| dp.parse::<usize>().unwrap()) {
            _ if name.starts_with("dp") || name.starts_with("fsdp") => 64,
            Some(dp) => dp,
            None => 1,
        };
        assert_eq!(fits, copies <= 16, "{name}: {printed}");
    }
    let lines: Vec<&str> = printed.lines().collect();
    let few = lines.iter().find(|line| line.starts_with("too few samples: ")).unwrap();
    assert!(few.starts_with("too few samples: dp 64 | fsdp 64 | fsdp 64 grad-op | "), "{few}");
    assert!(few.ends_with(" more: more copies of the model than the 16 of a step (--batch-size)"), "{few}");
    assert!(lines.last().unwrap().starts_with("recommended: tp "), "{printed}");
    // No strategy is possible.
    let printed = plan(&["ddp-trainer", "--ranks", "4096", "--batch-size", "16", "--memory", "1GB"]);
    let last =
        "recommended: nothing, for nothing fits: give 4096 samples a step (--batch-size) or fewer ranks";
    assert_eq!(printed.lines().last(), Some(last));
    assert!(fits(&printed).iter().all(|(_, fits)| !fits));
}

#[test]
fn what_is_not_possible_is_told_with_the_reason() {
    let lines = |arguments: &[&str]| -> Vec<String> {
        let printed = plan(&[arguments, &["--memory", "1GB"]].concat());
        printed.lines().filter(|line| line.starts_with("not possible")).map(String::from).collect()
    };
    assert!(lines(&["--ranks", "4"]).is_empty());
    // The first ranks have one token more.
    assert!(lines(&["--ranks", "4", "--vocab-size", "101"]).is_empty());
    assert_eq!(
        lines(&["--ranks", "4", "--vocab-size", "3"]),
        ["not possible: tp 4: the vocabulary, 3, is less than one token for each"]
    );
    assert_eq!(
        lines(&["--ranks", "4", "--d-ff", "101"]),
        [
            "not possible: tp 2, dp 2 | tp 4: the width of the feed-forward layers, 101, cannot be divided by so many"
        ]
    );
    assert_eq!(
        lines(&["--ranks", "4", "--length", "31"]),
        ["not possible: tp 4 sequence: the tokens of a row, 30, cannot be divided by so many"]
    );
    assert_eq!(
        lines(&["ddp-mlp", "--ranks", "8"]),
        [
            "not possible: tp 8: the hidden size, 20, cannot be divided by so many",
            "not possible: pipeline 8: the model is one part, which cannot be cut"
        ]
    );
}

#[test]
fn the_optimizer_is_the_commands() {
    for (model, optimizer) in [
        ("ddp-linear", "SGD"),
        ("ddp-trainer", "SGD"),
        ("ddp-mlp", "SGD"),
        ("ddp-transformer", "SGD"),
        ("fsdp-mlp", "Adam"),
        ("tensor-parallel-mlp", "Adam"),
        ("tensor-parallel-transformer", "Adam"),
    ] {
        let first = |more: &[&str]| {
            let printed = plan(&[&[model, "--memory", "1GB"], more].concat());
            printed.lines().next().unwrap().rsplit_once("; ").unwrap().1.to_string()
        };
        assert_eq!(first(&[]), optimizer, "{model}");
        assert_eq!(first(&["--optimizer", "momentum"]), "SGD with momentum", "{model}");
    }
}

#[test]
fn what_is_not_given_is_measured() {
    let output = PLAN.succeed(&["tensor-parallel-mlp", "--ranks", "2", "--latency", "1us"]);
    let printed = text(&output.stdout);
    assert!(printed.contains(" 1.00 us a step of communication, "), "{printed}");
    assert!(printed.contains("(measured here between 2 processes, where not given)"), "{printed}");
    assert_eq!(fits(&printed).len(), 6);
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (arguments, part) in [
        (&["--memory", "much"][..], "give bytes, such as 500MB, 16GB or 80GiB"),
        (&["--bandwidth", "-1GB/s"], "give bytes or bits a second"),
        (&["--latency", "5h"], "give a time, such as 50us or 1ms"),
        (&["--flops", "0"], "give operations a second"),
        (&["--ranks", "0"], "1 or more"),
        (&["--ranks", "9999999"], "--ranks: got 9999999; give at most 1048576"),
        (&["--element-bytes", "3"], "--element-bytes: got 3; give 2, 4 or 8"),
        (&["--gathered-bytes", "1"], "--gathered-bytes: got 1; give 2, 4 or 8"),
        (&["--json", "no/such/plan.json"], "cannot write no/such/plan.json: "),
        (&["--d-model", "99999999"], "--d-model: got 99999999; give at most 16777216"),
        (&["--d-model", "100"], "--d-model: got 100; it is split over 8 heads (--num-heads)"),
        (&["--length", "1"], "--length: got 1; give 2 to 65 tokens with --max-len 64"),
        (&["--max-len", "8"], "--length: got 33; give 2 to 9 tokens with --max-len 8"),
        (&["--sizes", "4,4"], "--sizes: got 4; tensor-parallel-transformer is a transformer"),
        (
            &["ddp-mlp", "--num-heads", "2"],
            "--num-heads: got 2; ddp-mlp is made of linear layers: give --sizes",
        ),
        (
            &["ddp-mlp", "--dropout", "0.1"],
            "--dropout: got 0.1; ddp-mlp is made of linear layers and has none",
        ),
        (&["--dropout", "2"], "give a number from 0 to 1"),
        (&["ddp-mlp", "--sizes", "4"], "--sizes: got 4; a layer has two: give 2 or more"),
        (&["no-such-model"], "possible values: ddp-linear"),
    ] {
        let line = PLAN.refuse(&[arguments, &MACHINE[..0]].concat());
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}
