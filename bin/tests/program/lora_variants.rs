//! `finetune --lora-rslora`, `--lora-dora`, patterns and `--lora-save-modules`: the same losses in every layout, after a resumption and
//! from a folder of adapters; merged and unmerged alike; and what is refused.

use std::fs;

use serde_json::{Value, json};

use crate::common::{Girandole, losses, refuse_with, text};
use crate::language::{FINETUNE, PRETRAIN, SMALL, folder};

const VARIANT: [&str; 10] = [
    "--lora-rank", "4", "--lora-rslora", "--lora-dora", "--lora-rank-pattern", "q_proj=2,down_proj=8",
    "--lora-alpha-pattern", r"layers\.0\..*=3", "--lora-save-modules", "lm_head",
];

#[test]
fn variants_of_adapters_have_one_curve() {
    let (folder, data) = folder();
    let base = folder.argument("base");
    PRETRAIN.succeed(&[&["--data", &data, "--out", &base, "--steps", "1"], &SMALL[..]].concat());
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let run = |options: &[&str]| {
        let common = ["--model", &base, "--data", &data, "--out", &out, "--overwrite", "--metrics", &metrics];
        let rows = ["--length", "16", "--batch-size", "8", "--lr", "0.01", "--schedule", "constant"];
        let output = FINETUNE.succeed(&[&common, &rows[..], options].concat());
        (losses(&folder.path("m.jsonl")), text(&output.stderr), text(&output.stdout))
    };
    let with = |options: &[&str]| run(&[&VARIANT[..], options].concat());
    let evaluate = |options: &[&str]| {
        text(&Girandole("evaluate").succeed(&[&["--data", &data, "--length", "16"], options].concat()).stdout)
    };
    let (expected, _, said) = with(&["--steps", "4"]);
    assert!(said.contains("adapters: rank 4, ") && said.contains("are trained"), "{said}");
    let config: Value =
        serde_json::from_slice(&fs::read(folder.path("out/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["rank_pattern"], json!({"q_proj": 2, "down_proj": 8}));
    assert_eq!(config["alpha_pattern"], json!({r"layers\.0\..*": 3.0}));
    assert_eq!([&config["use_dora"], &config["use_rslora"]], [&json!(true), &json!(true)]);
    let of_adapters = evaluate(&["--model", &base, "--adapters", &out, "--mesh", "tp=2"]);
    for options in
        [&["--mesh", "shard=2"][..], &["--mesh", "tp=2", "--recompute", "1"], &["--mesh", "pp=2,cp=2"]]
    {
        let (got, ..) = with(&[&["--steps", "4"], options].concat());
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 4 && gap < 1e-4, "{options:?}: {got:?}, {expected:?}");
    }
    let kept = folder.argument("kept");
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "2"];
    with(&[&["--steps", "2", "--mesh", "tp=2"], &keep[..]].concat());
    let (got, said, _) = with(&[&["--steps", "4", "--mesh", "shard=2", "--resume"], &keep[..]].concat());
    assert!(said.contains("going on after step 2"), "{said}");
    let last = (got.last().unwrap() - expected[3]).abs();
    assert!(last < 1e-4, "{got:?}, {expected:?}");
    // They go on from their folder, whole modules included.
    fs::rename(folder.path("out"), folder.path("before")).unwrap();
    let before = folder.argument("before");
    let (further, ..) = run(&["--adapters", &before, "--steps", "1", "--mesh", "pp=2"]);
    assert!(further[0] < expected[0], "{further:?}, {expected:?}");
    // Merged, the model computes the same.
    with(&["--steps", "4", "--merge", "--mesh", "tp=2"]);
    assert_eq!(evaluate(&["--model", &out]), of_adapters);
    let exported = folder.argument("exported");
    let adapters = ["--model", &base, "--adapters", &before];
    Girandole("export").succeed(&[&adapters[..], &["--out", &exported, "--to", "transformers"]].concat());
    assert_eq!(evaluate(&["--model", &exported]), of_adapters);
    let alone = folder.argument("alone.gguf");
    let said = Girandole("export").refuse(&[&adapters[..], &["--adapters-only", "--out", &alone]].concat());
    assert!(said.contains("cannot have model.embed_tokens.weight: merge them"), "{said}");
    let planned =
        Girandole("plan").succeed(&["--model", &base, "--lora-rank", "4", "--lora-dora", "--mesh", "tp=2"]);
    assert!(text(&planned.stdout).contains(" parameters, of which "));
}

#[test]
fn variants_that_cannot_be_are_refused() {
    let (folder, data) = folder();
    let (base, out) = (folder.argument("base"), folder.argument("out"));
    PRETRAIN.succeed(&[&["--data", &data, "--out", &base, "--steps", "1"], &SMALL[..]].concat());
    let tune = ["--model", &base, "--data", &data, "--out", &out, "--length", "16", "--steps", "1"];
    for (options, expected) in [
        (&["--lora-rank-pattern", "query=8"][..], "rank_pattern \"query\" matches no layer"),
        (
            &["--lora-targets", "q_proj", "--lora-alpha-pattern", "v_proj=8"],
            "alpha_pattern \"v_proj\" matches only layers without an adapter; layers with one are called q_proj",
        ),
        (&["--lora-rank-pattern", "q_proj=8,v_proj=2,q_proj=4"], "got q_proj=4; q_proj is there twice"),
        (
            &["--lora-alpha-pattern", "q_proj=8,q_proj=8"],
            "--lora-alpha-pattern: got q_proj=8; q_proj is there twice",
        ),
        (&["--lora-rank-pattern", "q_proj=0"], "rank_pattern is 0 for \"q_proj\"; it must be above 0"),
        (&["--lora-rank-pattern", "q_proj"], "give a layer and its number, such as q_proj=8"),
        (&["--lora-alpha-pattern", "q_proj=nan"], "alpha_pattern is NaN for \"q_proj\""),
        (&["--lora-alpha-pattern", "q_(=1"], "alpha_pattern is \"q_(\"; it must be the end"),
        (&["--lora-save-modules", "score"], "save_modules is score; modules that can be trained whole are"),
    ] {
        let said = FINETUNE.refuse(&[&tune[..], &["--lora-rank", "2"], options].concat());
        assert!(said.contains(expected), "{options:?}: {said}");
    }
    for option in ["--lora-rslora", "--lora-dora"] {
        let (said, _) = refuse_with(FINETUNE.command().args(tune), &[option]);
        assert!(said.contains("--lora-rank"), "{said}");
    }
    assert!(!folder.path("out/adapter_config.json").exists());
}
