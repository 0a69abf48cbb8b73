//! Extracting string literals from Rust code.

use std::fs::{read_dir, read_to_string};
use std::path::Path;

/// Returns the content of all Rust files of a folder and its subfolders.
pub(crate) fn rust_files(folder: &Path) -> Vec<String> {
    let mut all = vec![];
    for entry in read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            all.push(read_to_string(&path).unwrap());
        }
    }
    all
}

/// Returns all string literals, ignoring comments.
pub(crate) fn texts(code: &str) -> Vec<String> {
    let (mut all, mut rest) = (vec![], code);
    while let Some((text, after)) = first_text(rest) {
        all.push(text);
        rest = after;
    }
    all
}

/// Returns the first string literal, and the code after it.
pub(crate) fn first_text(code: &str) -> Option<(String, &str)> {
    let mut from = 0;
    loop {
        let at = from + code[from..].find(['"', '/', '\''])?;
        let rest = &code[at..];
        from = at
            + match rest.as_bytes() {
                [b'/', b'/', ..] => rest.find('\n')?,
                [b'/', b'*', ..] => rest.find("*/")? + 2,
                [b'\'', b'\\', _, ..] => 3 + rest[3..].find('\'')? + 1,
                [b'\'', ..] => {
                    // A character literal, or else a lifetime.
                    let mut of = rest.char_indices().skip(2);
                    of.next().filter(|(_, c)| *c == '\'').map_or(1, |(end, _)| end + 1)
                }
                [b'"', ..] => {
                    let hashes = code[..at].len() - code[..at].trim_end_matches('#').len();
                    return if code[..at - hashes].ends_with('r') {
                        raw(&rest[1..], hashes)
                    } else {
                        plain(&rest[1..])
                    };
                }
                _ => 1,
            };
    }
}

fn raw(rest: &str, hashes: usize) -> Option<(String, &str)> {
    let end = format!("\"{}", "#".repeat(hashes));
    rest.split_once(&*end).map(|(text, after)| (text.to_owned(), after))
}

/// Reads a plain string literal, dropping line breaks and indentation after a `\` at the end of a line.
fn plain(rest: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = rest.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((text, &rest[at + 1..])),
            '\\' => match chars.next()?.1 {
                '\n' => while chars.next_if(|(_, c)| c.is_whitespace()).is_some() {},
                'n' => text.push('\n'),
                other => text.push(other),
            },
            c => text.push(c),
        }
    }
    None
}

#[test]
fn texts_are_found_and_comments_are_not() {
    let code = r##"let a = "one"; // "no"
        /* "no" */ let b: &'static str = r#"two "2""#; let c = ['"', '\'', '\\'];
        let d = "three \
                 words\n"; let e = 1 / 2;"##;
    assert_eq!(texts(code), ["one", "two \"2\"", "three words\n"]);
}
