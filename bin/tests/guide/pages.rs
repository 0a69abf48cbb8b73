//! Reading the Markdown pages of the guide, and tests of their form.

use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// A Markdown file.
pub(crate) struct Page {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// A fenced code block.
pub(crate) struct Block {
    /// What follows the opening fence, such as `rust,no_run`.
    pub(crate) info: String,
    pub(crate) code: String,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

pub(crate) fn page(path: &str) -> Page {
    let path = root().join(path);
    let text = read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Page { path, text }
}

/// Returns the chapters of the guide, and its table of contents.
pub(crate) fn guide() -> Vec<Page> {
    let entries = read_dir(root().join("book/src")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    names.iter().map(|name| page(&format!("book/src/{name}"))).collect()
}

/// Returns all pages for new users: the guide and the README.
pub(crate) fn all() -> Vec<Page> {
    let mut all = guide();
    all.push(page("README.md"));
    all
}

impl Page {
    /// Returns its path relative to the repository root.
    pub(crate) fn name(&self) -> String {
        self.path.strip_prefix(root()).unwrap().display().to_string()
    }

    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks = vec![];
        let mut open: Option<Block> = None;
        for line in self.text.lines() {
            match (line.trim_start().strip_prefix("```"), open.take()) {
                (Some(_), Some(block)) => blocks.push(block),
                (Some(info), None) => open = Some(Block { info: info.into(), code: String::new() }),
                (None, Some(block)) => open = Some(Block { code: block.code + line + "\n", ..block }),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block is not closed", self.name());
        blocks
    }

    /// Returns the lines outside of code blocks.
    pub(crate) fn prose(&self) -> String {
        let mut inside = false;
        let outside = self.text.lines().filter(|line| {
            let fence = line.trim_start().starts_with("```");
            inside ^= fence;
            !inside && !fence
        });
        outside.map(|line| format!("{line}\n")).collect()
    }

    /// Returns the code spans in those lines.
    pub(crate) fn code_spans(&self) -> Vec<String> {
        let prose = self.prose().replace('\n', " ");
        prose.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }
}

#[test]
fn the_readme_is_short() {
    let lines = page("README.md").text.lines().count();
    assert!(lines <= 150, "{lines} lines: what is longer belongs into the guide");
}

#[test]
fn every_chapter_is_in_the_contents_and_its_code_is_tested() {
    let contents = page("book/src/SUMMARY.md").text;
    let tested = page("bin/src/guide.rs").text;
    for page in guide() {
        let name = page.path.file_name().unwrap().to_str().unwrap();
        if name != "SUMMARY.md" {
            assert!(contents.contains(&format!("]({name})")), "{name} is not in SUMMARY.md");
            assert!(tested.contains(&format!("\"book/src/{name}\"")), "{name} is not in bin/src/guide.rs");
        }
    }
}

/// Checks the table of contents for what mdBook would reject or misread, since mdBook is not run with the tests: if
/// this passes, `mdbook build book` does, too.
#[test]
fn mdbook_can_read_the_contents() {
    let contents = page("book/src/SUMMARY.md").text;
    let mut lines = contents.lines().filter(|line| !line.is_empty());
    assert_eq!(lines.next(), Some("# Summary"));
    let (mut has_parts, mut files) = (false, vec![]);
    for line in lines {
        has_parts |= line.starts_with("# ");
        let chapter = if has_parts { line.strip_prefix("- ") } else { Some(line) };
        let link =
            chapter.and_then(|chapter| chapter.strip_prefix('[')?.strip_suffix(".md)")?.split_once("]("));
        assert!(link.is_some() || line.starts_with("# "), "SUMMARY.md: {line}");
        files.extend(link.map(|(_, file)| format!("{file}.md")));
    }
    let mut once = files.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), files.len(), "a chapter is in SUMMARY.md twice: {files:?}");
    for file in files {
        let page = page(&format!("book/src/{file}"));
        assert!(page.text.starts_with("# "), "{file} does not begin with its title");
        // Directives that mdBook would replace, such as `include`.
        assert!(!page.text.contains("{{#"), "{file} has a directive of mdBook");
    }
}
