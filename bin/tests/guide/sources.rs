//! Tests that environment variables in the guide exist in the code.

use std::collections::BTreeSet;
use std::fs::{read_dir, read_to_string};
use std::path::Path;

use crate::pages::{page, root};

/// Returns all code in these folders, with line continuations in string literals joined.
pub(crate) fn code(folders: &[&str]) -> String {
    let mut all = String::new();
    for folder in folders {
        collect(&root().join(folder), &mut all);
    }
    let mut joined = String::with_capacity(all.len());
    for part in all.split("\\\n") {
        joined.push_str(if joined.is_empty() { part } else { part.trim_start() });
    }
    joined
}

fn collect(folder: &Path, into: &mut String) {
    for entry in read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if path.is_dir() {
            collect(&path, into);
        } else if ["rs", "sh", "py"].contains(&ending) {
            into.push_str(&read_to_string(&path).unwrap());
        }
    }
}

fn variables(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
    words.filter(|word| word.starts_with("GIRANDOLE_") && !word.ends_with('_')).collect()
}

#[test]
fn the_chapter_on_the_environment_has_every_variable() {
    let text = page("book/src/environment.md").text;
    let chapter = variables(&text);
    let code = code(&[
        "sampler", "comm", "launch", "training", "ddp", "fsdp", "tensor-parallel", "context-parallel",
        "expert-parallel", "strategy", "pipeline", "models", "ops", "plan", "report", "girandole", "cli",
        "bin", "benches", "scripts", "deploy/check/src",
    ]);
    let code = variables(&code);
    assert_eq!(code.difference(&chapter).collect::<Vec<_>>(), [] as [&&str; 0], "not in the chapter");
    assert_eq!(chapter.difference(&code).collect::<Vec<_>>(), [] as [&&str; 0], "not in the code");
}
