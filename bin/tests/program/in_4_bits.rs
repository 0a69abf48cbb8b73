//! `finetune --base-bits`, and bases of bitsandbytes: the same losses in every layout, after a resumption too, merged weights, and what is refused.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{Folder, Girandole, losses, text};
use crate::language::{FINETUNE, PRETRAIN, folder};

/// Pretrains a model of widths that blocks of 64 divide, 6 and 16 of them.
fn model(folder: &Folder, data: &str, hidden: &str) -> String {
    let out = folder.argument(&format!("model-{hidden}"));
    let sizes = ["--layers", "1", "--hidden", hidden, "--heads", "6", "--length", "16", "--batch-size", "4"];
    PRETRAIN.succeed(&[&["--data", data, "--out", &out, "--steps", "1"], &sizes[..]].concat());
    out
}

#[test]
fn a_base_in_4_bits_has_one_curve() {
    let (folder, data) = folder();
    let base = model(&folder, &data, "384");
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let run = |options: &[&str]| {
        let common = ["--model", &base, "--data", &data, "--out", &out, "--overwrite", "--metrics", &metrics];
        let tuned =
            ["--length", "16", "--batch-size", "4", "--base-bits", "4", "--lora-rank", "2", "--lr", "0.01"];
        let output = FINETUNE.succeed(&[&common, &tuned[..], options].concat());
        (losses(&folder.path("m.jsonl")), text(&output.stderr), text(&output.stdout))
    };
    let (expected, _, said) = run(&["--steps", "4"]);
    assert!(said.contains("on a base in 4 bits"), "{said}");
    assert!(folder.path("out/adapter_model.safetensors").exists());
    for options in
        [&["--mesh", "shard=2"][..], &["--mesh", "tp=2", "--recompute", "1"], &["--mesh", "pp=2,cp=2"]]
    {
        let (got, ..) = run(&[&["--steps", "4"], options].concat());
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 4 && gap < 1e-4, "{options:?}: {got:?}, {expected:?}");
    }
    let kept = folder.argument("kept");
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "2", "--schedule", "constant"];
    run(&[&["--steps", "2"], &keep[..]].concat());
    let (_, said, _) = run(&[&["--steps", "4", "--mesh", "shard=2", "--resume"], &keep[..]].concat());
    assert!(said.contains("going on after step 2"), "{said}");
    let (_, said, _) = run(&["--steps", "1", "--merge"]);
    assert!(
        said.contains("as their 4 bits hold them") && folder.path("out/model.safetensors").exists(),
        "{said}"
    );
    let (mut other, out) = (FINETUNE.command(), folder.argument("other"));
    other.args([
        "--model", &base, "--data", &data, "--out", &out, "--overwrite", "--length", "16", "--lora-rank", "2",
    ]);
    let output = other.args(["--batch-size", "4", "--steps", "4", "--resume"]).args(keep).output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("in 4 bits"), "{said}");
}

/// Rows of any width have 8 bits.
#[test]
fn a_base_in_8_bits_has_one_curve() {
    let (folder, data) = folder();
    let base = model(&folder, &data, "96");
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let run = |options: &[&str]| {
        let common = ["--model", &base, "--data", &data, "--out", &out, "--overwrite", "--metrics", &metrics];
        let tuned =
            ["--length", "16", "--batch-size", "4", "--lora-rank", "2", "--lr", "0.01", "--steps", "4"];
        let output = FINETUNE.succeed(&[&common, &tuned[..], options].concat());
        (losses(&folder.path("m.jsonl")), text(&output.stderr), text(&output.stdout))
    };
    let (expected, _, said) = run(&["--base-bits", "8"]);
    assert!(said.contains("on a base in 8 bits"), "{said}");
    let (plain, ..) = run(&[]);
    assert!(plain != expected && (plain[3] - expected[3]).abs() < 0.05, "{plain:?}, {expected:?}");
    for options in
        [&["--mesh", "shard=2"][..], &["--mesh", "tp=2", "--recompute", "1"], &["--mesh", "pp=2,cp=2"]]
    {
        let (got, ..) = run(&[&["--base-bits", "8"], options].concat());
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 4 && gap < 1e-4, "{options:?}: {got:?}, {expected:?}");
    }
    let (_, said, _) = run(&["--base-bits", "8", "--merge"]);
    assert!(said.contains("as their 8 bits hold them"), "{said}");
}

