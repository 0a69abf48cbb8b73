//! Opening data files of all types.

use std::collections::HashMap;
use std::fs;

use candle_core::{Device, Tensor};
use models::tokens::{Data, DataConfig, DataFile, Rows, TokenWriter};
use models::{Result, Tokenizer};
use tempfile::TempDir;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn name(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn text(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.name(name), text).unwrap();
    }

    fn tokens(&self, name: &str, tokenizer: &Tokenizer, text: &str) {
        let mut writer =
            TokenWriter::create(self.name(name).as_ref(), tokenizer.len(), tokenizer.end_of_text()).unwrap();
        writer.push(&tokenizer.encode(text).unwrap()).unwrap();
        writer.finish().unwrap();
    }

    fn rows(&self, name: &str, rows: &[[i64; 4]]) {
        let tokens = Tensor::from_slice(rows.as_flattened(), (rows.len(), 4), &Device::Cpu).unwrap();
        training::save_tensors(self.name(name).as_ref(), &HashMap::from([("tokens", tokens)])).unwrap();
    }

    fn open(&self, names: &[&str], config: &DataConfig<'_>) -> Result<Rows> {
        let files: Vec<DataFile> = names.iter().map(|name| self.name(name).parse().unwrap()).collect();
        Data::open(&files, config)
    }

    fn refuse(&self, name: &str, config: &DataConfig<'_>) -> String {
        let line = self.open(&[name], config).unwrap_err().to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    }
}

fn config(tokenizer: &Tokenizer) -> DataConfig<'_> {
    DataConfig {
        tokenizer: Some(tokenizer),
        length: Some(3),
        vocab_size: 257,
        max_len: 8,
        ..DataConfig::default()
    }
}

#[test]
fn text_token_files_and_rows_go_together() {
    let (files, tokenizer) = (Files::new(), Tokenizer::bytes().unwrap());
    files.text("a.txt", "abcdefghi");
    files.text("b.jsonl", "{\"text\": \"123\"}\n{\"text\": \"4567\"}\n");
    files.tokens("c.tokens", &tokenizer, "ABCDEFGHI");
    files.rows("d.safetensors", &[[1, 2, 3, 4], [5, 6, 7, 8]]);
    let rows =
        files.open(&["a.txt", "b.jsonl=2", "c.tokens", "d.safetensors=0.5"], &config(&tokenizer)).unwrap();
    assert_eq!(rows.files().map(|(_, taken)| taken).collect::<Vec<_>>(), [3, 4, 2, 1]);
    let mut all: Vec<String> =
        (0..rows.len()).map(|index| tokenizer.decode(&rows.get(index).unwrap().tokens).unwrap()).collect();
    all.sort();
    // The token between documents has no text.
    assert_eq!(all, ["\u{1}\u{2}\u{3}", "123", "123", "45", "45", "ABC", "DEF", "abc", "def", "ghi"]);
    assert_eq!(rows.vocab_size(), 257);
    // Text has the same fingerprint as the token file made of it; file names do not matter.
    files.text("c.txt", "ABCDEFGHI");
    let of = |name| files.open(&[name], &config(&tokenizer)).unwrap().fingerprint();
    let (text, before) = (of("c.txt"), of("a.txt"));
    assert_ne!(text, of("c.tokens"));
    assert_eq!(text, of("c.txt"));
    files.text("a.txt", "abcdefghj");
    assert_ne!(of("a.txt"), before);
    let names: Vec<_> =
        fs::read_dir(files.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 5, "{names:?}");
}

#[test]
fn the_length_is_that_of_rows_or_the_models() {
    let (files, tokenizer) = (Files::new(), Tokenizer::bytes().unwrap());
    files.rows("rows", &[[1, 2, 3, 4]]);
    files.text("text", "x".repeat(2000));
    let any = DataConfig { length: None, ..config(&tokenizer) };
    assert_eq!(files.open(&["text", "rows"], &any).unwrap().row_len(), 3);
    assert_eq!(files.open(&["text"], &any).unwrap().row_len(), 8);
    assert_eq!(files.open(&["text"], &DataConfig { max_len: 4096, ..any }).unwrap().row_len(), 1024);
    let short = DataConfig { length: None, max_len: 2, ..config(&tokenizer) };
    assert!(files.refuse("rows", &short).contains("its rows have 3 tokens for a model of 2 positions"));
    let long = DataConfig { length: Some(9), ..config(&tokenizer) };
    assert!(files.refuse("text", &long).contains("the length of rows is 9 tokens for a model of 8"));
}

