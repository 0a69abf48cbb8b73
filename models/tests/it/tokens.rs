//! Token files and rows, valid and damaged.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use models::tokens::{IGNORE_INDEX, Row, Rows, TokenFile, TokenWriter};
use proptest::prelude::*;
use tempfile::TempDir;

/// Documents: for each token, whether it counts for the loss.
type Documents = Vec<Vec<(u32, bool)>>;

struct Fixture(TempDir);

impl Fixture {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, vocab_size: usize, documents: &Documents) -> TokenFile {
        let mut writer = TokenWriter::create(&self.path(name), vocab_size, Some(0)).unwrap();
        for document in documents {
            // In pieces, as a long text is written.
            for piece in document.chunks(3) {
                let tokens: Vec<u32> = piece.iter().map(|(token, _)| *token).collect();
                writer.push_counted(&tokens, |place| piece[place].1).unwrap();
            }
            writer.end_document().unwrap();
        }
        writer.finish().unwrap()
    }

    /// Writes a file of one document with `len` consecutive tokens from `first`.
    fn counting(&self, name: &str, first: u32, len: u32) -> TokenFile {
        self.write(name, 100_000, &vec![(first..first + len).map(|token| (token, true)).collect()])
    }

    fn table(&self, name: &str, rows: &[[i64; 4]]) -> PathBuf {
        let tokens = Tensor::from_slice(rows.as_flattened(), (rows.len(), 4), &Device::Cpu).unwrap();
        let path = self.path(name);
        training::save_tensors(&path, &HashMap::from([("tokens", tokens)])).unwrap();
        path
    }
}

fn all(rows: &Rows) -> Vec<Row> {
    (0..rows.len()).map(|index| rows.get(index).unwrap()).collect()
}

fn firsts(rows: &Rows) -> Vec<u32> {
    all(rows).iter().map(|row| row.tokens[0]).collect()
}

