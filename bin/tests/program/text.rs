//! Tests of `generate` and `evaluate`, on a small model with random weights and one token per byte.

use candle_core::{DType, Device, Tensor};
use models::{CausalLm, Weights};
use training::build::Builder;

use crate::common::{Girandole, model, succeed, text};

const GENERATE: Girandole = Girandole("generate");
const CHAT: Girandole = Girandole("chat");
const EVALUATE: Girandole = Girandole("evaluate");

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
    // With fewer tokens than ranks, each computes the whole prompt.
    for layout in ["tp=2", "shard=2", "shard=2,tp=2", "cp=2", "cp=7", "shard=2,cp=2", "cp=3,tp=2"] {
        assert_eq!(generate(&model, &["--prompt", "Hello", "--mesh", layout]), likeliest, "{layout}");
    }
    let line = GENERATE.refuse(&["--model", &model, "--prompt", "Hello", "--mesh", "pp=2"]);
    assert!(line.contains("--mesh: got pp=2") && line.contains("give tp, shard, cp or ep"), "{line}");
    let line = GENERATE.refuse(&["--model", &model, "--prompt", "Hello", "--world-size", "2"]);
    assert!(
        line.contains("--world-size: got 2") && line.contains("give tp, shard, cp or ep (--mesh)"),
        "{line}"
    );
}

