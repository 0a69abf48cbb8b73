//! Links within the repository: the target files and headings must exist.

use crate::pages::{Page, all, guide, page};

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

/// Files outside of `book/src` are not part of the built book.
#[test]
fn the_guides_links_stay_in_the_guide() {
    for page in guide() {
        for target in targets(&page) {
            assert!(!target.contains("../"), "{}: {target}", page.name());
        }
    }
}
