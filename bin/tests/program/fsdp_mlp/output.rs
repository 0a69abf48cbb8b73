//! Output of `fsdp-mlp`.

use crate::common::{Folder, metrics, text};
use crate::fsdp_mlp::{FSDP, SMALL};

fn columns(line: &str) -> Vec<f64> {
    line.split_whitespace().rev().take(5).map(|word| word.parse().unwrap_or(f64::NAN)).collect::<Vec<_>>()
}

#[test]
fn every_tenth_loss_and_what_each_rank_held() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let output = FSDP.succeed(&[&SMALL[..], &["--steps", "21", "--metrics", &lines]].concat());
    assert_eq!(text(&output.stderr), "");
    let printed = text(&output.stdout);
    let printed: Vec<&str> = printed.lines().collect();
    let steps = metrics(lines.as_ref());
    for (place, step) in [0, 10, 20].into_iter().enumerate() {
        let loss = printed[place].strip_prefix(&format!("Step {step}, Loss: ")).unwrap();
        assert!((loss.parse::<f64>().unwrap() - steps[step]["loss"].as_f64().unwrap()).abs() < 1e-4);
    }
    assert_eq!(
        printed[3].split_whitespace().collect::<Vec<_>>(),
        ["peak", "memory,", "MB", "(10^6)", "parameters", "gradients", "optimizer", "activations", "process"]
    );
    for rank in 0..4 {
        assert!(printed[4 + rank].starts_with(&format!("rank {rank} ")), "{}", printed[4 + rank]);
    }
    assert!(printed[8].starts_with("each rank, by formula") && printed[9].starts_with("DDP, by formula"));
    assert_eq!(printed.len(), 10, "{printed:?}");
}

#[test]
fn each_rank_holds_what_the_formula_says() {
    let memory = |sharding: &[&str]| {
        let size = ["--features", "256", "--hidden", "512", "--steps", "3", "--batch-size", "2"];
        let printed = text(&FSDP.succeed(&[&size[..], sharding].concat()).stdout);
        let lines: Vec<String> = printed.lines().map(str::to_string).collect();
        let row = |name: &str| columns(lines.iter().find(|line| line.starts_with(name)).unwrap());
        (row("rank 0"), row("rank 3"), row("each rank, by formula"), row("DDP, by formula"))
    };
    for (dtype, sharding) in [
        ("f32", &["--sharding", "full-shard"][..]),
        ("f16", &["--sharding", "full-shard"]),
        ("bf16", &["--sharding", "shard-grad-op"]),
        ("f32", &["--sharding", "hybrid-shard", "--shard-ranks", "2"]),
    ] {
        let (first, last, formula, ddp) = memory(&[sharding, &["--param-dtype", dtype]].concat());
        // Columns from the right: optimizer, gradients, parameters.
        for column in [2, 3, 4] {
            assert!(first[column] <= formula[column] + 0.05, "{dtype} {sharding:?}: {first:?}, {formula:?}");
            assert!((first[column] - last[column]).abs() < 0.11, "{first:?}, {last:?}");
        }
        assert!(first[2] < ddp[2] * 0.51, "{first:?}, {ddp:?}");
        assert!(first[1].is_finite() && first[0] > 1.0, "{first:?}");
    }
}
