//! `pretrain` and `finetune`: all layouts give the same results, and a killed run resumes in another layout.

use std::fs;

use candle_core::{DType, Device, Tensor};
use models::{CausalLm, Lora, Tokenizer, Weights};
use training::build::Builder;

use crate::common::{Folder, Girandole, losses, metrics, refuse_with, text};

pub(crate) const PRETRAIN: Girandole = Girandole("pretrain");
pub(crate) const FINETUNE: Girandole = Girandole("finetune");

/// A small model, with rows that every layout can divide.
pub(crate) const SMALL: [&str; 12] = [
    "--layers", "2", "--hidden", "32", "--heads", "4", "--length", "16", "--batch-size", "8", "--lr", "0.01",
];

fn words() -> String {
    (0..2000).map(|i| ["one ", "two ", "three ", "four\n"][i * i % 7 % 4]).collect()
}

pub(crate) fn folder() -> (Folder, String) {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), words()).unwrap();
    let data = folder.argument("text.txt");
    (folder, data)
}

/// Returns the losses of a run, and the logits of the model that it saved.
pub(crate) fn pretrain(folder: &Folder, data: &str, options: &[&str]) -> (Vec<f32>, Vec<f32>) {
    let (out, metrics) = (folder.argument("out"), folder.argument("metrics.jsonl"));
    let common = ["--data", data, "--out", &out, "--overwrite", "--metrics", &metrics, "--steps", "6"];
    let output = PRETRAIN.succeed(&[&common, &SMALL[..], options].concat());
    // Numbers of 16 bits are multiplied in a way that depends on the processor.
    let said = text(&output.stderr);
    let is_noted = said.starts_with("note: matrix products are computed ") && said.lines().count() == 1;
    assert!(
        if options.contains(&"--parameters") { is_noted } else { said.is_empty() },
        "{options:?}: {said}"
    );
    let printed = text(&output.stdout);
    assert!(printed.contains("step 6/6: loss ") && printed.contains("saved in "), "{printed}");
    (losses(&folder.path("metrics.jsonl")), logits(&out))
}

