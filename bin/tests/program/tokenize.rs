//! `tokenize`: text and conversations to token files.

use std::fs;
use std::os::unix::fs::symlink;

use models::Tokenizer;
use models::tokens::TokenFile;

use crate::common::{Folder, Girandole, text};

const TOKENIZE: Girandole = Girandole("tokenize");

/// Returns what it prints, without times.
fn run(arguments: &[&str]) -> String {
    let output = TOKENIZE.succeed(arguments);
    assert_eq!(text(&output.stderr), "");
    let line = text(&output.stdout);
    let (before, times) = line.split_once(", seconds: ").unwrap();
    let (seconds, speed) = times.trim_end().split_once(", tokens/s: ").unwrap();
    assert!(seconds.parse::<f64>().is_ok() && speed.parse::<u64>().is_ok(), "{line}");
    before.to_string()
}

fn tokens(folder: &Folder, name: &str) -> Vec<u32> {
    let file = TokenFile::open(&folder.path(name)).unwrap();
    file.verify().unwrap();
    file.read(0..file.tokens()).unwrap()
}

#[test]
fn a_column_of_a_table_is_named() {
    let folder = Folder::new();
    fs::write(folder.path("a.csv"), "id,body\n1,an\n2,é\n").unwrap();
    let (a, out) = (folder.argument("a.csv"), folder.argument("out"));
    run(&["--tokenizer", "bytes", &a, "--field", "body", "--out", &out]);
    assert_eq!(tokens(&folder, "out"), [97, 110, 256, 0xc3, 0xa9, 256]);
}

#[test]
fn texts_become_tokens_of_bytes_and_of_characters() {
    let folder = Folder::new();
    fs::write(folder.path("a.txt"), "né").unwrap();
    fs::write(folder.path("b.jsonl"), "{\"body\": \"an\"}\n\n{\"body\": \"é\"}\n").unwrap();
    let (a, b, out) = (folder.argument("a.txt"), folder.argument("b.jsonl"), folder.argument("out"));
    let line = run(&["--tokenizer", "bytes", &a, &b, "--field", "body", "--out", &out]);
    assert_eq!(line, "documents: 3, tokens: 10, bytes: 34");
    assert_eq!(tokens(&folder, "out"), [110, 0xc3, 0xa9, 256, 97, 110, 256, 0xc3, 0xa9, 256]);
    let saved = folder.argument("saved");
    let options = ["--tokenizer", "characters", "--save-tokenizer", &saved, "--out", &out, "--field", "body"];
    assert_eq!(run(&[&options[..], &[&a, &b]].concat()), "documents: 3, tokens: 8, bytes: 34");
    assert_eq!(tokens(&folder, "out"), [1, 2, 3, 0, 1, 3, 2, 3]);
    let read = Tokenizer::from_folder(&folder.path("saved")).unwrap();
    assert_eq!(read.decode(&[1, 2, 0]).unwrap(), "néa");
    // The saved folder can be passed to --model.
    assert_eq!(run(&["--model", &saved, &a, "--out", &out]), "documents: 1, tokens: 3, bytes: 3");
    assert_eq!(fs::read_dir(folder.path(".")).unwrap().count(), 4);
}

#[test]
fn conversations_are_written_by_the_folders_template() {
    let folder = Folder::new();
    let model = folder.argument("model");
    fs::create_dir(&model).unwrap();
    Tokenizer::bytes().unwrap().save(model.as_ref()).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}"#;
    fs::write(folder.path("chat.jsonl"), chat).unwrap();
    let (chat, out) = (folder.argument("chat.jsonl"), folder.argument("out"));
    let line = TOKENIZE.refuse(&["--model", &model, &chat, "--out", &out]);
    assert!(line.contains("chat.jsonl: line 1: ") && line.contains("needs chat_template.jinja"), "{line}");
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}";
    fs::write(folder.path("model").join("chat_template.jinja"), template).unwrap();
    assert_eq!(run(&["--model", &model, &chat, "--out", &out]), "documents: 1, tokens: 12, bytes: 89");
    let expected: Vec<u32> =
        "u:hi\0\na:ho\0\n".bytes().map(|b| if b == 0 { 256 } else { b.into() }).collect();
    assert_eq!(tokens(&folder, "out"), expected);
    let rows =
        models::tokens::Rows::new(vec![(TokenFile::open(&folder.path("out")).unwrap(), 1.0)], 11).unwrap();
    let counted: Vec<i64> = rows.get(0).unwrap().targets.into_iter().filter(|target| *target >= 0).collect();
    assert_eq!(counted, [b'a'.into(), b':'.into(), b'h'.into(), b'o'.into(), 256]);
}

#[test]
fn what_cannot_be_used_is_told_in_one_line() {
    let folder = Folder::new();
    for (name, bytes) in
        [("text", &b"some text"[..]), ("empty", b""), ("bytes", b"a\xff"), ("l.json", b"[\n1]")]
    {
        fs::write(folder.path(name), bytes).unwrap();
    }
    let (a, out) = (folder.argument("text"), folder.argument("out"));
    let refuse = |arguments: &[&str], says: &str| {
        let line = TOKENIZE.refuse(arguments);
        assert!(line.contains(says), "{arguments:?}: {line}");
        assert!(!folder.path("out").exists());
        assert_eq!(fs::read(folder.path("text")).unwrap(), b"some text");
    };
    let bytes = ["--tokenizer", "bytes", "--out", &out];
    refuse(&[&bytes[..], &[&folder.argument("empty")]].concat(), "empty: it has no text");
    refuse(&[&bytes[..], &[&a, &folder.argument("empty")]].concat(), "empty: it has no text");
    refuse(&[&bytes[..], &[&folder.argument("bytes")]].concat(), "no text in UTF-8 from byte 1 on");
    refuse(&[&bytes[..], &[&folder.argument("l.json")]].concat(), "line 1: it is no JSON object of its own");
    refuse(&[&bytes[..], &[&folder.argument("none")]].concat(), "cannot read");
    refuse(&[&bytes[..], &["/dev/zero"]].concat(), "it is a device, and not a regular file");
    refuse(&[&bytes[..], &[&folder.argument(".")]].concat(), "it is a folder");
    if !cfg!(feature = "parquet") {
        fs::write(folder.path("t.parquet"), "PAR1").unwrap();
        refuse(
            &[&bytes[..], &[&folder.argument("t.parquet")]].concat(),
            "build it with `--features parquet`",
        );
    }
    refuse(&["--out", &out, &a], "--model <DIR>|--tokenizer <KIND>");
    refuse(&["--tokenizer", "bytes", "--out", &out], "FILE");
    refuse(&["--tokenizer", "characters", "--out", &out, &a], "give --save-tokenizer DIR");
    let (saved, empty) = (folder.argument("saved"), folder.argument("empty"));
    refuse(&["--tokenizer", "characters", "--save-tokenizer", &saved, "--out", &out, &empty], "empty");
    assert!(!folder.path("saved").exists());
    refuse(&["--model", &folder.argument("none"), "--out", &out, &a], "none: ");
    refuse(&["--tokenizer", "bytes", "--out", &a, &a], "--out");
    symlink("text", folder.path("link")).unwrap();
    refuse(&["--tokenizer", "bytes", "--out", &folder.argument("link"), &a], "--out");
    refuse(&["--tokenizer", "bytes", "--out", &folder.argument("none/out"), &a], "cannot write");
    run(&["--tokenizer", "bytes", "--out", &folder.argument("tokens"), &a]);
    refuse(&[&bytes[..], &[&folder.argument("tokens")]].concat(), "it is a token file already");
}
