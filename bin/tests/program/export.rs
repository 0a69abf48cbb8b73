//! Tests of `export`, on a small model with random weights and one token per byte.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, Girandole, losses, model, text};

const EXPORT: Girandole = Girandole("export");
const FINETUNE: Girandole = Girandole("finetune");
const GENERATE: Girandole = Girandole("generate");

fn tensors(folder: &Path) -> BTreeMap<String, Tensor> {
    safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap().into_iter().collect()
}

/// The largest difference of any number of two folders' weights, which have the same names.
fn apart(one: &Path, other: &Path) -> f32 {
    let (one, other) = (tensors(one), tensors(other));
    assert!(one.keys().eq(other.keys()));
    let gap = |(name, tensor): (&String, &Tensor)| {
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
        let gap = (wide(tensor) - wide(&other[name])).unwrap().abs().unwrap();
        gap.flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap()
    };
    one.iter().map(gap).fold(0.0, f32::max)
}

#[test]
fn a_gguf_file_is_written_in_each_type() {
    let (folder, model) = model();
    let mut before = u64::MAX;
    for kind in ["f32", "f16", "q8_0", "q4_0"] {
        let out = folder.argument(&format!("{kind}.gguf"));
        let output = EXPORT.succeed(&["--model", &model, "--out", &out, "--type", kind]);
        let bytes = fs::metadata(&out).unwrap().len();
        let content = Content::read(&mut File::open(&out).unwrap()).unwrap();
        let count = content.tensor_infos.len();
        assert_eq!(text(&output.stdout), format!("tensors: {count}, bytes: {bytes}\n"));
        assert_eq!(content.metadata["general.architecture"].to_string().unwrap(), "llama");
        assert!(bytes < before, "{kind}: {bytes} bytes, {before} before");
        before = bytes;
    }
}

/// A folder in f32 has the same weights; adapters are merged as `finetune --merge` merges them.
#[test]
fn a_folder_is_written_with_and_without_adapters() {
    let (folder, model) = model();
    let [same, narrow, adapters, merged, exported] =
        ["same", "narrow", "adapters", "merged", "exported"].map(|name| folder.argument(name));
    let to = |out: &str, options: &[&str]| {
        let common = ["--model", &model, "--to", "transformers", "--out", out];
        EXPORT.succeed(&[&common[..], options].concat());
    };
    to(&same, &["--type", "f32"]);
    assert_eq!(apart(&folder.path("model"), &folder.path("same")), 0.0);
    let says = |model: &str| text(&GENERATE.succeed(&["--model", model, "--prompt", "Hello"]).stdout);
    assert_eq!(says(&same), says(&model));
    to(&narrow, &["--type", "bf16"]);
    assert!(tensors(&folder.path("narrow")).values().all(|tensor| tensor.dtype() == DType::BF16));
    let far = apart(&folder.path("model"), &folder.path("narrow"));
    assert!(far > 0.0 && far < 1e-2, "{far}");

    let data = folder.argument("data.txt");
    fs::write(&data, "a text that is long enough for a few rows of this model. ".repeat(20)).unwrap();
    let tune = ["--model", &model, "--data", &data, "--length", "16", "--steps", "3", "--lora-rank", "2"];
    FINETUNE.succeed(&[&tune[..], &["--out", &adapters]].concat());
    FINETUNE.succeed(&[&tune[..], &["--out", &merged, "--merge"]].concat());
    to(&exported, &["--adapters", &adapters]);
    let line = EXPORT.refuse(&[
        "--model", &model, "--adapters", &adapters, "--to", "transformers", "--out", &adapters, "--overwrite",
    ]);
    assert!(line.contains("it is the folder of the adapters: give another path"), "{line}");
    assert!(folder.path("adapters").join("adapter_model.safetensors").exists());
    assert!(apart(&folder.path("model"), &folder.path("exported")) > 1e-6);
    let far = apart(&folder.path("merged"), &folder.path("exported"));
    assert!(far < 1e-6, "{far}");
    let alone = folder.argument("adapters.gguf");
    EXPORT.succeed(&["--model", &model, "--adapters", &adapters, "--adapters-only", "--out", &alone]);
    let content = Content::read(&mut File::open(&alone).unwrap()).unwrap();
    assert_eq!(content.metadata["general.type"].to_string().unwrap(), "adapter");
    assert_eq!(content.tensor_infos.len(), tensors_of_adapters(&folder));
}

