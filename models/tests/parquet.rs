//! Parquet files as data: texts and conversations of a column, and damaged files.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use models::tokens::{ChatTemplate, Data, DataConfig, Piece, TextEncoder, TextSource, TokenWriter, TooLong};
use models::{LabelsConfig, Problem, Tokenizer};
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

/// Writes a column of numbers and one of texts, some of them null, in these row groups.
fn write_texts(path: &Path, column: &str, groups: &[&[Option<&str>]], compression: Compression) {
    let schema =
        format!("message schema {{ REQUIRED INT64 number; OPTIONAL BYTE_ARRAY {column} (STRING); }}");
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    for texts in groups {
        let mut group = writer.next_row_group().unwrap();
        let mut numbers = group.next_column().unwrap().unwrap();
        let all: Vec<i64> = (0..texts.len() as i64).collect();
        numbers.typed::<Int64Type>().write_batch(&all, None, None).unwrap();
        numbers.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = texts.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let defined: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&defined), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Writes conversations: messages with a role and a content.
fn write_chats(path: &Path, chats: &[&[(&str, &str)]]) {
    let schema =
        "message schema { OPTIONAL group messages (LIST) { REPEATED group list { OPTIONAL group element {
        OPTIONAL BYTE_ARRAY role (STRING); OPTIONAL BYTE_ARRAY content (STRING); } } } }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let again: Vec<i16> =
        chats.iter().flat_map(|chat| (0..chat.len()).map(|place| i16::from(place > 0))).collect();
    let defined = vec![4; again.len()];
    for part in 0..2 {
        let text = |message: &(&str, &str)| ByteArray::from(if part == 0 { message.0 } else { message.1 });
        let values: Vec<ByteArray> = chats.iter().flat_map(|chat| chat.iter().map(text)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&defined), Some(&again)).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Writes prompts with their completions.
fn write_completions(path: &Path, pairs: &[(&str, &str)]) {
    let schema =
        "message schema { REQUIRED BYTE_ARRAY prompt (STRING); REQUIRED BYTE_ARRAY completion (STRING); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for of in [|pair: &(&str, &str)| ByteArray::from(pair.0), |pair: &(&str, &str)| ByteArray::from(pair.1)] {
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = pairs.iter().map(of).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Fingerprint of the tokens of a file, and of which of them count.
fn fingerprint(path: &Path, template: Option<ChatTemplate>) -> String {
    let (folder, tokenizer) = (tempfile::tempdir().unwrap(), Tokenizer::bytes().unwrap());
    let encoder = TextEncoder::new(&tokenizer, template).unwrap();
    let mut writer = TokenWriter::create(&folder.path().join("out"), tokenizer.len(), None).unwrap();
    encoder.write(&mut TextSource::open(path, None).unwrap(), &mut writer, |_| {}).unwrap();
    writer.finish().unwrap().fingerprint().to_string()
}

fn texts(path: &Path, field: Option<&str>) -> models::Result<Vec<String>> {
    let mut source = TextSource::open(path, field)?;
    let mut all = Vec::new();
    while let Some(piece) = source.next_piece()? {
        if let Piece::Text { text, begins: true, ends: true, .. } = piece {
            all.push(text);
        }
        assert!(source.bytes_read() <= source.bytes());
    }
    Ok(all)
}

#[test]
fn each_row_is_a_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.Parquet");
    let groups: [&[Option<&str>]; 3] =
        [&[Some("né"), None, Some("")], &[Some("two\nlines")], &[Some("last")]];
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(Default::default()),
    ] {
        write_texts(&path, "text", &groups, compression);
        assert_eq!(texts(&path, None).unwrap(), ["né", "two\nlines", "last"], "{compression:?}");
    }
    write_texts(&path, "body", &groups, Compression::SNAPPY);
    assert_eq!(texts(&path, Some("body")).unwrap().len(), 3);
    let line = texts(&path, None).unwrap_err().to_string();
    assert!(
        line.ends_with(
            "there is no column `text`, `messages` or `completion`, but number, body; name one with --field"
        ),
        "{line}"
    );
    let line = texts(&path, Some("number")).unwrap_err().to_string();
    assert!(line.contains("row 1: field `number`: expected a text or a list of messages"), "{line}");
    // Usable for training: 14 bytes, and an end-of-text token for each of three texts.
    let tokenizer = Tokenizer::bytes().unwrap();
    let config = DataConfig {
        tokenizer: Some(&tokenizer),
        field: Some("body"),
        length: Some(5),
        ..DataConfig::default()
    };
    let rows = Data::open(&[path.display().to_string().parse().unwrap()], &config).unwrap();
    assert_eq!((rows.len(), rows.get(0).unwrap().tokens), (3, vec![110, 0xc3, 0xa9, 256, 116]));
}

#[test]
fn conversations_are_those_of_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (table, lines) = (folder.path().join("c.parquet"), folder.path().join("c.jsonl"));
    let chats: [&[(&str, &str)]; 2] =
        [&[("user", "hi"), ("assistant", "ho")], &[("system", "s"), ("user", "a"), ("assistant", "é")]];
    write_chats(&table, &chats);
    let line = |chat: &&[(&str, &str)]| {
        let messages =
            chat.iter().map(|(role, content)| serde_json::json!({ "role": role, "content": content }));
        serde_json::json!({ "messages": messages.collect::<Vec<_>>() }).to_string() + "\n"
    };
    std::fs::write(&lines, chats.iter().map(line).collect::<String>()).unwrap();
    std::fs::write(
        folder.path().join("chat_template.jinja"),
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}",
    )
    .unwrap();
    let template = || ChatTemplate::from_folder(folder.path()).unwrap();
    assert_eq!(fingerprint(&table, template()), fingerprint(&lines, template()));
}

