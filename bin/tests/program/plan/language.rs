//! `plan --model`: language models in every layout.

use std::fs;

use serde_json::Value;

use crate::common::{Folder, text};
use crate::plan::PLAN;

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 1000, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;

/// With these values given, nothing is measured.
const MACHINE: [&str; 6] = ["--bandwidth", "10GB/s", "--latency", "10us", "--flops", "100GFLOP/s"];

fn folder() -> (Folder, String) {
    let folder = Folder::new();
    fs::write(folder.path("config.json"), CONFIG).unwrap();
    let model = folder.argument(".");
    (folder, model)
}

#[test]
fn every_layout_has_a_line_or_a_reason() {
    let (folder, model) = folder();
    let json = folder.argument("plan.json");
    let options =
        ["--ranks", "4", "--length", "128", "--batch-size", "2", "--memory", "80MB", "--json", &json];
    let printed = text(&PLAN.succeed(&[&["--model", &model], &options[..], &MACHINE].concat()).stdout);
    let heading = "llama: 3040704 parameters, f32\n2 rows of 128 tokens a step; Adam\n4 ranks, 80.0 MB each\n\
                   10.0 GB/s, 10.0 us a step of communication, 100 GFLOP/s (as given)\n\n";
    assert!(printed.starts_with(heading), "{printed}");
    let lines: Vec<&str> =
        printed.lines().filter(|line| line.contains(" yes ") || line.contains(" no ")).collect();
    assert!(lines.iter().any(|line| line.starts_with("pp=2,tp=2 ")), "{printed}");
    assert!(printed.contains("4 copies are more than the 2 rows of a step\n"), "{printed}");
    assert!(printed.contains("not possible: pp=4: the 2 rows of a step cannot be divided"), "{printed}");
    assert!(
        printed.contains("not possible: tp=4: ")
            && printed.contains("num_attention_heads of model.layers.0.self_attn: 6"),
        "{printed}"
    );
    let plan: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(
        (&plan["parameters"], plan["layouts"].as_array().unwrap().len()),
        (&3040704.into(), lines.len())
    );
    let totals: Vec<f64> =
        plan["layouts"].as_array().unwrap().iter().map(|layout| layout["total"].as_f64().unwrap()).collect();
    assert!(totals.is_sorted());
    let best = plan["recommended"].as_str().unwrap();
    let line = printed.lines().last().unwrap();
    assert!(line.starts_with(&format!("recommended: --mesh {best}: ")), "{line}");
    let quickest = plan["layouts"].as_array().unwrap().iter().filter(|layout| layout["fits"] == true);
    let quickest = quickest.map(|layout| layout["seconds"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    let of_best = plan["layouts"].as_array().unwrap().iter().find(|layout| layout["mesh"] == best).unwrap();
    assert!(of_best["fits"] == true && of_best["seconds"].as_f64().unwrap() <= 1.02 * quickest, "{printed}");
}

#[test]
fn without_options_it_plans_what_pretrain_does_on_this_machine() {
    let (_folder, model) = folder();
    let printed = text(&PLAN.succeed(&["--model", &model]).stdout);
    assert!(printed.contains("\n8 rows of 1024 tokens a step; Adam\n"), "{printed}");
    assert!(printed.contains("(measured here between 2 processes, where not given)\n"), "{printed}");
    assert!(printed.contains("\nrecommended: --mesh "), "{printed}");
}

#[test]
fn averages_of_groups_have_a_line() {
    let (_folder, model) = folder();
    let of = |mesh: &str| {
        let printed =
            text(&PLAN.succeed(&[&["--model", &model, "--mesh", mesh][..], &MACHINE].concat()).stdout);
        printed
            .lines()
            .find(|line| line.starts_with(&format!("{mesh}: a rank sends ")))
            .map(String::from)
            .unwrap()
    };
    // Two copies send a half each.
    assert!(
        of("far=2").contains(" in each average, ") && of("far=2") != of("far=2,dp=2").replace(",dp=2", "")
    );
}

#[test]
fn stages_of_one_layout_have_a_line_each() {
    let (_folder, model) = folder();
    let file = format!("{model}/config.json");
    let options = ["--mesh", "pp=2,shard=2", "--length", "128", "--batch-size", "8", "--memory", "80MB"];
    let planned = |model: &str, more: &[&str]| {
        text(&PLAN.succeed(&[&["--model", model], &options[..], &MACHINE, more].concat()).stdout)
    };
    let printed = planned(&model, &[]);
    assert_eq!(printed, planned(&file, &[]));
    assert!(
        printed.contains("\npp=2,shard=2: ranks 0-1 yes ")
            && printed.contains("\npp=2,shard=2: ranks 2-3 yes ")
    );
    let activations = |printed: &str| {
        let line = printed.lines().find(|line| line.contains("ranks 0-1")).unwrap().to_string();
        line.split_whitespace().nth(10).unwrap().parse::<f64>().unwrap()
    };
    let again = planned(&model, &["--recompute", "1"]);
    assert!(again.contains("; all blocks are computed again\n"), "{again}");
    assert!(activations(&again) < 0.7 * activations(&printed), "{printed}\n{again}");
    // Attention within documents alone takes less time, and as much memory.
    let of_documents = planned(&model, &["--document-length", "8"]);
    assert!(
        of_documents.contains("8 rows of 128 tokens, in documents of 8, a step; Adam\n"),
        "{of_documents}"
    );
    assert_eq!(activations(&of_documents), activations(&printed));
    let adapters = planned(&model, &["--lora-rank", "4"]);
    assert!(adapters.contains(" parameters, of which "), "{adapters}");
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let (_folder, model) = folder();
    let refused = |options: &[&str], expected: &str| {
        let said = PLAN.refuse(options);
        assert!(said.contains(expected), "{options:?}: {said}");
    };
    refused(&["--model", &model, "--micro-batches", "2"], "--micro-batches");
    refused(&["--model", &model, "--length", "2000"], "the model has 1024 positions");
    refused(&["--model", &model, "--mesh", "pp=2", "--ranks", "4"], "--ranks");
    refused(&["--mesh", "pp=2"], "--model");
    let printed =
        text(&PLAN.succeed(&[&["--model", &model, "--mesh", "dp=16"][..], &MACHINE].concat()).stdout);
    assert!(
        printed.contains("\nnot possible: dp=16: ") && printed.ends_with("\nnothing is possible\n"),
        "{printed}"
    );
}

/// A head for labels has no vocabulary; the pass of a reference may need more than training.
#[test]
fn heads_for_labels_and_references_are_planned() {
    let (folder, model) = folder();
    let json = folder.argument("plan.json");
    let most = |options: &[&str]| {
        let given = ["--model", &model, "--mesh", "dp=1", "--length", "128", "--json", &json];
        let printed = text(&PLAN.succeed(&[&given, options, &MACHINE].concat()).stdout);
        let plan: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        (plan["layouts"][0]["total"].as_f64().unwrap(), printed)
    };
    let (plain, _) = most(&[]);
    let (labelled, printed) = most(&["--labels", "3"]);
    // In place of 1,000 tokens: parameters, gradients and two numbers of Adam.
    assert!(printed.starts_with("llama: 2849280 parameters, f32\n"), "{printed}");
    assert!(labelled < plain - 4.0 * 4.0 * 997.0 * 192.0, "{labelled} {plain}");
    let (itself, printed) = most(&["--reference", &model]);
    let said = "f32; before, a forward pass of a reference of 3040704 parameters over all rows\n";
    assert!(itself == plain && printed.contains(said), "{itself} {plain} {printed}");
    let larger = Folder::new();
    let wide = CONFIG.replace("\"vocab_size\": 1000", "\"vocab_size\": 100000");
    fs::write(larger.path("config.json"), wide).unwrap();
    let (with_larger, _) = most(&["--reference", &larger.argument(".")]);
    // Its embedding and its head alone take more than training.
    assert!(with_larger > plain.max(2.0 * 4.0 * 192.0 * 1e5), "{with_larger} {plain}");
}
