//! Conversations, compared with transformers: their texts, tokens, and which tokens are answers.

use std::fs;
use std::path::Path;

use crate::common::folder;
use models::Tokenizer;
use models::tokens::{
    Chat, ChatTemplate, Data, DataConfig, IGNORE_INDEX, Packing, Piece, Rendered, TextEncoder, TextSource,
    TokenWriter,
};
use serde_json::Value;
use tempfile::TempDir;

fn expected() -> Value {
    serde_json::from_slice(&fs::read(folder("chat").join("expected.json")).unwrap()).unwrap()
}

/// A folder with the tokenizer and this template.
pub(crate) fn with_template(template: &str) -> TempDir {
    let out = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(folder("chat").join(name), out.path().join(name)).unwrap();
    }
    fs::write(out.path().join("chat_template.jinja"), template).unwrap();
    out
}

/// Returns name and text of each line of the fixture; as text, so that the order of fields is kept.
fn lines() -> Vec<(String, String)> {
    let text = fs::read_to_string(folder("chat").join("chats.jsonl")).unwrap();
    let name =
        |line: &str| serde_json::from_str::<Value>(line).unwrap()["name"].as_str().unwrap().to_string();
    text.lines().map(|line| (name(line), line.to_string())).collect()
}

pub(crate) fn chat_of(line: &str, folder: &Path) -> Chat {
    let path = folder.join("one.jsonl");
    fs::write(&path, line).unwrap();
    match TextSource::open(&path, None).unwrap().next_piece().unwrap() {
        Some(Piece::Chat(chat)) => chat,
        other => unreachable!("{other:?}"),
    }
}

/// Returns the only one.
pub(crate) fn one<T: std::fmt::Debug>(mut all: Vec<T>) -> T {
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

pub(crate) fn answers(rendered: &Rendered) -> Vec<&str> {
    rendered.answers.iter().map(|answer| &rendered.text[answer.clone()]).collect()
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
}

#[test]
fn texts_tokens_and_answers_are_transformers() {
    let (expected, lines) = (expected(), lines());
    let (mut same, mut refused) = (0, 0);
    for case in expected["cases"].as_array().unwrap() {
        let (name, chat) = (case["template"].as_str().unwrap(), case["chat"].as_str().unwrap());
        let marked = expected["templates"][name].as_str().unwrap();
        // Blocks without effect in place of the marks, because white space around them is trimmed in the same way.
        let plain =
            marked.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}");
        let line = &lines.iter().find(|(line, _)| line == chat).unwrap().1;
        for (template, is_marked) in [(marked, true), (&*plain, false)] {
            if name == "tools" && !is_marked {
                continue;
            }
            let out = with_template(template);
            let found = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
            assert_eq!(found.marks_answers(), is_marked);
            let chat = chat_of(line, out.path());
            let rendered = found.render(&chat);
            let Some(text) = case["text"].as_str() else {
                assert!(rendered.unwrap_err().to_string().contains("the chat template"));
                refused += 1;
                continue;
            };
            assert_eq!(one(rendered.unwrap()).text, text);
            let tokenizer = Tokenizer::from_folder(out.path()).unwrap();
            let (ids, counted) = one(TextEncoder::new(&tokenizer, Some(found)).unwrap().chat(&chat).unwrap());
            assert_eq!(ids, numbers(&case["ids"]), "{name}, {line}");
            let mask: Vec<u32> = counted.into_iter().map(u32::from).collect();
            assert_eq!(mask, numbers(&case["mask"]), "{name}, {is_marked}, {line}");
            same += 1;
        }
    }
    assert_eq!((same, refused), (16, 4));
}