#[test]
fn completions_are_those_of_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (table, lines) = (folder.path().join("c.parquet"), folder.path().join("c.jsonl"));
    let pairs = [("1 + 1 =", " 2"), ("", "é"), ("a longer one:\n", "two\nlines")];
    write_completions(&table, &pairs);
    let line = |(prompt, completion)| {
        serde_json::json!({ "prompt": prompt, "completion": completion }).to_string() + "\n"
    };
    std::fs::write(&lines, pairs.map(line).concat()).unwrap();
    assert_eq!(fingerprint(&table, None), fingerprint(&lines, None));
    // A text is another: prompts count in it.
    std::fs::write(
        &lines,
        pairs
            .map(|(prompt, text)| serde_json::json!({ "text": prompt.to_string() + text }).to_string() + "\n")
            .concat(),
    )
    .unwrap();
    assert_ne!(fingerprint(&table, None), fingerprint(&lines, None));
}

/// As a string of JSON, and as a structure, in which a row may leave out what others have.
#[test]
fn variables_of_templates_are_those_of_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (table, lines) = (folder.path().join("v.parquet"), folder.path().join("v.jsonl"));
    let template = "{{ 'think ' if thinking else '' }}{% for m in messages %}{{ m.content }}\n{% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let template = || ChatTemplate::from_folder(folder.path()).unwrap();
    let messages = r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]"#;
    let given = [r#"{"thinking": true}"#, r#"{"thinking": false}"#, "null"];
    let line = |given| format!("{{\"messages\": {messages}, \"chat_template_kwargs\": {given}}}\n");
    std::fs::write(&lines, given.map(line).concat()).unwrap();
    let expected = fingerprint(&lines, template());
    for column in [
        "BYTE_ARRAY chat_template_kwargs (STRING);",
        "group chat_template_kwargs { OPTIONAL BOOLEAN thinking; }",
    ] {
        let schema = format!("message schema {{ REQUIRED BYTE_ARRAY messages (STRING); OPTIONAL {column} }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let file = File::create(&table).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut texts = group.next_column().unwrap().unwrap();
        let all = vec![ByteArray::from(messages); given.len()];
        texts.typed::<ByteArrayType>().write_batch(&all, None, None).unwrap();
        texts.close().unwrap();
        let mut variables = group.next_column().unwrap().unwrap();
        if column.starts_with("group") {
            let variables = variables.typed::<BoolType>();
            variables.write_batch(&[true, false], Some(&[2, 2, 0]), None).unwrap();
        } else {
            let texts = [given[0], given[1]].map(ByteArray::from);
            variables.typed::<ByteArrayType>().write_batch(&texts, Some(&[1, 1, 0]), None).unwrap();
        }
        variables.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        assert_eq!(fingerprint(&table, template()), expected, "{column}");
    }
    // The variables count.
    std::fs::write(&lines, line("null").repeat(3)).unwrap();
    assert_ne!(fingerprint(&lines, template()), expected);
}

#[test]
fn labels_are_those_of_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let labels = LabelsConfig {
        names: vec!["no".into(), "yes".into()],
        problem: Problem::SingleLabel,
        pad_token: None,
    };
    let rows = [("a", 1), ("b c", 0)];
    let open = |name: &str| {
        let tokenizer = Tokenizer::bytes().unwrap();
        let config = DataConfig {
            tokenizer: Some(&tokenizer),
            length: Some(8),
            is_padded: true,
            labels: Some(&labels),
            too_long: TooLong::Truncate,
            ..DataConfig::default()
        };
        Data::open(&[path(name).display().to_string().parse().unwrap()], &config).unwrap().fingerprint()
    };
    for (text, label) in [("text", "label"), ("prompt", "labels")] {
        let schema =
            format!("message schema {{ REQUIRED INT64 {label}; REQUIRED BYTE_ARRAY {text} (STRING); }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let file = File::create(path("l.parquet")).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&rows.map(|(_, label)| label), None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column
            .typed::<ByteArrayType>()
            .write_batch(&rows.map(|(text, _)| ByteArray::from(text)), None, None)
            .unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let lines = rows.map(|row| serde_json::json!({ text: row.0, label: row.1 }).to_string() + "\n");
        std::fs::write(path("l.jsonl"), lines.concat()).unwrap();
        let lines = rows.map(|row| format!("{},{}\n", row.1, row.0)).concat();
        std::fs::write(path("l.csv"), format!("{label},{text}\n{lines}")).unwrap();
        assert_eq!([open("l.parquet"), open("l.csv")], [open("l.jsonl"), open("l.jsonl")], "{text} {label}");
    }
}

#[test]
fn a_damaged_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    write_texts(
        &path,
        "text",
        &[&[Some("some text"), Some("more text")], &[Some("last")]],
        Compression::SNAPPY,
    );
    let whole = std::fs::read(&path).unwrap();
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        let line = texts(&path, None).unwrap_err().to_string();
        assert!(line.contains("t.parquet: ") && line.lines().count() == 1, "{len}: {line}");
    }
    for place in 0..whole.len() {
        for change in [1, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[place] ^= change;
            std::fs::write(&path, &bytes).unwrap();
            // Pages have no checksums, so some changes result in another text.
            if let Err(error) = texts(&path, None) {
                assert_eq!(error.to_string().lines().count(), 1, "{place}: {error}");
            }
        }
    }
}
