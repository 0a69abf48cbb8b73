//! `pretrain` of a model with experts: how they are balanced, what is told of it, and what is wrong with them.

use std::collections::HashMap;
use std::fs;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use crate::common::{Folder, Girandole, metrics, refuse_with, text};

const PRETRAIN: Girandole = Girandole("pretrain");

/// A folder with a text, and the configuration of a model with 5 experts.
struct Runs {
    folder: Folder,
    common: Vec<String>,
}

impl Runs {
    fn new() -> Self {
        let runs = Self { folder: Folder::new(), common: Vec::new() };
        let words: String = (0..500).map(|i| ["one ", "two ", "three ", "four\n"][i * i % 7 % 4]).collect();
        fs::write(runs.folder.path("text.txt"), words).unwrap();
        fs::create_dir(runs.folder.path("base")).unwrap();
        runs.configure(&[]);
        let files = ["text.txt", "base", "out", "m.jsonl"].map(|name| runs.folder.argument(name));
        let [data, model, out, metrics] = &files;
        let common = [
            "--data", data, "--model", model, "--out", out, "--metrics", metrics, "--overwrite",
            "--tokenizer", "bytes", "--steps", "3", "--length", "16",
        ];
        Self { common: common.map(String::from).to_vec(), ..runs }
    }

    /// Writes the model's configuration, with other fields.
    fn configure(&self, fields: &[(&str, Value)]) {
        let mut config = json!({
            "model_type": "mixtral", "vocab_size": 260, "hidden_size": 24, "intermediate_size": 12,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
            "initializer_range": 0.3
        });
        for (name, value) in fields {
            config[name] = value.clone();
        }
        fs::write(self.folder.path("base/config.json"), config.to_string()).unwrap();
    }

    /// Runs it; returns what it prints, and of each step the loss, that of balance, and the share of the busiest expert.
    fn run(&self, options: &[&str]) -> (String, Vec<[f64; 3]>) {
        let output = crate::common::succeed(PRETRAIN.command().args(&self.common).args(options));
        let lines = metrics(&self.folder.path("m.jsonl"));
        let of = |line: &Value| {
            ["loss", "balance_loss", "busiest_expert"].map(|name| line[name].as_f64().unwrap_or(f64::NAN))
        };
        let steps = lines.iter().filter(|line| line["event"] == "step").map(of).collect();
        (text(&output.stdout) + &text(&output.stderr), steps)
    }

    fn refuse(&self, options: &[&str]) -> String {
        let mut command = PRETRAIN.command();
        refuse_with(command.args(&self.common), options).0
    }
}

fn assert_equal(got: &[[f64; 3]], expected: &[[f64; 3]], what: &str) {
    let gap = got.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (a - b).abs());
    assert!(got.len() == 3 && gap.fold(0.0, f64::max) < 1e-4, "{what}: {got:?}, expected {expected:?}");
}

#[test]
fn experts_are_balanced_as_it_is_asked_for() {
    let runs = Runs::new();
    let row = ["--balance", "row", "--balance-coefficient", "0.5"];
    let page = runs.folder.argument("page.html");
    let (said, expected) = runs.run(&[&row[..], &["--report", &page, "--log-every", "1"]].concat());
    let [_, balance, busiest] = expected[0];
    // At least the coefficient in each of two layers, and a share of one of five experts.
    assert!((1.0..2.0).contains(&balance) && (0.2..=0.5).contains(&busiest), "{expected:?}");
    assert!(said.contains(&format!(", balance {balance:.4}, ")), "{said}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("Balance loss") && page.contains("Busiest expert (%)"));
    assert!(
        page.contains("Experts in step 3") && page.contains("<td>model.layers.1.block_sparse_moe.gate</td>")
    );
    let lines = metrics(&runs.folder.path("m.jsonl"));
    let loads: Vec<&Value> = lines.iter().filter(|line| line["event"] == "experts").collect();
    assert_eq!(
        loads.iter().map(|line| line["step"].as_u64()).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3)]
    );
    for router in loads.iter().flat_map(|line| line["routers"].as_array().unwrap()) {
        let tokens: Vec<u64> = serde_json::from_value(router["tokens"].clone()).unwrap();
        // Each of the 8 rows of 16 tokens chooses two.
        assert_eq!((tokens.len(), tokens.iter().sum::<u64>()), (5, 2 * 8 * 16), "{router}");
    }
    for options in [&["--accumulate", "4"][..], &["--mesh", "dp=2", "--accumulate", "2"], &["--mesh", "pp=2"]]
    {
        assert_equal(&runs.run(&[&row[..], options].concat()).1, &expected, &options.join(" "));
    }
    let (_, of_batch) = runs.run(&["--balance", "batch", "--balance-coefficient", "0.5"]);
    runs.configure(&[("output_router_logits", json!(true)), ("router_aux_loss_coef", json!(0.5))]);
    assert_equal(&runs.run(&[]).1, &of_batch, "the folder's");
    let (said, without) = runs.run(&["--balance", "none"]);
    assert!(without[0][1].is_nan() && without[0][2] == busiest, "{without:?}");
    assert!(!said.contains("balance"), "{said}");
}