#[test]
fn one_line_says_how_numbers_of_16_bits_are_multiplied() {
    let (_folder, model) = model();
    let options = ["--model", &model, "--prompt", "Hello", "--max-new-tokens", "2", "--dtype", "bf16"];
    for layout in ["tp=1", "tp=2"] {
        let said = text(&GENERATE.succeed(&[&options[..], &["--mesh", layout]].concat()).stderr);
        assert_eq!(said.matches("note: matrix products are computed ").count(), 1, "{layout}: {said}");
    }
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
        // Computed by the definition, from the logits of each row.
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
fn a_text_is_evaluated_in_any_layout() {
    let (folder, path) = model();
    std::fs::write(folder.path("text"), "The quick brown fox jumps over the lazy dog. ".repeat(5)).unwrap();
    let data = folder.argument("text");
    let evaluate = |options: &[&str]| {
        let common = ["--model", &path, "--data", &data, "--length", "20"];
        let line = text(&EVALUATE.succeed(&[&common, options].concat()).stdout);
        let (tokens, rest) = line.split_once(", loss: ").unwrap();
        let loss: f64 = rest.split(',').next().unwrap().parse().unwrap();
        assert_eq!((line.lines().count(), tokens), (1, "tokens: 224"), "{line}");
        loss
    };
    let expected = evaluate(&[]);
    for options in [
        &["--batch-size", "1"][..],
        &["--batch-size", "100"],
        &["--world-size", "3"],
        &["--mesh", "shard=2"],
        &["--mesh", "tp=2"],
        &["--mesh", "pp=2", "--batch-size", "5"],
        &["--mesh", "pp=2,dp=2"],
        &["--mesh", "cp=3"],
        &["--mesh", "pp=2,cp=2"],
        &["--mesh", "shard=2,tp=2"],
    ] {
        assert!((evaluate(options) - expected).abs() < 2e-4, "{options:?}");
    }
    assert_eq!(evaluate(&["--batch-size", "18446744073709551615"]), evaluate(&["--batch-size", "100"]));
    // A byte order mark is no token.
    let marked = "\u{feff}".to_string() + &std::fs::read_to_string(&data).unwrap();
    std::fs::write(&data, marked).unwrap();
    assert!((evaluate(&[]) - expected).abs() < 1e-9);
    let refuse =
        |options: &[&str]| EVALUATE.refuse(&[&["--model", &path, "--data", &data], options].concat());
    assert!(refuse(&["--mesh", "tp=3"]).contains("cannot be divided over tp=3"));
    assert!(refuse(&["--mesh", "tp=2", "--world-size", "3"]).contains("--mesh"));
}

/// With a simple chat template, and without one.
#[test]
fn a_message_is_answered() {
    let (folder, path) = model();
    let line = GENERATE.refuse(&["--model", &path, "--chat", "--prompt", "hi"]);
    assert!(line.contains("--chat: ") && line.contains("it has no chat template"), "{line}");
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    std::fs::write(folder.path("model").join("chat_template.jinja"), template).unwrap();
    // Only the answer is printed, to the text that the template makes.
    let whole = generate(&path, &["--prompt", "s:be\nu:hi\na:"]);
    let answer = whole.strip_prefix("s:be\nu:hi\na:").unwrap();
    assert_eq!(generate(&path, &["--chat", "--system", "be", "--prompt", "hi"]), answer);
    let messages = r#"[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]"#;
    std::fs::write(folder.path("m.json"), messages).unwrap();
    assert_eq!(generate(&path, &["--messages", &folder.argument("m.json")]), answer);
    // It ends at the end-of-text token of either configuration file.
    let first = answer.as_bytes()[0];
    if answer.is_char_boundary(1) {
        let config = format!("{{\"eos_token_id\": [300, {first}]}}");
        std::fs::write(folder.path("model").join("generation_config.json"), config).unwrap();
        let output = GENERATE.succeed(&["--model", &path, "--chat", "--system", "be", "--prompt", "hi"]);
        assert!(text(&output.stderr).starts_with("note: 1 tokens in "), "{}", text(&output.stderr));
    }
    let refuse = |options: &[&str], says: &str| {
        let line = GENERATE.refuse(&[&["--model", &path], options].concat());
        assert!(line.contains(says), "{line}");
    };
    let configuration = folder.path("model").join("generation_config.json");
    for end in ["\"</s>\"", "-1", "[1, 0.5]"] {
        std::fs::write(&configuration, format!("{{\"eos_token_id\": {end}}}")).unwrap();
        refuse(&["--prompt", "x"], "generation_config.json: eos_token_id is ");
    }
    std::fs::remove_file(configuration).unwrap();
    for (messages, says) in [
        ("[]", "there is no message"),
        ("{", "no conversation: EOF while parsing"),
        ("{}", "expected a text or a list of messages"),
        (r#"[{"content": "x"}]"#, "message 0 has no `role`"),
        (r#"[{"role": "assistant", "content": "x"}]"#, "the last message is the assistant's own"),
    ] {
        std::fs::write(folder.path("m.json"), messages).unwrap();
        refuse(&["--messages", &folder.argument("m.json")], says);
    }
    refuse(&["--messages", &folder.argument("none")], "cannot read ");
    refuse(&["--messages", &folder.argument("m.json"), "--prompt", "x"], "cannot be used with");
    refuse(&["--system", "x", "--prompt", "x"], "--chat");
    let long = "x".repeat(64);
    refuse(&["--chat", "--prompt", &long], "the model has 64 positions");
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
    for (option, value, says) in [
        ("--top-p", "1.5", "at most 1"),
        ("--top-p", "NaN", "at most 1"),
        ("--top-k", "0", "1 or more"),
        ("--top-k", "-1", "1 or more"),
        ("--temperature", "-1", "0 or more"),
        ("--temperature", "inf", "a finite number"),
        ("--seed", "-1", "a whole number from 0"),
        ("--max-new-tokens", "0", "1 or more"),
        ("--dtype", "f8", "possible values: f32, bf16"),
    ] {
        refuse(&GENERATE, &["--prompt", "a", option, value], says);
    }
    refuse(&GENERATE, &["--prompt", "a", "--adapters", &folder.argument("none")], "none: No such file");
    refuse(&GENERATE, &[], "--prompt");
    for (name, bytes) in [("empty", &b""[..]), ("bytes", &[b'a', 0xff])] {
        std::fs::write(folder.path(name), bytes).unwrap();
    }
    let empty = folder.argument("empty");
    refuse(
        &GENERATE,
        &["--prompt-file", &empty],
        &format!("error: --prompt-file: got {empty}; the prompt has no"),
    );
    refuse(&EVALUATE, &["--data", &empty], "two tokens at least");
    std::fs::write(folder.path("lines.JSONL"), "{\"text\": \"ab\"}\n").unwrap();
    let lines = folder.argument("lines.JSONL");
    refuse(&EVALUATE, &["--data", &lines, "--field", "content"], "there is no field `content`, but text");
    let output = EVALUATE.succeed(&["--model", &model, "--data", &lines]);
    assert!(text(&output.stdout).starts_with("tokens: 2, loss: "), "{}", text(&output.stdout));
    refuse(&EVALUATE, &["--data", &folder.argument("bytes")], "no text in UTF-8 from byte 1 on");
    refuse(&EVALUATE, &["--data", &folder.argument("none")], "cannot read ");
    std::fs::write(folder.path("text"), "ab").unwrap();
    refuse(&EVALUATE, &["--data", &folder.argument("text"), "--length", "65"], "the model has 64 positions");
    let missing = GENERATE.refuse(&["--model", &folder.argument("none"), "--prompt", "a"]);
    assert!(missing.contains("none: "), "{missing}");
}

const TEMPLATE: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

#[test]
fn options_that_would_say_nothing_are_refused() {
    let (folder, model) = model();
    let [data, tuned, tokens] = ["text.txt", "tuned", "text.tokens"].map(|name| folder.argument(name));
    std::fs::write(&data, "The quick brown fox jumps over the lazy dog. ".repeat(20)).unwrap();
    let none = ["--chat-template", "/nonexistent"];
    let line = GENERATE.refuse(&[&["--model", &model, "--prompt", "a"][..], &none].concat());
    assert!(line.contains("--chat-template: got /nonexistent; the prompt is continued as it is"), "{line}");
    let evaluate = ["--model", &model, "--data", &data];
    let line = EVALUATE.refuse(&[&evaluate[..], &none].concat());
    assert!(
        line.contains("--chat-template: got /nonexistent; ") && line.contains("no conversations"),
        "{line}"
    );
    let field = ["--field", "nonsense"];
    let line = EVALUATE.refuse(&[&evaluate[..], &field].concat());
    assert!(
        line.contains("--field: got nonsense; ") && line.contains("is plain text, without fields"),
        "{line}"
    );
    let tune = ["--model", &model, "--data", &data, "--out", &tuned, "--steps", "1", "--length", "16"];
    let said = "--field: got nonsense; all files are plain text, without fields: leave it out";
    let line = Girandole("finetune").refuse(&[&tune[..], &field].concat());
    assert!(line.contains(said), "{line}");
    let line = Girandole("tokenize")
        .refuse(&[&["--tokenizer", "bytes", data.as_str(), "--out", &tokens][..], &field].concat());
    assert!(line.contains(said), "{line}");
}

#[test]
fn standard_input_is_a_prompt() {
    let (folder, model) = model();
    std::fs::write(folder.path("prompt"), "Hello").unwrap();
    let options = ["--model", &model, "--prompt-file", "-", "--max-new-tokens", "20"];
    let input = || std::fs::File::open(folder.path("prompt")).unwrap();
    let output = succeed(GENERATE.command().args(options).stdin(input()));
    assert_eq!(text(&output.stdout), generate(&model, &["--prompt", "Hello"]));
    let line = GENERATE.refuse(&[&options[..], &["--mesh", "tp=2"]].concat());
    assert!(line.contains("--prompt-file: got -; standard input goes to one process"), "{line}");
    let line = GENERATE.refuse(&options);
    assert!(line.contains("--prompt-file: got -; the prompt has no tokens"), "{line}");
}

/// Each answer is the one that `generate` gives to the conversation before it.
#[test]
fn lines_are_answered_as_a_conversation() {
    let (folder, model) = model();
    std::fs::write(folder.path("model").join("chat_template.jinja"), TEMPLATE).unwrap();
    let options = ["--model", &model, "--max-new-tokens", "4"];
    let chat = |lines: &str, more: &[&str]| {
        std::fs::write(folder.path("lines"), lines).unwrap();
        let input = std::fs::File::open(folder.path("lines")).unwrap();
        succeed(CHAT.command().args(options).args(more).stdin(input))
    };
    let answer = |messages: serde_json::Value| {
        std::fs::write(folder.path("messages.json"), messages.to_string()).unwrap();
        let more = ["--messages", &folder.argument("messages.json")];
        text(&GENERATE.succeed(&[&options[..], &more].concat()).stdout)
    };
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let first = answer(serde_json::json!([message("system", "s"), message("user", "hi")]));
    let all = [("system", "s"), ("user", "hi"), ("assistant", &first[..first.len() - 1]), ("user", "ho")];
    let second = answer(all.iter().map(|(role, content)| message(role, content)).collect());
    let said = chat("hi\n\n ho \n/clear\nhi\n/exit\nho\n", &["--system", "s"]);
    assert_eq!(text(&said.stdout), [&*first, &second, &first].concat());
    assert_eq!(text(&said.stderr), "");
    let said = chat(&("x".repeat(80) + "\n/nothing\nhi"), &[]);
    let notes = text(&said.stderr);
    assert!(notes.contains("note: the conversation has 85 tokens, and the model 64 positions"), "{notes}");
    assert!(notes.contains("note: no command /nothing: /clear forgets"), "{notes}");
    assert_eq!(text(&said.stdout), answer(serde_json::json!([message("user", "hi")])));
    std::fs::remove_file(folder.path("model").join("chat_template.jinja")).unwrap();
    let line = CHAT.refuse(&options);
    assert!(line.contains("--model: got the model") && line.contains("no chat template"), "{line}");
    std::fs::write(folder.path("own.jinja"), TEMPLATE).unwrap();
    let said = chat("hi\n ho \n", &["--system", "s", "--chat-template", &folder.argument("own.jinja")]);
    assert_eq!(text(&said.stdout), [&*first, &second].concat());
}