fn documents(vocab_size: u32) -> impl Strategy<Value = Documents> {
    prop::collection::vec(prop::collection::vec((0..vocab_size, prop::bool::weighted(0.7)), 0..20), 1..8)
        .prop_filter("no text", |documents| documents.iter().any(|document| !document.is_empty()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_written_is_read(wide: bool, documents in documents(60_000), len in 1..9usize) {
        let (fixture, vocab_size) = (Fixture::new(), if wide { 70_000 } else { 1 << 16 });
        let file = fixture.write("t", vocab_size, &documents);
        let flat: Vec<(u32, bool)> = documents.concat();
        prop_assert_eq!(file.tokens(), flat.len() as u64);
        prop_assert_eq!((file.vocab_size(), file.end_of_text()), (vocab_size, Some(0)));
        let filled: Vec<_> = documents.iter().filter(|document| !document.is_empty()).collect();
        prop_assert_eq!(file.documents(), filled.len() as u64);
        for (index, document) in (0..).zip(filled) {
            let tokens = file.read(file.document(index).unwrap()).unwrap();
            prop_assert_eq!(tokens, document.iter().map(|(token, _)| *token).collect::<Vec<_>>());
        }
        file.verify().unwrap();
        if flat.len() <= len {
            prop_assert!(Rows::new(vec![(file, 1.0)], len).unwrap_err().to_string().contains("too few"));
            return Ok(());
        }
        let rows = Rows::new(vec![(file, 1.0)], len).unwrap();
        prop_assert_eq!(rows.len(), (flat.len() - 1) / len);
        let rows = all(&rows);
        let tokens: Vec<u32> = rows.iter().flat_map(|row| row.tokens.clone()).collect();
        let targets: Vec<i64> = rows.iter().flat_map(|row| row.targets.clone()).collect();
        prop_assert_eq!(&tokens, &flat[..tokens.len()].iter().map(|(token, _)| *token).collect::<Vec<_>>());
        let target = |(token, counts): &(u32, bool)| if *counts { i64::from(*token) } else { IGNORE_INDEX };
        prop_assert_eq!(&targets, &flat[1..=tokens.len()].iter().map(target).collect::<Vec<_>>());
    }

    /// Any change results in an error or in rows: no panic, and no more memory than a row takes.
    #[test]
    fn damaged_files_are_errors_or_rows(
        documents in documents(50), place in any::<prop::sample::Index>(), byte: u8, cut in any::<bool>(),
    ) {
        let fixture = Fixture::new();
        fixture.write("t", 50, &documents);
        let path = fixture.path("t");
        let mut bytes = fs::read(&path).unwrap();
        let place = place.index(bytes.len());
        let same = bytes[place] == byte;
        if cut { bytes.truncate(place) } else { bytes[place] = byte }
        fs::write(&path, bytes).unwrap();
        let Ok(file) = TokenFile::open(&path) else { return Ok(()) };
        prop_assert!(!cut);
        // White space after the header, and numbers in the metadata, are not covered by the hash.
        prop_assert!(same || place < 1024 || file.verify().is_err());
        for index in 0..file.documents().min(1000) {
            let _ = file.document(index).and_then(|range| file.read(range));
        }
        if let Ok(rows) = Rows::new(vec![(file, 1.0)], 2) {
            for index in 0..rows.len().min(1000) {
                let _ = rows.get(index);
            }
        }
    }
}

#[test]
fn files_are_interleaved_and_weighted() {
    let fixture = Fixture::new();
    let rows = |weights: [f64; 2]| {
        let files =
            vec![(fixture.counting("a", 0, 9), weights[0]), (fixture.counting("b", 100, 17), weights[1])];
        Rows::new(files, 2).unwrap()
    };
    assert_eq!(firsts(&rows([1.0, 1.0])), [100, 0, 102, 104, 2, 106, 108, 4, 110, 112, 6, 114]);
    assert_eq!(firsts(&rows([2.0, 0.5])), [0, 100, 2, 4, 104, 6, 0, 108, 2, 4, 112, 6]);
    assert_eq!(rows([1.5, 1.0]).files().map(|(_, taken)| taken).collect::<Vec<_>>(), [6, 8]);
    let some: Vec<u32> = firsts(&rows([1.5, 1.0])).into_iter().filter(|first| *first < 100).collect();
    assert_eq!(some, [0, 2, 4, 6, 0, 4]);
    for weight in [0.0, -1.0, 0.01, f64::NAN, f64::INFINITY, 1e300] {
        let line = Rows::new(vec![(fixture.counting("a", 0, 9), weight)], 2).unwrap_err().to_string();
        assert!(line.contains("takes a row at least"), "{line}");
    }
    for weight in [2e9, 1e15] {
        let line = Rows::new(vec![(fixture.counting("a", 0, 9), weight)], 2).unwrap_err().to_string();
        assert!(line.contains("give smaller weights, or longer rows"), "{line}");
    }
}

#[test]
fn fingerprints_tell_contents_order_weights_and_length() {
    let fixture = Fixture::new();
    let (a, b) = (fixture.counting("a", 0, 50), fixture.counting("b", 1, 50));
    let of = |files: &[(&TokenFile, f64)], len| {
        let files = files.iter().map(|(file, weight)| ((*file).clone(), *weight)).collect();
        Rows::new(files, len).unwrap().fingerprint()
    };
    let all = [
        of(&[(&a, 1.0), (&b, 1.0)], 4),
        of(&[(&b, 1.0), (&a, 1.0)], 4),
        of(&[(&a, 1.0), (&b, 2.0)], 4),
        of(&[(&a, 1.0), (&b, 1.0)], 5),
        of(&[(&a, 1.0)], 4),
        of(&[(&b, 1.0)], 4),
    ];
    assert_eq!(all.iter().collect::<std::collections::HashSet<_>>().len(), all.len());
    assert_eq!(of(&[(&fixture.counting("c", 0, 50), 1.0)], 4), all[4]);
    // The mask of counted tokens is part of the content.
    let masked = fixture.write("d", 100_000, &vec![(0..50).map(|token| (token, token != 7)).collect()]);
    assert_ne!(of(&[(&masked, 1.0)], 4), all[4]);
}

#[test]
fn files_of_rows_are_rows() {
    let fixture = Fixture::new();
    let path = fixture.table("rows", &[[1, 2, 3, 4], [50, 6, 7, 8]]);
    let file = TokenFile::open(&path).unwrap();
    assert_eq!((file.row_length(), file.vocab_size(), file.documents()), (Some(3), 51, 2));
    file.verify().unwrap();
    let rows = Rows::new(vec![(file.clone(), 1.0)], 3).unwrap();
    assert_eq!(
        rows.get(1).unwrap(),
        Row { tokens: vec![50, 6, 7], targets: vec![6, 7, 8], documents: vec![], scored: vec![] }
    );
    assert_eq!(rows.len(), 2);
    let line = Rows::new(vec![(file, 1.0)], 4).unwrap_err().to_string();
    assert!(line.contains("its rows have 4 tokens, for 3 inputs; rows of 4 are asked for"), "{line}");
    let other = TokenFile::open(&fixture.table("other", &[[1, 2, 3, 4], [50, 6, 7, 9]])).unwrap();
    assert_ne!(Rows::new(vec![(other, 1.0)], 3).unwrap().fingerprint(), rows.fingerprint());
}

#[test]
fn other_files_are_told_apart() {
    let fixture = Fixture::new();
    let save = |name: &str, tensors: &[(&str, Tensor)]| {
        let tensors: HashMap<&str, Tensor> = tensors.iter().cloned().collect();
        training::save_tensors(&fixture.path(name), &tensors).unwrap();
    };
    let numbers =
        |numbers: &[i64], shape: (usize, usize)| Tensor::from_slice(numbers, shape, &Device::Cpu).unwrap();
    save("weights", &[("w", numbers(&[1], (1, 1)))]);
    save("vector", &[("tokens", numbers(&[1, 2], (1, 2)).squeeze(0).unwrap())]);
    save("floats", &[("tokens", numbers(&[1, 2], (1, 2)).to_dtype(candle_core::DType::F32).unwrap())]);
    save("narrow", &[("tokens", numbers(&[1, 2], (2, 1)))]);
    save("empty", &[("tokens", numbers(&[], (0, 8)))]);
    save("negative", &[("tokens", numbers(&[1, 2, 3, -7], (2, 2)))]);
    save("more", &[("tokens", numbers(&[1, 2], (1, 2))), ("w", numbers(&[1], (1, 1)))]);
    fs::write(fixture.path("text"), "some text").unwrap();
    for (name, says) in [
        ("weights", "there is no tensor `tokens`"),
        ("vector", "expected are a file of `girandole tokenize`"),
        ("floats", "`tokens` is F32 (1, 2)"),
        ("narrow", "2 tokens a row at least"),
        ("empty", "it needs 1 row"),
        ("negative", "row 1 has token -7"),
        ("more", "beside `tokens` it has `w`"),
        ("text", "no whole safetensors file"),
        (".", "it is a folder"),
        ("none", "cannot read"),
    ] {
        let line = TokenFile::open(&fixture.path(name)).unwrap_err().to_string();
        assert!(line.contains(says) && !line.contains('\n'), "{name}: {line}");
    }
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let fixture = Fixture::new();
    let rows = Rows::new(vec![(fixture.counting("a", 0, 1000), 1.0)], 10).unwrap();
    rows.get(99 - 1).unwrap();
    fs::File::options().write(true).open(fixture.path("a")).unwrap().set_len(1100).unwrap();
    let line = rows.get(98).unwrap_err().to_string();
    assert!(line.contains("cannot read"), "{line}");
    assert!(rows.get(usize::MAX).unwrap_err().to_string().contains("of 99"));
}

#[test]
fn nothing_is_left_of_a_file_that_is_not_finished() {
    let fixture = Fixture::new();
    let path = fixture.path("t");
    let mut writer = TokenWriter::create(&path, 10, None).unwrap();
    writer.push(&[1, 2]).unwrap();
    let line = writer.push(&[3, 10]).unwrap_err().to_string();
    assert!(line.contains("a token is 10"), "{line}");
    drop(writer);
    let empty = TokenWriter::create(&path, 10, None).unwrap();
    assert!(empty.finish().unwrap_err().to_string().contains("the text is empty"));
    assert_eq!(names(fixture.0.path()), [""; 0]);
    fs::write(&path, "old").unwrap();
    let mut writer = TokenWriter::create(&path, 10, None).unwrap();
    writer.push(&[1, 2]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(writer.finish().unwrap().read(0..2).unwrap(), [1, 2]);
    assert_eq!(names(fixture.0.path()), ["t"]);
    assert!(TokenWriter::create(&path, 0, None).is_err());
    assert!(TokenWriter::create(fixture.0.path(), 10, None).is_err());
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