fn logits(folder: &str) -> Vec<f32> {
    let weights = Weights::folder(folder.as_ref()).unwrap();
    Tokenizer::from_folder(folder.as_ref()).unwrap().check(weights.config()).unwrap();
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let model = CausalLm::new(weights.config(), &builder).unwrap();
    let tokens = Tensor::new(&[[111u32, 110, 101, 32, 116, 119]], &Device::Cpu).unwrap();
    model.logits(&tokens).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_near(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(gap < 2e-4, "{what}: {gap}");
}

#[test]
fn every_layout_learns_the_same() {
    let (folder, data) = folder();
    let expected = pretrain(&folder, &data, &[]);
    assert!(expected.0[5] < expected.0[0] - 0.5, "{:?}", expected.0);
    let lines = metrics(&folder.path("metrics.jsonl"));
    let first = &lines[0];
    assert!(first["tokens_per_second"].as_f64().unwrap() > 0.0 && first["grad_norm"].as_f64().unwrap() > 0.0);
    assert!((first["learning_rate"].as_f64().unwrap() - 0.01).abs() < 1e-12);
    for layout in ["dp=2", "pp=2,shard=2", "shard=2,tp=2", "pp=2,cp=2"] {
        let got = pretrain(&folder, &data, &["--mesh", layout, "--recompute", "1"]);
        assert_near(&got.0, &expected.0, layout);
        assert_near(&got.1, &expected.1, layout);
    }
    let got = pretrain(&folder, &data, &["--world-size", "2", "--accumulate", "2"]);
    assert_near(&got.0, &expected.0, "accumulated");
    let got =
        pretrain(&folder, &data, &["--mesh", "tp=2", "--sequence-parallel", "--recompute", "selective"]);
    assert_near(&got.0, &expected.0, "divided sequences");
    assert_near(&got.1, &expected.1, "divided sequences");
}

#[test]
fn dropout_is_the_same_in_every_layout() {
    let (folder, data) = folder();
    let without = pretrain(&folder, &data, &[]);
    let expected = pretrain(&folder, &data, &["--dropout", "0.3"]);
    assert!((expected.0[5] - without.0[5]).abs() > 5e-3, "{:?}, {:?}", expected.0, without.0);
    for layout in ["tp=2", "pp=2,shard=2"] {
        let got = pretrain(&folder, &data, &["--dropout", "0.3", "--mesh", layout]);
        assert_near(&got.0, &expected.0, layout);
        assert_near(&got.1, &expected.1, layout);
    }
    let (model, out) = (folder.argument("out"), folder.argument("tuned"));
    let tune = ["--model", &model, "--data", &data, "--out", &out, "--steps", "1", "--length", "16"];
    FINETUNE.succeed(&[&tune, &["--lora-rank", "2", "--lora-dropout", "0.25"][..]].concat());
    let config = fs::read_to_string(folder.path("tuned/adapter_config.json")).unwrap();
    assert!(config.contains("\"lora_dropout\": 0.25"), "{config}");
    let (said, _) = refuse_with(FINETUNE.command().args(tune), &["--lora-dropout", "0.25"]);
    assert!(said.contains("--lora-rank"), "{said}");
    let (said, _) = refuse_with(FINETUNE.command().args(tune), &["--lora-rank", "2", "--lora-alpha", "nan"]);
    assert!(said.contains("--lora-alpha") && said.contains("finite"), "{said}");
}

#[test]
fn f16_learns_with_a_scaled_loss() {
    let (folder, data) = folder();
    let expected = pretrain(&folder, &data, &[]);
    let got = pretrain(&folder, &data, &["--parameters", "f16", "--mesh", "dp=2"]);
    let lines = metrics(&folder.path("metrics.jsonl"));
    let scales: Vec<f64> = lines.iter().filter_map(|line| line["loss_scale"].as_f64()).collect();
    assert_eq!((scales[0], scales.len()), (65536.0, got.0.len()));
    // Skipped steps change nothing.
    assert!(got.0[5] < got.0[0] - 0.1, "{:?}, {:?}", got.0, expected.0);
}

/// Returns the arguments of a run with checkpoints.
fn resumable(folder: &Folder, data: &str, steps: &str, checkpoints: &str, options: &[&str]) -> Vec<String> {
    let out = folder.argument("out");
    let common =
        ["--data", data, "--out", &out, "--overwrite", "--steps", steps, "--checkpoint-dir", checkpoints];
    [&common[..], &SMALL, options].concat().into_iter().map(String::from).collect()
}

#[test]
fn a_run_goes_on_in_another_layout() {
    let (folder, data) = folder();
    let expected = pretrain(&folder, &data, &[]);
    let checkpoints = folder.argument("checkpoints");
    let run = |steps: &str, checkpoints: &str, options: &[&str]| {
        let arguments = resumable(&folder, &data, steps, checkpoints, options);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        text(&PRETRAIN.succeed(&arguments).stderr)
    };
    let all = folder.argument("all.jsonl");
    let options = ["--checkpoint-every", "2", "--resume", "--mesh", "shard=2", "--metrics", &all];
    let said = run("6", &checkpoints, &options);
    assert!(said.contains("no checkpoint in"), "{said}");
    // The last checkpoint is of step 6, the one before it of step 4.
    let latest = fs::read_to_string(folder.path("checkpoints/latest")).unwrap();
    assert!(latest.starts_with("checkpoint-00000003"), "{latest}");
    let (file, fourth) =
        (folder.argument("resumed.jsonl"), folder.argument("checkpoints/checkpoint-00000002"));
    for layout in ["tp=2", "pp=2", "dp=1"] {
        let other = folder.argument(&format!("other-{layout}"));
        let said = run("6", &other, &["--mesh", layout, "--resume", &fourth, "--metrics", &file]);
        assert!(said.contains("going on after step 4"), "{said}");
        assert_near(&logits(&folder.argument("out")), &expected.1, layout);
        let lines = metrics(&folder.path("resumed.jsonl"));
        let steps = lines.iter().filter(|line| line["event"] == "step");
        let got: Vec<f32> = steps.map(|line| line["loss"].as_f64().unwrap() as f32).collect();
        assert_near(&got[got.len() - 2..], &expected.0[4..], layout);
    }
    // Repeated steps are in the metrics once.
    run("6", &folder.argument("again"), &["--resume", &fourth, "--metrics", &all]);
    let lines = metrics(&folder.path("all.jsonl"));
    let steps = lines.iter().filter(|line| line["event"] == "step");
    assert_eq!(steps.map(|line| line["batch"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let refuse = |steps: &str| {
        let arguments = resumable(&folder, &data, steps, &checkpoints, &["--resume"]);
        refuse_with(PRETRAIN.command().args(arguments), &[]).0
    };
    assert!(refuse("3").contains("the checkpoint is at step 6 already"), "{}", refuse("3"));
    fs::write(folder.path("text.txt"), words() + "more\n").unwrap();
    assert!(refuse("9").contains("it was made with other data"), "{}", refuse("9"));
}

#[test]
fn adapters_are_trained_and_merged() {
    let (folder, data) = folder();
    pretrain(&folder, &data, &[]);
    let (base, adapters, merged) =
        (folder.argument("out"), folder.argument("adapters"), folder.argument("merged"));
    let common = [
        "--model", &base, "--data", &data, "--steps", "4", "--length", "16", "--batch-size", "8", "--lr",
        "0.01",
    ];
    let lora = ["--lora-rank", "4", "--lora-targets", "q_proj,v_proj", "--mesh", "pp=2,shard=2"];
    let output = FINETUNE.succeed(&[&common[..], &lora, &["--out", &adapters]].concat());
    assert!(text(&output.stdout).contains("adapters: rank 4"), "{}", text(&output.stdout));
    let weights = Weights::folder(base.as_ref()).unwrap();
    let read = Lora::from_folder(adapters.as_ref(), weights.config()).unwrap();
    assert_eq!(read.config().targets, ["q_proj", "v_proj"]);
    let with = weights.with_adapters(adapters.as_ref(), &read).unwrap();
    let builder = read.adapt(Builder::new(with.tensors(DType::F32, &Device::Cpu)));
    let model = CausalLm::new(weights.config(), &builder).unwrap();
    let tokens = Tensor::new(&[[111u32, 110, 101, 32, 116, 119]], &Device::Cpu).unwrap();
    let expected: Vec<f32> = model.logits(&tokens).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    FINETUNE.succeed(&[&common[..], &lora, &["--out", &merged, "--merge"]].concat());
    assert_near(&logits(&merged), &expected, "merged");
    assert!(logits(&base).iter().zip(&expected).any(|(a, b)| (a - b).abs() > 1e-3));
    // Evaluating with separate adapters gives the same result as with merged ones.
    let evaluate = |options: &[&str]| {
        text(&Girandole("evaluate").succeed(&[&["--data", &data, "--length", "16"], options].concat()).stdout)
    };
    let with = evaluate(&["--model", &base, "--adapters", &adapters, "--mesh", "tp=2"]);
    assert_eq!(with, evaluate(&["--model", &merged]));
    assert_ne!(with, evaluate(&["--model", &base]));
    // Training can continue from them, and on all weights.
    FINETUNE
        .succeed(&[&common[..], &["--adapters", &adapters, "--out", &folder.argument("further")]].concat());
    FINETUNE.succeed(&[&common[..], &["--mesh", "tp=2", "--out", &folder.argument("all")]].concat());
    logits(&folder.argument("all"));
}

#[test]
fn a_sample_is_written_at_each_evaluation() {
    let (folder, data) = folder();
    let samples = |options: &[&str]| -> Vec<String> {
        let out = folder.argument("out");
        let common =
            ["--data", &data, "--out", &out, "--steps", "4", "--evaluate", &data, "--evaluate-every", "2"];
        let output = PRETRAIN.succeed(&[&common[..], &SMALL, &["--overwrite"], options].concat());
        let lines = text(&output.stdout);
        let found = lines.lines().filter_map(|line| Some(line.split_once(": sample ")?.1.to_string()));
        found.chain(text(&output.stderr).lines().map(String::from)).collect()
    };
    let prompt = ["--sample-prompt", "one t", "--sample", "6"];
    let expected = samples(&prompt);
    assert!(expected.len() == 2 && expected.iter().all(|text| text.starts_with("\"one t")), "{expected:?}");
    for layout in ["dp=2", "shard=2,tp=2", "pp=2,shard=2"] {
        assert_eq!(samples(&[&prompt[..], &["--mesh", layout]].concat()), expected, "{layout}");
    }
    // Up to the model's number of positions, also with sequence parallelism.
    let all = samples(&["--sample", "99"]);
    assert_eq!(samples(&["--sample", "99", "--mesh", "pp=2,tp=2", "--sequence-parallel"]), all);
    // By default the prompt is from the first row.
    assert!(samples(&[])[0].starts_with(&format!("\"{}", &words()[..8])));
    let refuse = |options: &[&str]| {
        let own = ["--data", &data, "--out", &folder.argument("out"), "--overwrite"];
        PRETRAIN.refuse(&[&own, &SMALL[..], options].concat())
    };
    let evaluated = ["--evaluate", &data, "--sample-prompt"];
    assert!(refuse(&[&evaluated[..], &[""]].concat()).contains("it has 0 tokens: give 1 to 16"));
    assert!(
        refuse(&[&evaluated[..], &["seventeen letters"]].concat()).contains("it has 17 tokens: give 1 to 16")
    );
    assert!(refuse(&["--sample-prompt", "one"]).contains("--evaluate"));
}

/// Until the ranks have started, the tokens of the text are in an unnamed temporary file, which the ranks open.
#[cfg(target_os = "linux")]
#[test]
fn a_text_is_made_tokens_of_once() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Stdio;

    let (folder, data) = folder();
    let temporary = folder.path("temporary");
    fs::create_dir(&temporary).unwrap();
    let expected = pretrain(&folder, &data, &["--mesh", "dp=2"]);
    fs::copy(folder.path("text.txt"), folder.path("other.txt")).unwrap();
    let (out, metrics, other) =
        (folder.argument("out"), folder.argument("metrics.jsonl"), folder.argument("other.txt"));
    let options = [
        "--data", &data, "--out", &out, "--metrics", &metrics, "--steps", "6", "--mesh", "dp=2",
        "--evaluate", &other, "--overwrite",
    ];
    let mut command = PRETRAIN.command();
    command.args(options).args(SMALL).env("TMPDIR", &temporary).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    // Printed before the ranks start, so the ranks can no longer read the text.
    assert!(line.starts_with("model: "), "{line}");
    fs::remove_file(&data).unwrap();
    fs::remove_file(folder.path("other.txt")).unwrap();
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "nothing is left behind whenever it ends");
    let (mut rest, mut said) = (String::new(), String::new());
    lines.read_to_string(&mut rest).unwrap();
    launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(launcher.wait().unwrap().success(), "{said}");
    assert!(rest.contains("step 6: evaluation loss "), "{rest}");
    assert_eq!(losses(&folder.path("metrics.jsonl")), expected.0);
}
