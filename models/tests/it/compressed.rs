//! Compressed text.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use models::tokens::{Piece, TextSource};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// With a checksum, as the program `zstd` writes it.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns the texts of all pieces.
fn read(path: &std::path::Path) -> models::Result<Vec<String>> {
    let mut source = TextSource::open(path, None)?;
    let mut texts = Vec::new();
    while let Some(piece) = source.next_piece()? {
        let Piece::Text { text, .. } = piece else { unreachable!() };
        texts.push(text);
    }
    assert_eq!(source.bytes_read(), source.bytes());
    Ok(texts)
}

#[test]
fn compressed_files_are_read_as_what_is_in_them() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..100_000).map(|line| format!("line {line} é\n")).collect();
    for (ending, compress) in [("zst", zstd as fn(&[u8]) -> Vec<u8>), ("gz", gzip), ("ZSTD", zstd)] {
        let write = |name: &str, bytes: Vec<u8>| {
            let path = folder.path().join(format!("{name}.{ending}"));
            fs::write(&path, bytes).unwrap();
            path
        };
        assert_eq!(read(&write("a.txt", compress(text.as_bytes()))).unwrap().concat(), text);
        // Of several parts, as programs that compress in parallel write it.
        let (begin, end) = text.as_bytes().split_at(1000);
        let parts = [compress(begin), compress(end)].concat();
        assert_eq!(read(&write("parts", parts)).unwrap().concat(), text);
        let lines = "\u{feff}{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
        assert_eq!(
            read(&write("a.jsonl", compress(lines.trim_start_matches('\u{feff}').as_bytes()))).unwrap(),
            ["a", "b"]
        );
        assert_eq!(read(&write("a.csv", compress(b"text\na\nb\n"))).unwrap(), ["a", "b"]);
        for (name, bytes, says) in [
            (
                "cut.txt",
                compress(text.as_bytes()).split_at(5000).0.to_vec(),
                "it is compressed, and ends too early",
            ),
            (
                "cut.csv",
                compress(format!("text\n{text}").as_bytes()).split_at(5000).0.to_vec(),
                "it is compressed, and ends too early",
            ),
            ("plain", b"text".to_vec(), "it is not compressed as its name says"),
            ("empty", Vec::new(), "it is not compressed as its name says"),
        ] {
            let line = read(&write(name, bytes)).unwrap_err().to_string();
            assert!(line.contains(name) && line.contains(says) && !line.contains('\n'), "{line}");
        }
        let mut damaged = compress(text.as_bytes());
        // Gzip has a checksum at its end, and decodes what is before it.
        let place = if ending == "gz" { damaged.len() - 8 } else { damaged.len() / 2 };
        damaged[place..place + 4].fill(0xa5);
        let Err(damage) = read(&write("damaged", damaged)) else { panic!("damage of {ending} is not seen") };
        let line = damage.to_string();
        assert!(line.contains("it is compressed, and"), "{line}");
        assert!(line.contains("copy or download it again") && !line.contains('\n'), "{line}");
    }
    // The content decides, whatever the name.
    let path = folder.path().join("a.txt");
    fs::write(&path, gzip(b"text")).unwrap();
    assert_eq!(read(&path).unwrap(), ["text"]);
}
