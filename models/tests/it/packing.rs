//! Rows of documents.

use std::path::Path;

use models::tokens::{IGNORE_INDEX, Packing, Row, Rows, RowsConfig, TokenFile, TokenWriter, TooLong};
use proptest::prelude::*;
use serde::Deserialize;

/// Writes documents of these lengths: their tokens are numbered through, from 1.
fn write(path: &Path, lengths: &[u32]) -> TokenFile {
    let mut writer = TokenWriter::create(path, 10_000_000, None).unwrap();
    let mut next = 1;
    for length in lengths {
        writer.push(&(next..next + length).collect::<Vec<_>>()).unwrap();
        writer.end_document().unwrap();
        next += length;
    }
    writer.finish().unwrap()
}

fn rows(lengths: &[u32], len: usize, packing: Packing, too_long: TooLong) -> models::Result<Rows> {
    let folder = tempfile::tempdir().unwrap();
    let file = write(&folder.path().join("t.tokens"), lengths);
    Rows::packed(vec![(file, 1.0)], &RowsConfig { packing: Some(packing), too_long, ..RowsConfig::new(len) })
}

fn all(rows: &Rows) -> Vec<Row> {
    (0..rows.len()).map(|index| rows.get(index).unwrap()).collect()
}

/// Returns the inputs and targets of each of a row's documents; the others have to be padding.
fn documents(row: &Row) -> Vec<(Vec<u32>, Vec<i64>)> {
    let (mut tokens, mut targets) = (&row.tokens[..], &row.targets[..]);
    let mut next = |len: &u32| {
        let (document, of_document);
        (document, tokens) = tokens.split_at(*len as usize);
        (of_document, targets) = targets.split_at(*len as usize);
        (document.to_vec(), of_document.to_vec())
    };
    let documents = row.documents.iter().map(&mut next).collect();
    assert!(tokens.iter().all(|token| *token == 0) && targets.iter().all(|target| *target == IGNORE_INDEX));
    documents
}

/// Returns the first tokens of the documents, and last that behind the last one.
fn bounds(lengths: &[u32]) -> Vec<u32> {
    let mut bounds = vec![1];
    bounds.extend(lengths.iter().scan(1, |end, length| {
        *end += length;
        Some(*end)
    }));
    bounds
}

#[derive(Deserialize)]
struct Case {
    length: usize,
    lengths: Vec<u32>,
    /// Of each part: its document, its first token in it, and the number of its tokens.
    rows: Vec<Vec<[u32; 3]>>,
}

