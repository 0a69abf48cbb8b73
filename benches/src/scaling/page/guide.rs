//! Link to the guide's section on reading the report.

use std::path::{Component, Path};

use report::sheet::Help;

/// Paths of the chapter, relative to this crate's folder: as built by mdBook, else its source.
const CHAPTERS: [&str; 2] = ["../book/book/performance.html", "../book/src/performance.md"];
const SECTION: &str = "reading-the-scaling-report";

/// Returns the help link for a page in the folder `out`. If the chapter's file is not found, it only names the section.
pub(super) fn help(out: &Path) -> Help {
    let chapters = CHAPTERS.iter().map(|chapter| Path::new(env!("CARGO_MANIFEST_DIR")).join(chapter));
    let address =
        chapters.filter_map(|chapter| relative(&out.canonicalize().ok()?, &chapter.canonicalize().ok()?));
    Help {
        name: "section \"Reading the scaling report\" of the guide's chapter \"Performance and benches\""
            .into(),
        address: address.map(|address| format!("{address}#{SECTION}")).next(),
    }
}

/// Returns the relative URL from a folder to a file, both absolute; it stays valid if page and repository move
/// together.
fn relative(folder: &Path, file: &Path) -> Option<String> {
    let common = folder.components().zip(file.components()).take_while(|(a, b)| a == b).count();
    let up = folder.components().skip(common).map(|_| Some("..".to_string()));
    let down = file.components().skip(common).map(|component| match component {
        Component::Normal(name) => Some(escaped(name.to_str()?)),
        _ => None,
    });
    Some(up.chain(down).collect::<Option<Vec<_>>>()?.join("/"))
}

/// Percent-encodes a file name for a URL.
fn escaped(name: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_the_section_that_is_linked() {
        let folder = tempfile::tempdir().unwrap();
        let address = help(folder.path()).address.unwrap();
        let (path, section) = address.split_once('#').unwrap();
        assert!(folder.path().canonicalize().unwrap().join(path).is_file(), "{path}");
        let chapter = Path::new(env!("CARGO_MANIFEST_DIR")).join(CHAPTERS[1]);
        let chapter = std::fs::read_to_string(chapter).unwrap();
        let headings = chapter.lines().filter_map(|line| line.strip_prefix("## "));
        assert!(headings.map(|text| text.to_lowercase().replace(' ', "-")).any(|heading| heading == section));
    }

    #[test]
    fn ways_are_relative_and_escaped() {
        let way = |from: &str, to: &str| relative(Path::new(from), Path::new(to)).unwrap();
        assert_eq!(way("/a/b/out", "/a/book/c.md"), "../../book/c.md");
        assert_eq!(way("/a", "/a/c.md"), "c.md");
        assert_eq!(way("/x y", "/z #/c.md"), "../z%20%23/c.md");
    }
}