#[test]
fn what_has_no_4_bits_is_refused() {
    let (folder, data) = folder();
    let base = model(&folder, &data, "384");
    let refuse = |model: &str, options: &[&str]| {
        let out = folder.argument("out");
        let common = ["--model", model, "--data", &data, "--out", &out, "--length", "16", "--base-bits"];
        FINETUNE.refuse(&[&common, options].concat())
    };
    let said = refuse(&base, &["4"]);
    assert!(said.contains("--base-bits: got 4") && said.contains("--lora-rank or --adapters"), "{said}");
    assert!(refuse(&base, &["3", "--lora-rank", "2"]).contains("give 4 or 8"));
    let said = refuse(&base, &["4", "--lora-rank", "2", "--mesh", "tp=4", "--batch-size", "4"]);
    assert!(said.contains("tp=4"), "{said}");
    let odd = model(&folder, &data, "96");
    let said = refuse(&odd, &["4", "--lora-rank", "2"]);
    assert!(said.contains("hidden_size is 96; it must be a multiple of 64"), "{said}");
    let parameters = |options: &[&str]| {
        let json = folder.argument("plan.json");
        Girandole("plan").succeed(
            &[&["--model", &base, "--lora-rank", "2", "--mesh", "dp=1", "--json", &json], options].concat(),
        );
        let plan: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        plan["layouts"][0]["stages"][0]["memory"]["parameters"].as_f64().unwrap()
    };
    // Seven matrices: four of 384 x 384, and three of 384 x 1024, of 4 bytes each, or of 33 for 64, with a scale for 256 of these and one more.
    let saved = (4 * 384 * 384 + 3 * 384 * 1024) as f64 * (4.0 - 33.0 / 64.0);
    let scales = 4 * (4 * (1 + 9) + 3 * (1 + 24));
    assert_eq!(parameters(&[]) - parameters(&["--base-bits", "4"]), saved - f64::from(scales));
    // A scale for each row.
    let scales = 4 * (4 * 384 + 2 * 1024 + 384);
    let saved = (4 * 384 * 384 + 3 * 384 * 1024) as f64 * 3.0 - f64::from(scales);
    assert_eq!(parameters(&[]) - parameters(&["--base-bits", "8"]), saved);
}

/// A folder that transformers saved with bitsandbytes is such a base by itself.
#[test]
fn a_saved_base_is_taken_as_it_is() {
    let (folder, data) = folder();
    let base = folder.argument("base");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/bits/nf4-double");
    let tokens = folder.argument("tokens");
    let tokenize = ["--tokenizer", "characters", "--save-tokenizer", &base, "--out", &tokens, &data];
    Girandole("tokenize").succeed(&tokenize);
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(name), folder.path("base").join(name)).unwrap();
    }
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let common = ["--model", &base, "--data", &data, "--out", &out, "--overwrite", "--length", "16"];
    let run = |options: &[&str]| {
        let tuned =
            ["--batch-size", "4", "--lora-rank", "2", "--lr", "0.01", "--steps", "3", "--metrics", &metrics];
        let output = FINETUNE.succeed(&[&common, &tuned[..], options].concat());
        (losses(&folder.path("m.jsonl")), text(&output.stdout))
    };
    let (expected, said) = run(&[]);
    assert!(said.contains("on a base in 4 bits"), "{said}");
    assert_eq!(run(&["--base-bits", "4"]).0, expected);
    for mesh in ["shard=2", "tp=2", "pp=2"] {
        let (got, _) = run(&["--mesh", mesh]);
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 3 && gap < 1e-4, "{mesh}: {got:?}, {expected:?}");
    }
    let evaluate = |model: &str, more: &[&str]| {
        let options = ["--model", model, "--length", "16", "--data", &data];
        let line = text(&Girandole("evaluate").succeed(&[&options[..], more].concat()).stdout);
        line.split_once("loss: ").unwrap().1.split_once(',').unwrap().0.parse::<f32>().unwrap()
    };
    let adapted = evaluate(&base, &["--adapters", &out]);
    let said = FINETUNE.refuse(&[&common[..], &["--lora-rank", "2", "--base-bits", "8"]].concat());
    assert!(
        said.contains("--base-bits: got 8") && said.contains("in 4 bits, which are taken as they are"),
        "{said}"
    );
    let said = FINETUNE.refuse(&common);
    assert!(said.contains("its weights are quantized (nf4)") && said.contains("--lora-rank"), "{said}");
    run(&["--merge"]);
    assert!((evaluate(&out, &[]) - adapted).abs() < 1e-4);
}