/// Heads that score documents are balanced only where that is asked for, whatever the folder says.
#[test]
fn a_head_for_labels_has_no_balance_of_the_folder() {
    let runs = Runs::new();
    runs.configure(&[("output_router_logits", json!(true))]);
    assert!(runs.run(&[]).1[0][1] > 0.0);
    let [model, data, out] = ["out", "data.jsonl", "tuned"].map(|name| runs.folder.argument(name));
    let line = |number: usize| {
        format!("{{\"text\": \"document {number}\", \"label\": \"{}\"}}\n", ["odd", "even"][number % 2])
    };
    fs::write(&data, (0..40).map(line).collect::<String>()).unwrap();
    let metrics_file = runs.folder.argument("tuned.jsonl");
    let tune = [
        "--model", &model, "--data", &data, "--out", &out, "--overwrite", "--metrics", &metrics_file,
        "--task", "single-label", "--labels", "odd,even", "--steps", "2", "--length", "16",
    ];
    let has_balance = |options: &[&str]| {
        Girandole("finetune").succeed(&[&tune[..], options].concat());
        let lines = metrics(&runs.folder.path("tuned.jsonl"));
        let steps: Vec<_> = lines.iter().filter(|line| line["event"] == "step").collect();
        assert_eq!(steps.len(), 2);
        steps.iter().all(|line| line["balance_loss"].as_f64().is_some())
    };
    assert!(!has_balance(&[]));
    assert!(has_balance(&["--balance", "batch"]));
}

#[test]
fn another_balance_of_a_resumed_run_is_named() {
    let runs = Runs::new();
    let kept = runs.folder.argument("kept");
    let keep = ["--checkpoint-dir", &kept, "--balance"];
    runs.run(&[&keep[..], &["row"]].concat());
    let (said, _) = runs.run(&[&keep[..], &["batch", "--balance-coefficient", "0.1", "--resume"]].concat());
    assert!(said.contains("--balance row, now batch; --balance-coefficient 0.001, now 0.1"), "{said}");
}

#[test]
fn a_balance_that_cannot_be_is_refused() {
    let runs = Runs::new();
    let said = runs.refuse(&["--balance-coefficient", "0.1"]);
    assert!(said.contains("--balance-coefficient: got 0.1; nothing balances the experts"), "{said}");
    let said = runs.refuse(&["--balance", "row", "--balance-coefficient", "-1"]);
    assert!(said.contains("give a finite number, 0 or more"), "{said}");
    let said = runs.refuse(&["--balance", "bias"]);
    assert!(said.contains("--balance: got bias; experts of a mixtral have no corrections"), "{said}");
    runs.configure(&[("num_local_experts", json!(0))]);
    let said = runs.refuse(&["--balance", "row"]);
    assert!(said.contains("--balance: got row; this model, a mixtral, has no experts"), "{said}");
}