#[test]
fn only_answers_are_targets() {
    let expected = expected();
    let out = with_template(expected["templates"]["plain"].as_str().unwrap());
    let path = out.path().join("chats.jsonl");
    let two: String = lines()
        .iter()
        .filter(|(name, _)| name == "two" || name == "six")
        .map(|(_, line)| line.clone() + "\n")
        .collect();
    fs::write(&path, two).unwrap();
    let tokenizer = Tokenizer::from_folder(out.path()).unwrap();
    let config = DataConfig {
        tokenizer: Some(&tokenizer),
        folder: Some(out.path()),
        length: Some(7),
        packing: Some(Packing::Stream),
        vocab_size: 400,
        ..DataConfig::default()
    };
    let rows = Data::open(
        &["chats.jsonl"].map(|name| out.path().join(name).display().to_string().parse().unwrap()),
        &config,
    )
    .unwrap();
    let of = |name: &str, field: &str| {
        let cases = expected["cases"].as_array().unwrap();
        numbers(
            &cases.iter().find(|case| case["template"] == "plain" && case["chat"] == name).unwrap()[field],
        )
    };
    let ids = [of("two", "ids"), of("six", "ids")].concat();
    let mask = [of("two", "mask"), of("six", "mask")].concat();
    assert_eq!(rows.len(), (ids.len() - 1) / 7);
    for index in 0..rows.len() {
        let row = rows.get(index).unwrap();
        for (place, (token, target)) in row.tokens.iter().zip(&row.targets).enumerate() {
            let at = index * 7 + place;
            assert_eq!(*token, ids[at]);
            assert_eq!(*target, if mask[at + 1] == 1 { i64::from(ids[at + 1]) } else { IGNORE_INDEX });
        }
    }
}

#[test]
fn answers_that_cannot_be_told_are_an_error() {
    let changing = "{% for m in messages %}{{ m.role }}{{ '!' if loop.last }}: {{ m.content }}\n{% endfor %}";
    let out = with_template(changing);
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    let six = &lines().into_iter().find(|(name, _)| name == "six").unwrap().1;
    let line = template.render(&chat_of(six, out.path())).unwrap_err().to_string();
    assert!(line.contains("chat_template.jinja") && line.contains("{% generation %}"), "{line}");
}

