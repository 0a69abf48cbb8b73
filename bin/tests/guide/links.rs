//! Links within the repository: the target files and headings must exist.

use std::path::Path;

use crate::pages::{Page, all, guide, page, root};

fn targets(page: &Page) -> Vec<String> {
    let prose = page.prose();
    let after = prose.split("](").skip(1);
    after.map(|rest| rest.split(')').next().unwrap().to_owned()).collect()
}

/// Converts a heading to its anchor, as GitHub and mdBook do.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    let others = ["CONTRIBUTING.md", "CHANGELOG.md"].map(page);
    for page in all().iter().chain(&others) {
        for target in targets(page) {
            if target.starts_with("https://") {
                continue;
            }
            seen += 1;
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let path =
                if file.is_empty() { page.path.clone() } else { page.path.with_file_name("").join(file) };
            assert!(path.is_file(), "{}: {target} is no file", page.name());
            if !heading.is_empty() {
                let text = std::fs::read_to_string(&path).unwrap();
                let headings = text.lines().filter_map(|line| line.strip_prefix('#'));
                let found =
                    headings.map(|line| anchor(line.trim_start_matches('#'))).any(|name| name == heading);
                assert!(found, "{}: {target}: no such heading", page.name());
            }
        }
    }
    assert!(seen > 60, "{seen} links");
}

/// Returns all files and folders of the repository, but for what is built.
fn paths(folder: &Path, into: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if name == "target" || name == ".git" {
            continue;
        }
        into.push(path.to_str().unwrap().to_owned());
        if path.is_dir() {
            paths(&path, into);
        }
    }
}

/// Returns what stands between backticks in a text and looks like a path.
fn named_paths(text: &str) -> impl Iterator<Item = &str> {
    let is_path = |span: &&str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-./".contains(c);
        span.chars().all(plain)
            && (span.contains('/') || span.ends_with(".rs"))
            && !span.starts_with(['-', '/'])
    };
    text.split('`').skip(1).step_by(2).filter(is_path)
}

#[test]
fn files_that_are_named_exist() {
    let mut all = Vec::new();
    paths(&root(), &mut all);
    let heads = ["girandole/src/trainer/step.rs", "comm/src/lib.rs", "girandole/src/trainer/optimizer.rs"];
    let mut seen = 0;
    for name in ["CONTRIBUTING.md", "book/src/internals.md"].iter().chain(&heads) {
        let text = page(name).text;
        let table = text.lines().filter_map(|line| line.strip_prefix("//! ")?.split_once(".rs  "));
        let of_table: Vec<String> = table.map(|(path, _)| format!("{path}.rs")).collect();
        let head: Vec<&str> =
            text.lines().take_while(|line| !name.ends_with(".rs") || line.starts_with("//!")).collect();
        let head = head.join("\n");
        for path in named_paths(&head).chain(of_table.iter().map(String::as_str)) {
            seen += 1;
            let ending = format!("/{}", path.trim_end_matches('/'));
            assert!(all.iter().any(|path| path.ends_with(&ending)), "{name}: there is no {path}");
        }
    }
    assert!(seen > 60, "{seen} paths");
}

/// Files outside of `book/src` are not part of the built book.
#[test]
fn the_guides_links_stay_in_the_guide() {
    for page in guide() {
        for target in targets(&page) {
            assert!(!target.contains("../"), "{}: {target}", page.name());
        }
    }
}