/// DeepSeek V3: the same losses in every layout, also of a run that goes on with another one, and corrections in the saved folder.
#[test]
fn corrections_move_are_saved_and_resumed_in_another_layout() {
    let runs = Runs::new();
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 260, "hidden_size": 24, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1, "initializer_range": 0.3
    });
    fs::write(runs.folder.path("base/config.json"), config.to_string()).unwrap();
    let bias = ["--balance", "bias", "--balance-coefficient", "0.1"];
    let saved = || {
        let file = runs.folder.path("out/model.safetensors");
        let all = training::load_tensors(&file, &Device::Cpu).unwrap();
        all["model.layers.1.mlp.gate.e_score_correction_bias"].to_vec1::<f32>().unwrap()
    };
    let losses = |steps: Vec<[f64; 3]>| steps.into_iter().map(|[loss, ..]| loss).collect::<Vec<_>>();
    let expected = losses(runs.run(&bias).1);
    let corrections = saved();
    // Three steps of a tenth, up or down, or of nothing.
    assert!(corrections.iter().any(|one| one.abs() > 0.05), "{corrections:?}");
    assert!(
        corrections.iter().all(|one| (one * 10.0 - (one * 10.0).round()).abs() < 1e-4),
        "{corrections:?}"
    );
    let equal = |got: &[f64], what: &str| {
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(got.len() == 3 && gap < 1e-4, "{what}: {got:?}, expected {expected:?}");
        assert_eq!(saved(), corrections, "{what}");
    };
    for options in [&["--accumulate", "4"][..], &["--mesh", "ep=2"], &["--mesh", "pp=2"]] {
        equal(&losses(runs.run(&[&bias[..], options].concat()).1), &options.join(" "));
    }
    let [kept, other] = ["kept", "other"].map(|name| runs.folder.argument(name));
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "2", "--mesh", "shard=2"];
    runs.run(&[&bias[..], &keep].concat());
    let second = runs.folder.argument("kept/checkpoint-00000001");
    let resume = ["--checkpoint-dir", &other, "--resume", &second, "--mesh", "tp=2"];
    let (said, rest) = runs.run(&[&bias[..], &resume].concat());
    assert!(said.contains("going on after step 2"), "{said}");
    equal(&[&expected[..3 - rest.len()], &losses(rest)].concat(), "resumed");
}

/// A saved model of which one tensor is missing, or is something else.
#[test]
fn a_folder_of_experts_that_is_not_whole_is_refused_by_name() {
    let runs = Runs::new();
    runs.run(&[]);
    let [model, out, data] = ["out", "tuned", "text.txt"].map(|name| runs.folder.argument(name));
    let file = runs.folder.path("out/model.safetensors");
    let whole = training::load_tensors(&file, &Device::Cpu).unwrap();
    let fail = |tensors: &HashMap<String, Tensor>| {
        candle_core::safetensors::save(tensors, &file).unwrap();
        let mut command = Girandole("finetune").command();
        command.args(["--model", &model, "--data", &data, "--out", &out, "--overwrite", "--steps", "2"]);
        let output = command.args(["--length", "16"]).output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let mut tensors = whole.clone();
    let expert = tensors.keys().find(|name| name.contains("experts.3.")).unwrap().clone();
    tensors.remove(&expert);
    let said = fail(&tensors);
    assert!(said.contains(&expert), "{said}");
    let mut tensors = whole;
    let router = tensors
        .keys()
        .find(|name| name.contains("layers.1.") && name.ends_with("gate.weight"))
        .unwrap()
        .clone();
    let broken = (&tensors[&router] * f64::NAN).unwrap();
    tensors.insert(router.clone(), broken);
    let said = fail(&tensors);
    assert!(said.contains(router.trim_end_matches(".weight")) && said.contains("NaN"), "{said}");
}

#[test]
fn a_layout_or_a_configuration_that_experts_do_not_have_is_refused() {
    let runs = Runs::new();
    let said = runs.refuse(&["--mesh", "ep=6", "--batch-size", "12"]);
    assert!(said.contains("ep=6") && said.contains('5'), "{said}");
    runs.configure(&[("num_experts_per_token", json!(2))]);
    let said = runs.refuse(&[]);
    assert!(said.contains("num_experts_per_token"), "{said}");
}
