//! Rendering pages with headless Chromium, and examining the result.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the path of Chromium, if it is installed.
pub(crate) fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|program| program.is_file())
}

/// Returns how many of the elements that a selector matches are cut off or need scrolling on a page `width` pixels wide. The
/// page is in a frame, since Chromium's windows are 500 pixels wide at least.
pub(crate) fn cut(browser: &Path, html: &str, parts: &str, folder: &Path, width: usize) -> usize {
    let count = format!(
        "<script>parent.document.title = [...document.querySelectorAll('{parts}')].filter(part => part.scrollWidth > \
         part.clientWidth || part.getBoundingClientRect().right > innerWidth).length</script></body>"
    );
    let page = folder.join("measured.html");
    let framed = html.replace("</body>", &count).replace('&', "&amp;").replace('"', "&quot;");
    let style = format!("width: {width}px; height: 1400px; border: 0");
    let outer = format!(
        "<!DOCTYPE html><title></title><body style='margin: 0'><iframe style='{style}' srcdoc=\"{framed}\"></iframe>"
    );
    std::fs::write(&page, outer).unwrap();
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args([
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            "--dump-dom",
        ])
        .arg(format!("--window-size={},1500", width.max(500)))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let title = shown.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).unwrap();
    title.0.parse().unwrap()
}

/// Saves a screenshot of a page; returns its file size in bytes.
pub(crate) fn picture(browser: &Path, html: &str, file: &Path, dark: bool) -> u64 {
    let page = file.with_extension("html");
    std::fs::write(&page, html).unwrap();
    let profile = tempfile::tempdir().unwrap();
    let _ = std::fs::remove_file(file);
    let status = Command::new(browser)
        .args([
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking",
        ])
        .args([
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1200,1500",
        ])
        .arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--screenshot={}", file.display()))
        .arg(format!("file://{}", page.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    std::fs::metadata(file).unwrap().len()
}

/// Returns the number of pixels of an image in each of some colours.
pub(crate) fn dots<const COLOURS: usize>(picture: &Path, colours: [[u8; 3]; COLOURS]) -> [usize; COLOURS] {
    let file = std::io::BufReader::new(std::fs::File::open(picture).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let of =
        |colour: [u8; 3]| bytes.chunks(info.color_type.samples()).filter(|dot| dot[..3] == colour).count();
    colours.map(of)
}
