//! Tables of text, CSV and TSV, and records with several fields.

use std::fs;

use models::tokens::{Piece, TextSource};

#[test]
fn tables_of_text_are_read_by_their_columns() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str, content: &str, field: Option<&str>| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let mut source = TextSource::open(&path, field)?;
        let mut texts = Vec::new();
        while let Some(piece) = source.next_piece()? {
            texts.push(match piece {
                Piece::Text { text, begins: true, ends: true, .. } => text,
                other => format!("{other:?}").chars().take(4).collect(),
            });
        }
        assert_eq!(source.bytes_read(), source.bytes());
        Ok::<_, models::Error>(texts)
    };
    let quoted = "\u{feff}id,text\r\n1,\"a, \"\"b\"\"\nc\"\r\n2,\r\n3,d e\r\n";
    assert_eq!(read("a.csv", quoted, None).unwrap(), ["a, \"b\"\nc", "d e"]);
    assert_eq!(read("a.csv", "text\na\n\"b\"", None).unwrap(), ["a", "b"]);
    assert_eq!(read("a.CSV", quoted, Some("id")).unwrap(), ["1", "2", "3"]);
    assert_eq!(read("a.tsv", "text\tid\na,b\t1\n", None).unwrap(), ["a,b"]);
    let chats = "messages,text\n\"[{\"\"role\"\": \"\"assistant\"\", \"\"content\"\": \"\"a\"\"}]\",\n,b\n";
    assert_eq!(read("chats.csv", chats, None).unwrap(), ["Chat", "b"]);
    for (content, field, says) in [
        (
            "a,b\n1,2\n",
            None,
            "its first line has no column `text`, `messages` or `completion`, but a, b; name one with --field",
        ),
        ("text\n1,2\n", None, "line 2: it has 2 columns, and the first line has 1"),
        ("text,b\n1,2\n\"x\ny\",2\n3\n", None, "line 5: it has 1 columns, and the first line has 2"),
        ("messages\nhello\n", None, "line 2: field `messages`: expected a list of messages"),
        (
            "messages,text\n[],b\n",
            Some("messages"),
            "line 2: field `messages`: no message is of the role `assistant`",
        ),
        ("messages,text\n[],b\n", None, "line 2: both `text` and `messages` are filled"),
        ("text\nok\n\"open, next\nmore\n", None, "line 3: a quote is opened that is not closed"),
        ("text\nok\n\"open, next", None, "line 3: a quote is opened that is not closed"),
        ("id,text,text\n1,a,b\n", None, "its first line has several columns `text`"),
    ] {
        let line = read("b.csv", content, field).unwrap_err().to_string();
        assert!(line.contains(says) && line.contains("b.csv") && !line.contains('\n'), "{content}: {line}");
    }
    fs::write(folder.path().join("b.csv"), b"text\na\n\xff\n").unwrap();
    let mut source = TextSource::open(&folder.path().join("b.csv"), None).unwrap();
    source.next_piece().unwrap();
    let line = source.next_piece().unwrap_err().to_string();
    assert!(line.contains("line 3: it is no text in UTF-8"), "{line}");
}

#[test]
fn a_record_has_a_text_or_a_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let both = r#"{"text": "b", "messages": [{"role": "assistant", "content": "a"}]}"#;
    fs::write(&path, format!("{{\"text\": \"a\"}}\n{both}\n")).unwrap();
    let mut source = TextSource::open(&path, None).unwrap();
    source.next_piece().unwrap();
    let line = source.next_piece().unwrap_err().to_string();
    assert!(line.contains("a.jsonl: line 2: both `text` and `messages` are filled; name the one"), "{line}");
    fs::write(&path, both).unwrap();
    for (field, is_chat) in [("text", false), ("messages", true)] {
        let piece = TextSource::open(&path, Some(field)).unwrap().next_piece().unwrap();
        assert_eq!(matches!(piece, Some(Piece::Chat(_))), is_chat, "{field}");
    }
}
