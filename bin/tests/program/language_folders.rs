//! What `pretrain`, `finetune` and `evaluate` read from a model's folder and write to one: frozen weights, types, the
//! user's own files, numbers that are none; and the rows of evaluations.

use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use crate::common::{Folder, Girandole, metrics, succeed, text};
use crate::language::{FINETUNE, PRETRAIN, SMALL, folder};

const EVALUATE: Girandole = Girandole("evaluate");

type Tensors = HashMap<String, Tensor>;

/// Returns a folder with a text and a model, and the arguments of `finetune` for them.
fn base(options: &[&str]) -> (Folder, Vec<String>) {
    let (folder, data) = folder();
    let model = folder.argument("base");
    PRETRAIN.succeed(&[&["--data", &data, "--out", &model, "--steps", "2"], &SMALL[..], options].concat());
    let tune = ["--model", &model, "--data", &data, "--length", "16"].map(String::from).to_vec();
    (folder, tune)
}

fn with<'a>(tune: &'a [String], options: &[&'a str]) -> Vec<&'a str> {
    tune.iter().map(String::as_str).chain(options.iter().copied()).collect()
}

fn tensors(model: &Path) -> Tensors {
    candle_core::safetensors::load(model.join("model.safetensors"), &Device::Cpu).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Changes the last number of one tensor.
fn change(model: &Path, to: f32) {
    let mut tensors = tensors(model);
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut changed = numbers(&tensors[name]);
    *changed.last_mut().unwrap() = to;
    let shape = tensors[name].shape().clone();
    tensors.insert(name.into(), Tensor::from_vec(changed, shape, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, model.join("model.safetensors")).unwrap();
}

#[test]
fn adapters_go_on_with_the_same_base_only() {
    let (folder, tune) = base(&[]);
    let (out, kept) = (folder.argument("tuned"), folder.argument("kept"));
    let lora = ["--lora-rank", "2", "--out", &out, "--checkpoint-dir", &kept];
    FINETUNE.succeed(&with(&tune, &[&lora[..], &["--steps", "2", "--mesh", "shard=2"]].concat()));
    let resume = [&lora[..], &["--steps", "4", "--resume"]].concat();
    // Where adapters lie, programs find their base.
    let config = fs::read_to_string(folder.path("tuned/adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let base = folder.path("base").canonicalize().unwrap();
    assert_eq!(config["base_model_name_or_path"].as_str(), base.to_str());
    // One more bit of the last number.
    let before = fs::read(folder.path("base/model.safetensors")).unwrap();
    let mut bytes = before.clone();
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    fs::write(folder.path("base/model.safetensors"), bytes).unwrap();
    let said = FINETUNE.refuse(&with(&tune, &resume));
    assert!(said.contains("the frozen weights: not as in that run"), "{said}");
    fs::write(folder.path("base/model.safetensors"), before).unwrap();
    FINETUNE.succeed(&with(&tune, &resume));
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let (folder, tune) = base(&[]);
    let (model, data, out) = (folder.argument("base"), folder.argument("text.txt"), folder.argument("tuned"));
    for (number, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        change(&folder.path("base"), number);
        let expected =
            format!("model.safetensors: tensor model.layers.1.mlp.up_proj.weight has {shown} at [95, 31]: ");
        let refuse = |command: &Girandole, arguments: &[&str]| {
            let output = command.command().args(arguments).output().unwrap();
            let said = text(&output.stderr);
            assert!(!output.status.success() && said.contains(&expected), "{said}");
            assert!(output.stdout.is_empty() || text(&output.stdout).starts_with("model: "), "{said}");
        };
        for mesh in ["dp=1", "shard=2", "tp=2"] {
            refuse(&FINETUNE, &with(&tune, &["--out", &out, "--steps", "1", "--mesh", mesh]));
            refuse(&EVALUATE, &["--model", &model, "--data", &data, "--mesh", mesh]);
        }
        refuse(&Girandole("generate"), &["--model", &model, "--prompt", "one"]);
    }
    // Numbers that the type of parameters does not have.
    change(&folder.path("base"), 70_000.0);
    let half = ["--out", &out, "--steps", "1", "--parameters", "f16"];
    let said = FINETUNE.command().args(with(&tune, &half)).output().unwrap();
    assert!(text(&said.stderr).contains("has 70000 at [95, 31], which f16 cannot hold: take a wider type"));
    // A model that computes what is no number.
    let mut all = tensors(&folder.path("base"));
    let large = (all["model.norm.weight"].ones_like().unwrap() * 3e38).unwrap();
    all.insert("model.norm.weight".into(), large);
    candle_core::safetensors::save(&all, folder.path("base/model.safetensors")).unwrap();
    for mesh in ["dp=1", "dp=2"] {
        let output = EVALUATE.command().args(["--model", &model, "--data", &data, "--mesh", mesh]).output();
        let output = output.unwrap();
        let said = text(&output.stderr);
        assert!(said.starts_with("error: the model: the loss is ") && output.stdout.is_empty(), "{said}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn a_model_keeps_the_type_of_its_folder() {
    let (folder, tune) = base(&["--save-dtype", "bf16"]);
    let before = tensors(&folder.path("base"));
    assert!(before.values().all(|tensor| tensor.dtype() == DType::BF16));
    let bytes = |name: &str| fs::metadata(folder.path(name).join("model.safetensors")).unwrap().len();
    let dtype = |name: &str| -> String {
        let config = fs::read_to_string(folder.path(name).join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        config["dtype"].as_str().unwrap().into()
    };
    let equal = |name: &str, to: DType| {
        let after = tensors(&folder.path(name));
        assert_eq!(after.len(), before.len());
        for (name, tensor) in after {
            assert_eq!(tensor.dtype(), to, "{name}");
            assert!(numbers(&tensor) == numbers(&before[&name]), "{name}");
        }
    };
    // Nothing is trained with a learning rate of 0.
    let none = ["--steps", "2", "--lr", "0"];
    for (name, options) in [
        ("whole", &[][..]),
        ("sharded", &["--mesh", "shard=2"]),
        ("merged", &["--lora-rank", "2", "--merge", "--mesh", "tp=2"]),
        ("bf16", &["--parameters", "bf16"]),
    ] {
        FINETUNE.succeed(&with(&tune, &[&none[..], options, &["--out", &folder.argument(name)]].concat()));
        equal(name, DType::BF16);
        assert_eq!((bytes(name), &*dtype(name)), (bytes("base"), "bfloat16"), "{name}");
    }
    let wide = ["--out", &folder.argument("wide"), "--save-dtype", "f32"];
    FINETUNE.succeed(&with(&tune, &[&none[..], &wide].concat()));
    equal("wide", DType::F32);
    assert!(dtype("wide") == "float32" && bytes("wide") > bytes("base") * 3 / 2);
    // What is trained is rounded to the nearest, once.
    let (narrow, exact) = (folder.argument("narrow"), folder.argument("exact"));
    FINETUNE.succeed(&with(&tune, &["--steps", "2", "--out", &narrow]));
    FINETUNE.succeed(&with(&tune, &["--steps", "2", "--out", &exact, "--save-dtype", "f32"]));
    let (narrow, exact) = (tensors(&folder.path("narrow")), tensors(&folder.path("exact")));
    for (name, tensor) in exact {
        let rounded = numbers(&tensor).into_iter().map(|number| {
            let bits = number.to_bits();
            f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        });
        assert!(rounded.eq(numbers(&narrow[&name])), "{name}");
    }
    let adapters = ["--lora-rank", "2", "--out", &folder.argument("adapters"), "--save-dtype", "f32"];
    let said = FINETUNE.refuse(&with(&tune, &adapters));
    assert!(said.contains("--save-dtype: got f32; adapters alone are saved"), "{said}");
}

#[test]
fn files_that_no_run_has_written_stay() {
    let (folder, data) = folder();
    let (out, kept) = (folder.argument("out"), folder.argument("kept"));
    let run = |options: &[&str]| {
        let common = ["--data", &data, "--out", &out];
        text(&PRETRAIN.succeed(&[&common[..], &SMALL, options].concat()).stderr)
    };
    let checkpoints = ["--checkpoint-dir", &kept, "--checkpoint-every", "1"];
    run(&[&checkpoints[..], &["--steps", "2"]].concat());
    let own = |name: &str| folder.path("out").join(name);
    let mine = ["chat_template.jinja", "generation_config.json", "notes.txt"];
    mine.iter().for_each(|name| fs::write(own(name), "{}").unwrap());
    fs::create_dir(own("additional_chat_templates")).unwrap();
    fs::write(own("additional_chat_templates/rag.jinja"), "mine").unwrap();
    let stay = || {
        mine.iter().all(|name| fs::read_to_string(own(name)).unwrap() == "{}")
            && own("additional_chat_templates/rag.jinja").exists()
    };
    let said = run(&[&checkpoints[..], &["--steps", "3", "--resume"]].concat());
    let expected = format!(
        "note: in {out}, additional_chat_templates/rag.jinja, chat_template.jinja, generation_config.json are not this run's: the model is used with them\n"
    );
    assert!(stay() && said.ends_with(&expected), "{said}");
    assert!(run(&["--steps", "2", "--overwrite"]).ends_with(&expected) && stay());
    // What a run has brought goes with its model.
    fs::remove_dir_all(own("additional_chat_templates")).unwrap();
    fs::rename(&out, folder.path("chat")).unwrap();
    let tune = [
        "--model",
        &folder.argument("chat"),
        "--data",
        &data,
        "--out",
        &out,
        "--steps",
        "1",
        "--length",
        "16",
    ];
    FINETUNE.succeed(&tune);
    assert!(own("chat_template.jinja").exists() && own("generation_config.json").exists());
    fs::write(own("generation_config.json"), "{\"top_k\": 3}").unwrap();
    let said = run(&["--steps", "2", "--overwrite"]);
    assert!(!own("chat_template.jinja").exists(), "{said}");
    assert_eq!(fs::read_to_string(own("generation_config.json")).unwrap(), "{\"top_k\": 3}");
    assert_eq!(
        said,
        format!("note: in {out}, generation_config.json are not this run's: the model is used with them\n")
    );
    // Adapters that somebody has put beside the model are not removed by a run that goes on.
    let again = [&checkpoints[..], &["--steps", "4", "--resume"]].concat();
    fs::write(own("adapter_config.json"), "{}").unwrap();
    let said = PRETRAIN.refuse(&[&["--data", &data, "--out", &out], &SMALL[..], &again].concat());
    assert!(said.contains("it holds adapters (adapter_config.json) of another run"), "{said}");
    assert!(own("adapter_config.json").exists());
}

/// Conversations, of which the answers count.
fn chats(count: usize) -> String {
    let line = |i: usize| {
        let (question, answer) = ("what ".repeat(1 + i % 3), ["one two", "three", "four four one"][i % 3]);
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": {question:?}}}, {{\"role\": \"assistant\", \"content\": {answer:?}}}]}}\n"
        )
    };
    (0..count).map(line).collect()
}

/// A base without a chat template learns conversations by a named one, and the model or its adapters have it afterwards.
#[test]
fn a_named_chat_template_is_saved_with_the_model() {
    let (folder, _) = base(&[]);
    fs::write(folder.path("chats.jsonl"), chats(30)).unwrap();
    let (base, data, out) =
        (folder.argument("base"), folder.argument("chats.jsonl"), folder.argument("tuned"));
    let tune = ["--model", &base, "--data", &data, "--length", "16", "--steps", "1", "--out", &out];
    let refused = FINETUNE.refuse(&tune);
    assert!(refused.contains("or give --chat-template"), "{refused}");
    for more in [&[][..], &["--overwrite", "--lora-rank", "2"]] {
        let chatml = ["--chat-template", "chatml"];
        FINETUNE.succeed(&[&tune[..], &chatml, more].concat());
        let saved = fs::read_to_string(folder.path("tuned/chat_template.jinja")).unwrap();
        assert!(saved.contains("<|im_start|>"), "{saved}");
        fs::remove_dir_all(&out).unwrap();
    }
    // Another run removes it, as the tokenizer of the model before.
    FINETUNE.succeed(&[&tune[..], &["--chat-template", "chatml"]].concat());
    let text = folder.argument("text.txt");
    let plain = ["--model", &base, "--data", &text, "--length", "16", "--steps", "1", "--out", &out];
    FINETUNE.succeed(&[&plain[..], &["--overwrite"]].concat());
    assert!(!folder.path("tuned/chat_template.jinja").exists());
}

/// A model, and held-out conversations: rows of 16 tokens, more than a batch and fewer, with a last one that is not full.
struct HeldOut {
    folder: Folder,
    tune: Vec<String>,
}

impl HeldOut {
    fn new() -> Self {
        let (folder, tune) = base(&[]);
        let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
        fs::write(folder.path("base/chat_template.jinja"), template).unwrap();
        for (name, count) in [("many.jsonl", 30), ("few.jsonl", 2)] {
            fs::write(folder.path(name), chats(count)).unwrap();
        }
        Self { folder, tune }
    }

    /// Returns the loss that `finetune` prints of an evaluation, and the line about its rows.
    fn tuned(&self, held: &str, rows: &str, options: &[&str]) -> (f64, String) {
        let (out, held) = (self.folder.argument("tuned"), self.folder.argument(held));
        let own = ["--out", &out, "--overwrite", "--steps", "1", "--lr", "0"];
        let own = [&own[..], &["--evaluate", &held, "--evaluate-rows", rows], options].concat();
        let lines = text(&FINETUNE.succeed(&with(&self.tune, &own)).stdout);
        let rows = lines.lines().find(|line| line.starts_with("evaluation: ")).unwrap().to_string();
        (loss(&lines, "evaluation loss "), rows)
    }

    /// Returns what `evaluate` prints.
    fn evaluated(&self, held: &str, options: &[&str]) -> String {
        let (model, held) = (self.folder.argument("base"), self.folder.argument(held));
        let common = ["--model", &model, "--data", &held, "--length", "16"];
        text(&EVALUATE.succeed(&[&common[..], options].concat()).stdout)
    }
}

fn loss(line: &str, before: &str) -> f64 {
    let rest = line.split_once(before).unwrap_or_else(|| panic!("{line}")).1;
    rest.split(',').next().unwrap().parse().unwrap()
}

#[test]
fn an_evaluation_has_exactly_the_rows_that_are_asked_for() {
    let data = HeldOut::new();
    let (expected, rows) = data.tuned("many.jsonl", "11", &[]);
    assert!(
        rows.starts_with("evaluation: the first 11 of ") && rows.contains(" rows of 16 tokens"),
        "{rows}"
    );
    assert!((expected - data.tuned("many.jsonl", "10000", &[]).0).abs() > 1e-3);
    for options in [
        &["--batch-size", "1"][..],
        &["--batch-size", "16"],
        &["--mesh", "dp=2"],
        &["--mesh", "pp=2,shard=2"],
        &["--world-size", "3", "--batch-size", "6", "--accumulate", "2"],
    ] {
        let (found, _) = data.tuned("many.jsonl", "11", options);
        assert!((found - expected).abs() < 2e-4, "{options:?}: {found}, expected {expected}");
    }
}

#[test]
fn conversations_are_evaluated_as_finetune_does_it() {
    let data = HeldOut::new();
    for held in ["many.jsonl", "few.jsonl"] {
        let all = data.evaluated(held, &[]);
        let expected = loss(&all, "loss: ");
        for options in [
            &["--batch-size", "3"][..],
            &["--mesh", "dp=2"],
            &["--mesh", "pp=2,tp=2"],
            &["--mesh", "shard=2"],
        ] {
            let line = data.evaluated(held, options);
            assert_eq!(line.split(',').next(), all.split(',').next(), "{options:?}");
            assert!((loss(&line, "loss: ") - expected).abs() < 2e-4, "{options:?}: {line}, {all}");
        }
        let (found, rows) = data.tuned(held, "10000", &[]);
        assert!((found - expected).abs() < 2e-4, "{held}: {found}, {all}");
        assert!(rows.contains(" rows of 16 tokens (") && rows.contains(" whole documents, "), "{rows}");
        assert!(!rows.contains("first"), "{rows}");
    }
}

#[test]
fn rows_are_packed_as_it_is_asked_for() {
    let data = HeldOut::new();
    let whole = data.tuned("many.jsonl", "11", &[]).0;
    let stream = data.tuned("many.jsonl", "11", &["--packing", "stream"]);
    assert!(stream.1.ends_with(" rows of 16 tokens"), "{}", stream.1);
    let documents = data.tuned("many.jsonl", "11", &["--packing", "documents"]).0;
    assert!((whole - stream.0).abs() > 1e-3 && (documents - stream.0).abs() > 1e-3, "{documents}");
    for options in [
        &["--mesh", "pp=2,dp=2", "--packing", "documents"][..],
        &["--mesh", "cp=2", "--packing", "documents"][..],
        &["--mesh", "tp=2", "--sequence-parallel", "--packing", "documents"],
        &["--mesh", "shard=2", "--recompute", "1", "--packing", "documents"],
    ] {
        let (found, _) = data.tuned("many.jsonl", "11", options);
        assert!((found - documents).abs() < 2e-4, "{options:?}: {found}, expected {documents}");
    }
    let out = data.folder.argument("refused");
    for (options, said) in [
        (&["--packing", "some"][..], "give stream, documents or whole"),
        (&["--too-long", "error"], "--too-long: got error"),
        (&["--packing", "stream", "--too-long", "drop"], "--too-long: got drop"),
        (&["--packing", "whole", "--too-long", "error"], "document 1 "),
    ] {
        let own = [&["--out", &out, "--steps", "1"][..], options].concat();
        let refused = FINETUNE.refuse(&with(&data.tune, &own));
        assert!(refused.contains(said), "{options:?}: {refused}");
    }
}

/// Returns the lines of a metrics file of one kind.
fn events(path: &str, kind: &str) -> Vec<Value> {
    metrics(Path::new(path)).into_iter().filter(|line| line["event"] == kind).collect()
}

#[test]
fn what_became_of_documents_is_in_the_metrics() {
    let data = HeldOut::new();
    // 8 tokens, or one for each byte of a longer answer, which no row holds.
    let line = |i: usize| {
        let answer = "b".repeat(if i.is_multiple_of(3) { 40 } else { 1 });
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        )
    };
    fs::write(data.folder.path("chats.jsonl"), (0..30).map(line).collect::<String>()).unwrap();
    let (model, chats) = (data.folder.argument("base"), data.folder.argument("chats.jsonl"));
    let (out, file) = (data.folder.argument("tuned"), data.folder.argument("m.jsonl"));
    let common = ["--model", &model, "--data", &chats, "--steps", "1", "--out", &out, "--metrics", &file];
    let common = [&common[..], &["--length", "16", "--overwrite"]].concat();
    let packing = |more: &[&str]| {
        let lines = text(&FINETUNE.succeed(&[&common[..], more].concat()).stdout);
        (lines, events(&file, "summary")[0]["packing"].clone())
    };
    for too_long in ["cut", "drop"] {
        let (lines, of) = packing(&["--too-long", too_long]);
        let numbers = ["documents", "cut", "dropped"].map(|name| of[name].as_u64().unwrap());
        let padding = 100.0 * of["padding"].as_f64().unwrap();
        let [documents, cut, dropped] = numbers;
        let expected = if too_long == "cut" { [30, 10, 0] } else { [30, 0, 10] };
        assert_eq!([documents, cut, dropped], expected);
        let said =
            format!("({documents} whole documents, {cut} cut, {dropped} left out; {padding:.1} % padding)");
        assert!(lines.contains(&said), "{said}: {lines}");
    }
    assert_eq!(packing(&["--packing", "stream"]).1, Value::Null);
}

/// As many steps as all rows need; the same from standard input.
#[test]
fn epochs_are_all_rows_and_data_may_come_from_standard_input() {
    let (folder, tune) = base(&[]);
    let (model, out, file) = (folder.argument("base"), folder.argument("tuned"), tune[3].clone());
    let train = |data: &str, name: &str, more: &[&str]| {
        let file_of_losses = folder.argument(name);
        let own = ["--model", &model, "--data", data, "--length", "16", "--out", &out, "--overwrite"];
        let own =
            [&own[..], &["--metrics", &file_of_losses, "--epochs", "2", "--batch-size", "6"], more].concat();
        let input = File::open(&file).unwrap();
        let lines = text(&succeed(FINETUNE.command().args(own).stdin(input)).stdout);
        let losses: Vec<Value> =
            events(&file_of_losses, "step").iter().map(|step| step["loss"].clone()).collect();
        (lines, losses)
    };
    let (lines, losses) = train(&file, "file.jsonl", &[]);
    let rows = lines.split_once("data: ").unwrap().1.split_once(" rows").unwrap().0;
    let steps = (2 * rows.parse::<usize>().unwrap()).div_ceil(6);
    assert!(lines.contains(&format!("steps: {steps} of 6 rows, for 2 epochs")), "{lines}");
    assert_eq!(losses.len(), steps);
    for more in [&[][..], &["--mesh", "dp=2"]] {
        let (_, found) = train("-", "input.jsonl", more);
        let gaps = found.iter().zip(&losses).map(|(a, b)| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs());
        assert!(found.len() == steps && gaps.fold(0.0, f64::max) < 1e-3, "{more:?}: {found:?}, {losses:?}");
    }
}