#[test]
fn templates_that_cannot_be_are_named() {
    let render = |template: &str| {
        let out = with_template(template);
        let chat = Chat::from_json(r#"[{"role": "assistant", "content": "a"}]"#).unwrap();
        ChatTemplate::from_folder(out.path())
            .and_then(|template| template.unwrap().render(&chat))
            .unwrap_err()
            .to_string()
    };
    for (template, says) in [
        ("a\n{% if %}", "line 2 of the chat template"),
        ("{{ raise_exception('roles\nmust') }}", "roles must"),
        ("{{ messages[0].none.none }}", "the chat template"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", "fuel"),
        ("{{ messages | nofilter }}", "nofilter"),
    ] {
        let line = render(template);
        assert!(line.contains(says) && !line.contains('\n'), "{template}: {line}");
    }
}

#[test]
fn templates_are_found_where_transformers_writes_them() {
    let out = with_template("{{ bos_token }}1{{ messages[0].content }}");
    let path = out.path().join("tokenizer_config.json");
    let chat = Chat::from_json(r#"[{"role": "assistant", "content": "a"}]"#).unwrap();
    let text = || Some(one(ChatTemplate::from_folder(out.path()).unwrap()?.render(&chat).unwrap()).text);
    assert_eq!(text().as_deref(), Some("<s>1a"));
    fs::write(&path, r#"{"bos_token": "B", "chat_template": "{{ messages[0].content }}2{{ bos_token }}"}"#)
        .unwrap();
    assert_eq!(text().as_deref(), Some("B1a"));
    fs::remove_file(out.path().join("chat_template.jinja")).unwrap();
    assert_eq!(text().as_deref(), Some("a2B"));
    let several = r#"{"chat_template": [{"name": "rag", "template": "3"}, {"name": "default", "template": "{{ messages[0].content }}4"}]}"#;
    fs::write(&path, several).unwrap();
    assert_eq!(text().as_deref(), Some("a4"));
    fs::write(&path, "{}").unwrap();
    assert_eq!(text(), None);
}

#[test]
fn lines_that_cannot_be_are_told_with_their_number() {
    let out = with_template("{% for m in messages %}{{ m.content }}{% endfor %}");
    let tokenizer = Tokenizer::from_folder(out.path()).unwrap();
    let path = out.path().join("lines.jsonl");
    let write = |text: &str, field: Option<&str>, template: bool| {
        fs::write(&path, text).unwrap();
        let template = template.then(|| ChatTemplate::from_folder(out.path()).unwrap()).flatten();
        let mut writer = TokenWriter::create(&out.path().join("tokens"), tokenizer.len(), None).unwrap();
        TextEncoder::new(&tokenizer, template)?.write(
            &mut TextSource::open(&path, field)?,
            &mut writer,
            |_| {},
        )?;
        writer.finish()
    };
    for (text, field, says) in [
        ("", None, "it has no text"),
        ("\n{\"text\": \"\"}\n", None, "it has no text"),
        ("{\"text\": \"a\"}\n\n{\"text\": ", None, "line 3: it is no JSON object of its own"),
        ("[\n{\"text\": \"a\"}]", None, "line 1: it is no JSON object"),
        (
            "{\"content\": \"a\", \"id\": 1}",
            None,
            "line 1: there is no field `text`, `messages` or `completion`, but content, id; name one with --field",
        ),
        ("{\"text\": \"a\"}\n{\"txt\": 1}", Some("text"), "line 2: there is no field `text`, but txt"),
        ("{\"text\": 5}", None, "line 1: field `text`: expected a text or a list of messages, got a number"),
        ("7", None, "line 1: it is no JSON object of its own, but a number"),
        ("\"some text\"", None, "line 1: it is no JSON object of its own, but a string"),
        ("[{\"text\": \"a\"}]", None, "line 1: it is no JSON object of its own, but a list"),
        ("{\"messages\": [{\"content\": \"a\"}]}", None, "line 1: field `messages`: message 0 has no `role`"),
        ("{\"messages\": [{\"role\": \"user\"}]}", None, "no message is of the role `assistant`"),
        (
            "{\"messages\": \"hello\"}",
            None,
            "line 1: field `messages`: expected a list of messages, got a string that is no JSON",
        ),
        ("{\"text\": \"\\ud800\"}", None, "line 1: it is no JSON object"),
        ("{\"messages\": [], \"tools\": 5}", None, "field `tools`: expected a list of objects, got a number"),
        ("{\"messages\": [], \"tools\": {\"a\": 1}}", None, "expected a list of objects, got an object"),
        ("{\"messages\": [], \"tools\": \"[1]\"}", None, "expected a list of objects, got a number in it"),
        ("{\"messages\": [], \"tools\": \"clock\"}", None, "got a string that is no JSON"),
    ] {
        let line = write(text, field, true).unwrap_err().to_string();
        assert!(
            line.contains(says) && line.contains("lines.jsonl") && !line.contains('\n'),
            "{text}: {line}"
        );
    }
    let chat = "{\"text\": \"a\"}\n{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n";
    let line = write(chat, None, false).unwrap_err().to_string();
    assert!(line.contains("line 2: ") && line.contains("needs chat_template.jinja"), "{line}");
    let file = write(chat, None, true).unwrap();
    assert_eq!(file.documents(), 2);
    let both = "{\"text\": \"\", \"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}";
    assert_eq!(write(both, None, true).unwrap().documents(), 1);
}

#[test]
fn a_byte_order_mark_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rest) in [("a.txt", "one"), ("a.jsonl", "{\"text\": \"one\"}")] {
        let path = folder.path().join(name);
        fs::write(&path, format!("\u{feff}{rest}")).unwrap();
        let mut source = TextSource::open(&path, None).unwrap();
        let piece = source.next_piece().unwrap();
        assert!(matches!(&piece, Some(Piece::Text { text, .. }) if text == "one"), "{piece:?}");
        assert!(source.next_piece().unwrap().is_none());
        assert_eq!(source.bytes_read(), source.bytes());
    }
}

#[test]
fn texts_are_between_the_folders_tokens() {
    let out = with_template("");
    let tokenizer = Tokenizer::from_folder(out.path()).unwrap();
    fs::write(out.path().join("a.jsonl"), "{\"body\": \"one\"}\n{\"body\": \"two\"}\n").unwrap();
    let mut writer =
        TokenWriter::create(&out.path().join("tokens"), tokenizer.len(), tokenizer.end_of_text()).unwrap();
    let mut source = TextSource::open(&out.path().join("a.jsonl"), Some("body")).unwrap();
    let mut bytes = 0;
    TextEncoder::new(&tokenizer, None).unwrap().write(&mut source, &mut writer, |done| bytes = done).unwrap();
    assert_eq!(bytes, source.bytes());
    let file = writer.finish().unwrap();
    let (one, two) = (tokenizer.encode("one").unwrap(), tokenizer.encode("two").unwrap());
    let expected = [&[0][..], &one, &[1, 0], &two, &[1]].concat();
    assert_eq!(file.read(0..file.tokens()).unwrap(), expected);
    assert_eq!(file.read(file.document(1).unwrap()).unwrap(), expected[one.len() + 2..]);
}

/// Of several templates, transformers takes `tool_use` for conversations with tools.
#[test]
fn tools_have_a_template_of_their_own() {
    let out = with_template("");
    fs::remove_file(out.path().join("chat_template.jinja")).unwrap();
    let path = out.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let messages = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    config["chat_template"] = serde_json::json!([
        { "name": "default", "template": messages },
        { "name": "tool_use", "template": format!("{{{{ tools[0].name }}}}\n{messages}") },
    ]);
    fs::write(&path, config.to_string()).unwrap();
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    let chat = r#""messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]"#;
    for (tools, begin) in [
        ("", ""),
        (r#""tools": "", "#, ""),
        (r#""tools": [{"name": "clock"}], "#, "clock\n"),
        (r#""tools": "[{\"name\": \"clock\"}]", "#, "clock\n"),
    ] {
        let chat = chat_of(&format!("{{{tools}{chat}}}"), out.path());
        assert_eq!(one(template.render(&chat).unwrap()).text, format!("{begin}user: hi\nassistant: ho\n"));
    }
    // Where transformers 5 writes them.
    let more = out.path().join("additional_chat_templates");
    fs::create_dir(&more).unwrap();
    fs::write(out.path().join("chat_template.jinja"), "of file {{ messages[0].content }}").unwrap();
    fs::write(more.join("tool_use.jinja"), "with tools {{ messages[0].content }}").unwrap();
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    for (tools, begin) in [("", "of file"), (r#""tools": [{"name": "clock"}], "#, "with tools")] {
        let chat = r#""messages": [{"role": "assistant", "content": "ho"}]"#;
        let chat = chat_of(&format!("{{{tools}{chat}}}"), out.path());
        assert_eq!(one(template.render(&chat).unwrap()).text, format!("{begin} ho"));
    }
}

/// As transformers passes further arguments: they come before special tokens of the same name.
#[test]
fn records_have_variables_for_the_template() {
    let out = with_template(
        "{{ '<think>' if thinking else 'none' }} {{ documents }} {{ bos_token }} {% for m in messages %}{{ m.content }}{% endfor %}",
    );
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    let answer = r#"{"role": "assistant", "content": "ho"}"#;
    let fields = [
        format!(r#""messages": [{answer}]"#),
        format!(r#""prompt": [{}], "completion": [{answer}]"#, r#"{"role": "user", "content": "hi"}"#),
    ];
    for (given, begin) in [
        ("", "none None <s> "),
        (r#""chat_template_kwargs": null, "#, "none None <s> "),
        (r#""chat_template_kwargs": {"thinking": true, "documents": [1]}, "#, "<think> [1] <s> "),
        (r#""chat_template_kwargs": "{\"bos_token\": \"<b>\"}", "#, "none None <b> "),
    ] {
        for (field, end) in fields.iter().zip(["ho", "hiho"]) {
            let chat = chat_of(&format!("{{{given}{field}}}"), out.path());
            let text = one(template.render(&chat).unwrap()).text;
            assert_eq!(text, format!("{begin}{end}"), "{given}");
        }
    }
    for (given, said) in [
        (
            r#"{"tokenize": true}"#,
            "field `chat_template_kwargs`: `tokenize` is no variable that a record can set",
        ),
        ("[1]", "field `chat_template_kwargs`: expected an object, got a list"),
    ] {
        let path = out.path().join("one.jsonl");
        fs::write(&path, format!(r#"{{"chat_template_kwargs": {given}, {}}}"#, fields[0])).unwrap();
        let error = TextSource::open(&path, None).unwrap().next_piece().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn line_ends_of_a_template_are_jinjas() {
    let lines = "{% for m in messages %}\r\n<{{ m.role }}>\r\n{{ m.content }}\r\n{% endfor %}\r\n";
    let out = with_template(lines);
    let chat = Chat::from_json(r#"[{"role": "assistant", "content": "a\r\n"}]"#).unwrap();
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    assert_eq!(one(template.render(&chat).unwrap()).text, "<assistant>\na\r\n\n");
}

/// Older folders have the special tokens in `special_tokens_map.json` alone.
#[test]
fn special_tokens_are_where_transformers_takes_them() {
    let out = with_template("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}");
    let chat = Chat::from_json(r#"[{"role": "assistant", "content": "a"}]"#).unwrap();
    let of = |config: &str| {
        fs::write(out.path().join("tokenizer_config.json"), config).unwrap();
        let end = Tokenizer::from_folder(out.path()).unwrap().end_of_text();
        (end, one(ChatTemplate::from_folder(out.path()).unwrap().unwrap().render(&chat).unwrap()).text)
    };
    let map = r#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}"#;
    fs::write(out.path().join("special_tokens_map.json"), map).unwrap();
    assert_eq!(of(r#"{"eos_token": "</s>"}"#), (Some(3), "<|im_start|><|im_end|>a".into()));
    assert_eq!(of(r#"{"eos_token": "</s>", "added_tokens_decoder": {}}"#), (Some(1), "</s>a".into()));
}

/// transformers would add them.
#[test]
fn tokens_of_the_configuration_alone_are_refused() {
    let out = with_template("");
    let of = |config: &str| {
        fs::write(out.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::from_folder(out.path()).map(|found| found.padding()).map_err(|error| error.to_string())
    };
    assert_eq!(of(r#"{"pad_token": {"content": "</s>"}}"#), Ok(Some(1)));
    assert_eq!(of(r#"{"pad_token": null, "added_tokens_decoder": {"1": {"content": "</s>"}}}"#), Ok(None));
    for (config, said) in [
        (r#"{"pad_token": "<pad>"}"#, "`pad_token` has the token \"<pad>\", and tokenizer.json does not"),
        (
            r#"{"added_tokens_decoder": {"1": {"content": "</s>"}, "900": {"content": "<tool>"}}}"#,
            "`added_tokens_decoder` has the token \"<tool>\", and tokenizer.json does not",
        ),
    ] {
        let line = of(config).unwrap_err();
        assert!(line.contains(said), "{line}");
    }
}

#[test]
fn the_head_of_a_second_answer_in_a_row_is_no_answer() {
    let turn = "<{{ m.role }}>{{ m.content }}\n";
    let out = with_template(&format!(
        "{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
    ));
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    let line = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
        {"role": "assistant", "content": "hum"}]}"#;
    let rendered = one(template.render(&chat_of(&line.replace('\n', ""), out.path())).unwrap());
    assert_eq!(answers(&rendered), ["ho\n", "hum\n"]);
}
