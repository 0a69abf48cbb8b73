//! `generate` and `evaluate`, on a small model with random weights and a token for each byte.

use candle_core::{DType, Device, Tensor};
use models::{CausalLm, FolderConfig, ModelConfig, Tokenizer, Weights, save_folder};
use training::build::Builder;
use training::named_vars;

use crate::common::{Folder, Girandole, text};

const GENERATE: Girandole = Girandole("generate");
const EVALUATE: Girandole = Girandole("evaluate");

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}"#;

/// A folder with a model and its tokenizer.
fn model() -> (Folder, String) {
    let folder = Folder::new();
    let (path, vars) = (folder.path("model"), candle_nn::VarMap::new());
    let weights = Weights::random(&ModelConfig::from_json(CONFIG).unwrap(), 7).unwrap();
    CausalLm::new(weights.config(), &Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu))).unwrap();
    save_folder(&path, weights.config(), &named_vars(&vars), &FolderConfig::default()).unwrap();
    Tokenizer::bytes().unwrap().save(&path).unwrap();
    let argument = folder.argument("model");
    (folder, argument)
}

fn generate(model: &str, options: &[&str]) -> String {
    let output = GENERATE.succeed(&[&["--model", model, "--max-new-tokens", "20"], options].concat());
    assert!(text(&output.stderr).starts_with("note: 20 tokens in "), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_text_is_continued_and_the_same_each_time() {
    let (_folder, model) = model();
    let likeliest = generate(&model, &["--prompt", "Hello"]);
    assert!(likeliest.starts_with("Hello") && likeliest.ends_with('\n'), "{likeliest:?}");
    assert_eq!(likeliest, generate(&model, &["--prompt", "Hello", "--temperature", "2", "--top-k", "1"]));
    let random = |seed| generate(&model, &["--prompt", "Hello", "--temperature", "1.5", "--seed", seed]);
    assert_eq!(random("1"), random("1"));
    assert_ne!(random("1"), random("2"));
}

#[test]
fn each_token_of_a_text_is_predicted_once() {
    let (folder, path) = model();
    let (file, data) = (folder.path("text"), folder.argument("text"));
    let words = "The quick brown fox jumps over the lazy dog.";
    std::fs::write(file, words).unwrap();
    let weights = Weights::folder(path.as_ref()).unwrap();
    let model =
        CausalLm::new(weights.config(), &Builder::new(weights.tensors(DType::F32, &Device::Cpu))).unwrap();
    for length in [64, 10, 1] {
        // By the definition, from the logits of each row.
        let tokens: Vec<u32> = words.bytes().map(u32::from).collect();
        let mut total = 0.0;
        for first in (0..tokens.len() - 1).step_by(length) {
            let row = &tokens[first..tokens.len().min(first + length + 1)];
            let seen = Tensor::new(&row[..row.len() - 1], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let logits = model.logits(&seen).unwrap().squeeze(0).unwrap().to_vec2::<f32>().unwrap();
            for (logits, &target) in logits.iter().zip(&row[1..]) {
                let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                total += sum.ln() - f64::from(logits[target as usize]);
            }
        }
        let loss = total / (tokens.len() - 1) as f64;
        let length = length.to_string();
        let output = EVALUATE.succeed(&["--model", &path, "--data", &data, "--length", &length]);
        let line = text(&output.stdout);
        assert!(line.starts_with(&format!("tokens: {}, loss: ", tokens.len() - 1)), "{line}");
        let found: f64 = line.split(['\u{20}', ',']).nth(4).unwrap().parse().unwrap();
        assert!((found - loss).abs() < 2e-4, "{line}: {loss}");
    }
}

#[test]
fn what_cannot_be_used_is_told_in_one_line() {
    let (folder, model) = model();
    let refuse = |command: &Girandole, options: &[&str], says: &str| {
        let line = command.refuse(&[&["--model", &model], options].concat());
        assert!(line.contains(says), "{line}");
    };
    let long = "x".repeat(65);
    refuse(&GENERATE, &["--prompt", ""], "the prompt has no tokens");
    refuse(&GENERATE, &["--prompt", &long], "the model has 64 positions");
    refuse(&GENERATE, &["--prompt", "a", "--top-p", "0"], "give a number above 0");
    refuse(&GENERATE, &[], "--prompt");
    for (name, bytes) in [("empty", &b""[..]), ("bytes", &[b'a', 0xff])] {
        std::fs::write(folder.path(name), bytes).unwrap();
    }
    refuse(&EVALUATE, &["--data", &folder.argument("empty")], "two tokens at least");
    refuse(&EVALUATE, &["--data", &folder.argument("bytes")], "no text in UTF-8 from byte 1 on");
    refuse(&EVALUATE, &["--data", &folder.argument("none")], "cannot be read");
    std::fs::write(folder.path("text"), "ab").unwrap();
    refuse(&EVALUATE, &["--data", &folder.argument("text"), "--length", "65"], "the model has 64 positions");
    let missing = GENERATE.refuse(&["--model", &folder.argument("none"), "--prompt", "a"]);
    assert!(missing.contains("tokenizer.json"), "{missing}");
}