/// Adapters that were trained with a chat template are used with it, before that of the model.
#[test]
fn the_chat_template_of_adapters_goes_with_them() {
    let (folder, model) = model();
    let [adapters, again, merged, data, file] =
        ["adapters", "again", "merged", "data.jsonl", "model.gguf"].map(|name| folder.argument(name));
    let own = "{% for m in messages %}{{ m.content }}{% endfor %}";
    fs::write(folder.path("model/chat_template.jinja"), own).unwrap();
    fs::create_dir(folder.path("model/additional_chat_templates")).unwrap();
    fs::write(folder.path("model/additional_chat_templates/tool_use.jinja"), own).unwrap();
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let chat = serde_json::json!({"messages": [message("user", "hi"), message("assistant", "ho")]});
    fs::write(&data, format!("{chat}\n").repeat(8)).unwrap();
    let tune = ["--model", &model, "--data", &data, "--length", "64", "--steps", "1", "--lora-rank", "2"];
    FINETUNE.succeed(&[&tune[..], &["--chat-template", "chatml", "--out", &adapters]].concat());
    let chatml = fs::read_to_string(folder.path("adapters/chat_template.jinja")).unwrap();
    assert!(chatml.contains("<|im_start|>"), "{chatml}");

    let with = ["--model", &model, "--adapters", &adapters];
    let says = |options: &[&str]| {
        let prompt = ["--chat", "--prompt", "hi", "--max-new-tokens", "4"];
        text(&GENERATE.succeed(&[&with[..], &prompt, options].concat()).stdout)
    };
    let loss = |options: &[&str]| {
        let given = ["--data", &data, "--length", "64"];
        text(&Girandole("evaluate").succeed(&[&with[..], &given, options].concat()).stdout)
    };
    let (named, other) = (["--chat-template", "chatml"], folder.argument("model/chat_template.jinja"));
    assert_eq!((says(&[]), loss(&[])), (says(&named), loss(&named)));
    assert_ne!(loss(&[]), loss(&["--chat-template", &other]));
    // Continued, and merged.
    let tune = ["--data", &data, "--length", "64", "--steps", "1"];
    FINETUNE.succeed(&[&with[..], &tune, &["--out", &again]].concat());
    let saved = |name: &str| fs::read_to_string(folder.path(name).join("chat_template.jinja")).unwrap();
    assert_eq!(saved("again"), chatml);
    EXPORT.succeed(&[&with[..], &["--to", "transformers", "--out", &merged]].concat());
    assert_eq!(saved("merged"), chatml);
    assert!(!folder.path("merged/additional_chat_templates").exists());
    EXPORT.succeed(&[&with[..], &["--out", &file]].concat());
    let content = Content::read(&mut File::open(&file).unwrap()).unwrap();
    assert_eq!(content.metadata["tokenizer.chat_template"].to_string().unwrap(), &chatml);
}

/// A folder that holds a model stays as it is; with --overwrite no file of that model's tokenizer stays beside the new weights.
#[test]
fn a_model_in_the_folder_is_replaced_only_when_that_is_asked_for() {
    let (folder, model) = model();
    let [other, out] = ["other", "out"].map(|name| folder.argument(name));
    EXPORT.succeed(&["--model", &model, "--to", "transformers", "--out", &other]);
    let template = "{{ messages[0].content }}";
    fs::write(folder.path("other").join("chat_template.jinja"), template).unwrap();
    EXPORT.succeed(&["--model", &other, "--to", "transformers", "--out", &out]);
    let copied = folder.path("out").join("chat_template.jinja");
    assert_eq!(fs::read_to_string(&copied).unwrap(), template);
    let again = ["--model", &model, "--to", "transformers", "--out", &out, "--overwrite"];
    let line = EXPORT.refuse(&again[..6]);
    let said = "it holds a model already (model.safetensors): give another folder, or --overwrite";
    assert!(line.contains(said), "{line}");
    assert!(copied.exists());
    let notes = text(&EXPORT.succeed(&again).stderr);
    assert!(!copied.exists() && !notes.contains("it is used with them"), "{notes}");
    // A file that no program wrote there stays, and is named.
    fs::write(&copied, template).unwrap();
    let notes = text(&EXPORT.succeed(&again).stderr);
    assert!(copied.exists() && notes.contains("chat_template.jinja are not this model's"), "{notes}");
}

fn tensors_of_adapters(folder: &Folder) -> usize {
    let path = folder.path("adapters").join("adapter_model.safetensors");
    safetensors::load(path, &Device::Cpu).unwrap().len()
}

