//! Tests that the chapter on troubleshooting has a row for every error message, and no row for a message that no code
//! contains.

use std::collections::BTreeSet;

use crate::pages::{page, root};
use crate::sources::code;
use crate::texts::{first_text, rust_files};

/// Source folders of all crates.
pub(crate) const SOURCES: [&str; 18] = [
    "sampler/src", "comm/src", "launch/src", "ops/src", "training/src", "strategy/src", "ddp/src",
    "fsdp/src", "tensor-parallel/src", "context-parallel/src", "expert-parallel/src", "pipeline/src",
    "models/src", "plan/src", "report/src", "girandole/src", "cli/src", "bin/src",
];

/// Errors without a row, and why.
const WITHOUT_ROW: [(&str, &str); 8] = [
    ("{operation}: {source}", "the operation, and candle's own text"),
    ("{source}", "candle's own text"),
    ("{what}: {reason}", "the system's own text"),
    ("{place}: {problem}", "the place in a recipe, and the message about an option"),
    ("{}: {problem}", "a file, and what it lacks: there are rows for what it may lack"),
    ("{source}: {help}", "a damaged checkpoint, which has a row, and another one"),
    ("{reason}", "the message of the plan's own check, which names option and value"),
    ("the ranks start again", "told to no user"),
];

/// Returns the texts of `#[error("...")]` in all crates.
fn templates() -> BTreeSet<String> {
    let files = SOURCES.iter().flat_map(|folder| rust_files(&root().join(folder)));
    let mut all = BTreeSet::new();
    for code in files {
        let attributes = code.split("#[error(").skip(1).filter(|rest| !rest.starts_with("transparent"));
        all.extend(attributes.filter_map(|rest| first_text(rest).map(|(text, _)| text)));
    }
    assert!(all.len() > 150, "{} errors", all.len());
    all
}

/// Returns the words of a text, without surrounding punctuation.
fn words(text: &str) -> Vec<&str> {
    let words = text.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_alphanumeric()));
    words.filter(|word| !word.is_empty()).collect()
}

/// Returns the parts of a template between its placeholders.
fn fixed(template: &str) -> Vec<String> {
    let template = template.replace('`', "");
    let mut parts = vec![];
    let mut rest = &*template;
    while let Some((before, after)) = rest.split_once('{') {
        parts.push(before.to_string());
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    parts.push(rest.to_string());
    parts
}

/// Whether a template can produce a message.
fn gives(fixed: &[String], message: &str) -> bool {
    let [first, middle @ .., last] = fixed else { return message == fixed[0] };
    let inside = message.strip_prefix(&**first).and_then(|rest| rest.strip_suffix(&**last));
    let mut rest = inside.unwrap_or_default();
    for part in middle {
        match rest.split_once(&**part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    inside.is_some()
}

/// Whether a message of the chapter, where `...` stands for any text, matches a template: entirely, or in five
/// consecutive words.
fn is_of(message: &str, template: &str) -> bool {
    let fixed = fixed(template);
    let most = fixed.iter().map(|part| words(part).len()).max().unwrap_or(0);
    let in_a_row = |fixed: &String| {
        let fixed = words(fixed);
        let count = most.min(5);
        count > 1
            && fixed.len() >= count
            && message.split("...").any(|piece| {
                let piece = words(piece);
                fixed.windows(count).any(|row| piece.windows(count).any(|other| other == row))
            })
    };
    most > 0 && (gives(&fixed, message) || fixed.iter().any(in_a_row))
}

/// Returns the messages of the chapter, by row.
fn rows() -> Vec<Vec<String>> {
    let text = page("book/src/troubleshooting.md").text;
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.map(|row| format!("`{}", row.split(" | ").next().unwrap_or_default()));
    let rows: Vec<Vec<String>> =
        cells.map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()).collect();
    assert!(rows.len() > 100, "{} rows", rows.len());
    rows
}

#[test]
fn every_error_has_a_row() {
    let (templates, rows) = (templates(), rows());
    let without = |template: &&String| {
        let is_listed = WITHOUT_ROW.iter().any(|(listed, _)| listed == template);
        !is_listed && !rows.iter().flatten().any(|message| is_of(message, template))
    };
    let missing: Vec<&String> = templates.iter().filter(without).collect();
    assert!(missing.is_empty(), "not in book/src/troubleshooting.md:\n{missing:#?}");
    for (listed, _) in WITHOUT_ROW {
        assert!(templates.contains(listed), "no error says {listed:?}");
    }
}

#[test]
fn messages_are_those_of_the_code() {
    let code = code(&SOURCES).replace('`', "");
    let templates = templates();
    for message in rows().into_iter().flatten() {
        let words: Vec<&str> = message.split_whitespace().collect();
        // Three consecutive words that contain no value.
        let plain = |word: &&str| word.chars().all(|c| c.is_alphabetic() || ",:;'-()".contains(c));
        let found = words.windows(3).any(|three| three.iter().all(plain) && code.contains(&three.join(" ")));
        let found = found || templates.iter().any(|template| is_of(&message, template));
        assert!(found, "no code says this: {message}");
    }
}

#[test]
fn a_row_is_told_from_others() {
    let died = "rank {rank} (host {host}) died during {operation}";
    assert!(is_of("rank 1 (host a) died during all_reduce #7 (...)", died));
    assert!(!is_of("rank 1 (host a) left the group before ... was done", died));
    assert!(
        is_of("w: got 0; give 1", "{what}: got {got}; {help}")
            && !is_of("w: is 0", "{what}: got {got}; {help}")
    );
    let long = "cannot listen on {address}: {reason}; choose another port or end the program that holds it";
    assert!(
        is_of("...; choose another port or end ...", long) && !is_of("choose another port ... or end", long)
    );
    assert!(!is_of("anything: at all", "{}: {problem}"));
}