#[test]
fn what_cannot_be_used_is_told_in_one_line() {
    let (files, tokenizer) = (Files::new(), Tokenizer::bytes().unwrap());
    let usual = || config(&tokenizer);
    files.text("empty", "");
    files.text("short", "ab");
    files.text("bytes", [b'a', 0xff]);
    files.text("text", "some text");
    files.tokens("own", &tokenizer, "some text");
    files.tokens("other", &Tokenizer::characters("ab").unwrap(), "abababab");
    files.rows("high", &[[1, 2, 3, 256]]);
    assert!(files.refuse("empty", &usual()).contains("empty: it has no text"));
    assert!(
        files.refuse("short", &usual()).contains("its 3 tokens are too few for a row of 3, which needs 4")
    );
    assert!(files.refuse("bytes", &usual()).contains("no text in UTF-8 from byte 1 on"));
    assert!(files.refuse("none", &usual()).contains("cannot read"));
    assert!(files.refuse(".", &usual()).contains("it is a folder"));
    assert!(
        files
            .refuse("text", &DataConfig { vocab_size: 256, ..usual() })
            .contains("257 tokens for a model of 256")
    );
    assert!(
        files.refuse("own", &DataConfig { vocab_size: 256, ..usual() }).contains("a tokenizer of 257 tokens")
    );
    assert!(files.refuse("high", &DataConfig { vocab_size: 256, ..usual() }).contains("it has token 256"));
    assert!(files.refuse("other", &usual()).contains("a tokenizer of 3 tokens, and the model's has 257"));
    assert!(
        files
            .refuse("text", &DataConfig { tokenizer: None, ..usual() })
            .contains("needs a tokenizer, and there is no tokenizer")
    );
    let folder = DataConfig { tokenizer: None, folder: Some(files.0.path()), ..usual() };
    assert!(files.refuse("text", &folder).contains("there is no tokenizer.json ("));
    assert!(Data::open(&[], &usual()).unwrap_err().to_string().contains("the files is none"));
    let whole = fs::read(files.name("own")).unwrap();
    for place in [9, 1025, 1030, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        files.text("damaged", bytes);
        assert!(files.refuse("damaged", &usual()).starts_with(&files.name("damaged")), "{place}");
    }
    files.text("cut", &whole[..whole.len() - 1]);
    assert!(files.refuse("cut", &usual()).contains("no whole safetensors file"));
}

#[test]
fn weights_are_read_off_names() {
    let files = Files::new();
    files.text("a=2", "text");
    let parse =
        |text: &str| text.parse::<DataFile>().map(|file| (file.path.display().to_string(), file.weight));
    assert_eq!(parse(&files.name("a=2")), Ok((files.name("a=2"), 1.0)));
    assert_eq!(parse(&files.name("a=2=0.5")), Ok((files.name("a=2"), 0.5)));
    assert_eq!(parse("x=y/z"), Ok(("x=y/z".into(), 1.0)));
    for text in ["a=0", "a=-1", "a=inf", "a=nan", "a=b", "a="] {
        assert!(parse(text).unwrap_err().contains("give FILE or FILE=WEIGHT"), "{text}");
    }
}

/// On Linux only: without `/proc`, each process tokenizes the text itself.
#[cfg(target_os = "linux")]
#[test]
fn tokens_of_another_process_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    std::fs::write(&path, "to be or not to be").unwrap();
    let tokenizer = Tokenizer::bytes().unwrap();
    let config = DataConfig { tokenizer: Some(&tokenizer), length: Some(6), ..DataConfig::default() };
    let mut file: DataFile = path.display().to_string().parse().unwrap();
    let made = Data::open(std::slice::from_ref(&file), &config).unwrap();
    file.tokens = made.files().next().unwrap().0.shared();
    assert!(file.tokens.is_some());
    std::fs::remove_file(&path).unwrap();
    let taken = Data::open(std::slice::from_ref(&file), &config).unwrap();
    assert_eq!((taken.fingerprint(), taken.get(2).unwrap()), (made.fingerprint(), made.get(2).unwrap()));
    assert_eq!(taken.files().next().unwrap().0.path(), path);
    // With another tokenizer, or once the other process has closed its file, the text itself is read.
    let other = Tokenizer::characters("to bern").unwrap();
    let of_other = DataConfig { tokenizer: Some(&other), ..config };
    std::fs::write(&path, "not to be").unwrap();
    assert_eq!(Data::open(std::slice::from_ref(&file), &of_other).unwrap().get(0).unwrap().tokens.len(), 6);
    drop((made, taken));
    let config = DataConfig { tokenizer: Some(&tokenizer), length: Some(6), ..DataConfig::default() };
    assert_eq!(Data::open(&[file], &config).unwrap().len(), 1);
}