#[test]
fn what_does_not_fit_together_is_refused_and_nothing_is_written() {
    let (folder, model) = model();
    let out = folder.argument("out");
    let line = |options: &[&str]| EXPORT.refuse(&[&["--model", &model], options].concat());
    for (options, said) in [
        (
            &["--out", &out, "--to", "transformers", "--type", "q4_0"][..],
            "--type: got q4_0; a folder has f32, f16 or bf16",
        ),
        (&["--out", &out, "--max-file-size", "1MB"], "--max-file-size: got 1000000; a GGUF file is one file"),
        (&["--out", &folder.argument(".")], "it is a folder: give the path of a file, such as model.gguf"),
        (&["--out", &model], "it is the model itself: give another path"),
        (&["--out", &model, "--to", "transformers"], "it is the model itself: give another path"),
        (&["--out", &out, "--adapters", &model], "adapter_config.json"),
        (&["--out", &out, "--adapters-only"], "--adapters"),
    ] {
        let line = line(options);
        assert!(line.contains(said), "{line}");
    }
    assert!(!folder.path("out").exists());
    let missing = folder.argument("none");
    let line = EXPORT.refuse(&["--model", &missing, "--out", &out]);
    assert!(line.contains("none"), "{line}");
}

/// A GGUF file is a model as its folder is: for text, for measures, to train in any layout, and to write a folder again.
#[test]
fn a_gguf_file_takes_the_place_of_its_folder() {
    let (folder, model) = model();
    let [exact, narrow, out, again] =
        ["exact.gguf", "narrow.gguf", "out", "again"].map(|name| folder.argument(name));
    EXPORT.succeed(&["--model", &model, "--out", &exact, "--type", "f32"]);
    EXPORT.succeed(&["--model", &model, "--out", &narrow, "--type", "q8_0"]);
    let says = |model: &str| text(&GENERATE.succeed(&["--model", model, "--prompt", "Hello"]).stdout);
    assert_eq!(says(&exact), says(&model));
    says(&narrow);
    let data = folder.argument("data.txt");
    fs::write(&data, "a text that is long enough for a few rows of this model. ".repeat(20)).unwrap();
    let loss = |model: &str| {
        let line = text(&Girandole("evaluate").succeed(&["--model", model, "--data", &data]).stdout);
        let loss = line.split_once("loss: ").unwrap().1.split_once(',').unwrap().0.parse::<f32>().unwrap();
        (line, loss)
    };
    assert_eq!(loss(&exact).0, loss(&model).0);
    assert!((loss(&narrow).1 - loss(&model).1).abs() < 0.02, "{:?}", loss(&narrow));
    let metrics = folder.argument("m.jsonl");
    let adapters = folder.argument("adapters");
    let tune = |model: &str, options: &[&str]| {
        let common =
            ["--model", model, "--data", &data, "--length", "16", "--steps", "3", "--metrics", &metrics];
        let out = if options.contains(&"--lora-rank") { &adapters } else { &out };
        FINETUNE
            .succeed(&[&common[..], &["--out", out, "--overwrite", "--batch-size", "4"], options].concat());
        losses(&folder.path("m.jsonl"))
    };
    let expected = tune(&model, &[]);
    for mesh in ["dp=1", "shard=2", "tp=2"] {
        let got = tune(&exact, &["--mesh", mesh]);
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 3 && gap < 1e-5, "{mesh}: {got:?}, {expected:?}");
    }
    // The tuned folder has the file's tokenizer.
    says(&out);
    assert_eq!(tune(&narrow, &["--lora-rank", "2"]).len(), 3);
    let line = FINETUNE.refuse(&["--model", &narrow, "--data", &data, "--out", &out, "--overwrite"]);
    assert!(line.contains("its weights are quantized (q8_0), and not trained: give --lora-rank"), "{line}");
    EXPORT.succeed(&["--model", &exact, "--out", &again, "--to", "transformers"]);
    assert_eq!(apart(&folder.path("model"), &folder.path("again")), 0.0);
    assert_eq!(says(&again), says(&model));
    fs::write(folder.path("cut.gguf"), &fs::read(folder.path("exact.gguf")).unwrap()[..9000]).unwrap();
    let line = GENERATE.refuse(&["--model", &folder.argument("cut.gguf"), "--prompt", "a"]);
    assert!(line.contains("cut.gguf: it is not whole"), "{line}");
}