/// TRL has the longest documents first, in rows and among them; here they keep the order of the file.
#[test]
fn rows_are_those_of_trl() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../fixtures/packing.json")).unwrap();
    for Case { length, lengths, rows: expected } in cases {
        let bounds = bounds(&lengths);
        let part = |[document, first, len]: &[u32; 3]| (bounds[*document as usize] + first, *len);
        let mut expected: Vec<Vec<(u32, u32)>> =
            expected.iter().map(|row| row.iter().map(part).collect()).collect();
        expected.iter_mut().for_each(|row| row.sort_unstable());
        expected.sort_unstable();
        let rows = all(&rows(&lengths, length, Packing::Whole, TooLong::Cut).unwrap());
        let row = |row: &Row| -> Vec<(u32, u32)> {
            documents(row).iter().map(|(tokens, _)| (tokens[0], tokens.len() as u32)).collect()
        };
        assert_eq!(rows.iter().map(row).collect::<Vec<_>>(), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn each_token_is_in_a_row_once(
        lengths in prop::collection::vec(1..40u32, 1..60), len in 1..50usize, drop: bool,
    ) {
        let too_long = if drop { TooLong::Drop } else { TooLong::Cut };
        let is_long = |length: &&u32| **length as usize > len;
        let long = lengths.iter().filter(is_long).count();
        let rows = match rows(&lengths, len, Packing::Whole, too_long) {
            Err(error) => {
                prop_assert!(drop && long == lengths.len(), "{}", error);
                return Ok(());
            }
            Ok(rows) => rows,
        };
        let (report, rows) = (rows.packing().unwrap(), all(&rows));
        prop_assert!(rows.iter().all(|row| row.tokens.len() == len && row.targets.len() == len));
        let bounds = bounds(&lengths);
        let mut expected: Vec<u32> = Vec::new();
        for document in bounds.windows(2).filter(|document| !drop || document[1] - document[0] <= len as u32) {
            expected.extend(document[0]..document[1]);
        }
        let parts: Vec<(Vec<u32>, Vec<i64>)> = rows.iter().flat_map(documents).collect();
        let mut found: Vec<u32> = parts.iter().flat_map(|(tokens, _)| tokens.clone()).collect();
        found.sort_unstable();
        prop_assert_eq!(&found, &expected);
        for (tokens, targets) in &parts {
            // Its document; a part is all of it, unless it is longer than a row.
            let after = bounds.partition_point(|bound| *bound <= tokens[0]);
            let (begin, end) = (bounds[after - 1], bounds[after]);
            prop_assert!((end - begin) as usize == tokens.len() || (end - begin) as usize > len);
            for (token, target) in tokens.iter().zip(targets) {
                let next = if token + 1 == end { IGNORE_INDEX } else { i64::from(token + 1) };
                prop_assert_eq!(*target, next);
            }
        }
        let firsts: Vec<u32> = rows.iter().map(|row| row.tokens[0]).collect();
        prop_assert!(firsts.is_sorted());
        let (cut, dropped) = if drop { (0, long) } else { (long, 0) };
        prop_assert_eq!((report.documents, report.cut, report.dropped), (lengths.len() as u64, cut as u64, dropped as u64));
        let padding = 1.0 - found.len() as f64 / (rows.len() * len) as f64;
        prop_assert!((report.padding - padding).abs() < 1e-9);
    }

    /// The rows are those of a stream, and only a document's last target differs.
    #[test]
    fn documents_of_a_stream_are_told(
        lengths in prop::collection::vec(1..20u32, 1..60), len in 1..50usize, is_padded: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let file = write(&folder.path().join("t.tokens"), &lengths);
        let open = |packing| {
            let config = RowsConfig { packing: Some(packing), is_padded, ..RowsConfig::new(len) };
            Rows::packed(vec![(file.clone(), 1.0)], &config)
        };
        let Ok(stream) = open(Packing::Stream) else { return Ok(()) };
        let (told, bounds) = (open(Packing::Documents).unwrap(), bounds(&lengths));
        prop_assert_ne!(stream.fingerprint(), told.fingerprint());
        prop_assert_eq!(told.packing(), None);
        for (stream, row) in all(&stream).into_iter().zip(all(&told)) {
            let target = |target: &i64| match u32::try_from(*target) {
                Ok(next) if bounds.contains(&next) => IGNORE_INDEX,
                _ => *target,
            };
            prop_assert_eq!(&stream.targets.iter().map(target).collect::<Vec<_>>(), &row.targets);
            prop_assert_eq!(&stream.tokens, &row.tokens);
            prop_assert!(stream.documents.is_empty());
            for (tokens, _) in documents(&row) {
                let inner = bounds.iter().find(|bound| tokens[1..].contains(bound));
                prop_assert!(inner.is_none() && tokens.is_sorted());
            }
            let begins: Vec<u32> = documents(&row).iter().skip(1).map(|(tokens, _)| tokens[0]).collect();
            prop_assert!(begins.iter().all(|begin| bounds.contains(begin)));
        }
    }
}

/// Returns lengths as conversations have them: most are short, some are long.
fn mixed(count: u32) -> Vec<u32> {
    let random = |n: u32| n.wrapping_mul(2_654_435_761) >> 16;
    (0..count).map(|n| (5.0 * (1.0 + f64::from(random(n)) / 16_384.0).powi(3)) as u32).collect()
}

#[test]
fn ten_thousand_conversations_of_mixed_length_waste_little() {
    let lengths = mixed(10_000);
    for (len, most) in [(512, 0.002), (1024, 0.002), (1000, 0.002), (2048, 0.005)] {
        let rows = rows(&lengths, len, Packing::Whole, TooLong::Cut).unwrap();
        let padding = rows.packing().unwrap().padding;
        assert!(padding <= most, "{len}: {padding}");
    }
}

/// Rows are read in any order, by ranks that have not read the others, over more windows than are kept.
#[test]
fn a_row_depends_on_its_index_alone() {
    let lengths: Vec<u32> = (0..300_000u32).map(|n| 1 + n * 7 % 5).collect();
    let open = || rows(&lengths, 128, Packing::Whole, TooLong::Cut).unwrap();
    let (one, other) = (open(), open());
    let count = one.len();
    let expected: Vec<Row> = (0..count).step_by(17).map(|index| one.get(index).unwrap()).collect();
    for (place, index) in (0..count).step_by(17).enumerate().collect::<Vec<_>>().into_iter().rev() {
        assert_eq!(other.get(index).unwrap(), expected[place]);
    }
    assert_eq!(one.fingerprint(), other.fingerprint());
    assert_ne!(one.fingerprint(), rows(&lengths, 128, Packing::Whole, TooLong::Drop).unwrap().fingerprint());
}

#[test]
fn what_does_not_fit_a_row_is_told() {
    let refused = |lengths: &[u32], too_long| {
        rows(lengths, 8, Packing::Whole, too_long).map(drop).map_err(|error| error.to_string())
    };
    let said = refused(&[3, 8, 9, 20], TooLong::Error).unwrap_err();
    assert!(said.contains("document 3 has 9 tokens, and rows have 8: give longer rows"), "{said}");
    assert_eq!(refused(&[3, 8], TooLong::Error), Ok(()));
    let said = refused(&[9, 20], TooLong::Drop).unwrap_err();
    assert!(said.contains("each of its documents has more than 8 tokens, and is left out"), "{said}");
}

#[test]
fn the_length_of_a_tokens_document_is_its_mean() {
    let of = |packing| rows(&[2, 6, 8, 5], 8, packing, TooLong::Cut).unwrap();
    let whole = of(Packing::Whole);
    // 2 and 6, 8, and 5 with three unused places.
    assert_eq!(whole.document_len(10).unwrap(), f64::from(2 * 2 + 6 * 6 + 8 * 8 + 5 * 5) / 24.0);
    // The first of three rows, because at most one is read.
    assert_eq!(whole.document_len(1).unwrap(), f64::from(2 * 2 + 6 * 6) / 8.0);
    assert_eq!(of(Packing::Stream).document_len(10).unwrap(), 8.0);
}

#[test]
fn by_default_conversations_are_whole_and_texts_a_stream() {
    let folder = tempfile::tempdir().unwrap();
    let text = write(&folder.path().join("text"), &[5, 6]);
    let mut writer = TokenWriter::create(&folder.path().join("chats"), 100, None).unwrap();
    for len in [4, 3] {
        writer.push_counted(&vec![7; len], |place| place > 1).unwrap();
        writer.end_document().unwrap();
    }
    let rows = Rows::packed(vec![(text, 1.0), (writer.finish().unwrap(), 1.0)], &RowsConfig::new(8)).unwrap();
    let lengths: Vec<Vec<u32>> = all(&rows).into_iter().map(|row| row.documents).collect();
    assert_eq!(lengths, [vec![], vec![4, 3]]);
    let ignored = IGNORE_INDEX;
    assert_eq!(rows.get(1).unwrap().targets, [ignored, 7, 7, ignored, ignored, 7, ignored, ignored]);
}
