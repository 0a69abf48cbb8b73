//! A report in a real browser: headless Chromium takes a picture of it. Without Chromium the test says so and passes.
#![allow(clippy::unwrap_used)]

#[path = "common/mod.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Folder, Girandole};

use girandole::report::{RankTimes, Report, RunSeries, Speedup, now_rfc3339};

fn run(name: &str, steps: usize, world_size: usize, seconds: f64) -> RunSeries {
    // Noisy losses without a random number in sight.
    let noise = |step: usize| 1.0 + 0.5 * ((step * 7919 % 101) as f32 / 101.0 - 0.5);
    let decay = |step: usize| 16.0 * (-9.0 * step as f32 / steps as f32).exp() + 0.01;
    let losses = (0..steps).map(|step| decay(step) * noise(step)).collect();
    RunSeries {
        name: name.into(),
        losses,
        seconds,
        world_size,
        steps_per_epoch: steps / 10,
        ..RunSeries::default()
    }
}

fn report() -> Report {
    let fact = |name: &str, value: &str| (name.to_string(), value.to_string());
    Report {
        title: "ddp-linear".into(),
        command_line: "girandole ddp-linear --world-size 4 --seed 42 --report report.html".into(),
        date: now_rfc3339(),
        host: "localhost".into(),
        facts: vec![
            fact("backend", "tcp"),
            fact("device", "cpu"),
            fact("batch size per rank", "32"),
            fact("seed", "42"),
        ],
        runs: vec![run("single", 3130, 1, 0.196), run("ddp", 790, 4, 0.071)],
        ranks: (0..4)
            .map(|rank| RankTimes {
                rank,
                compute_s: 58e-6 + rank as f64 * 2e-6,
                communication_s: 32e-6 - rank as f64 * 2e-6,
                peak_rss_bytes: Some((23 + rank as u64) << 20),
            })
            .collect(),
        speedup: Some(Speedup { single_s: 0.196, ddp_s: 0.071, ranks: 4 }),
        ..Report::default()
    }
}

fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|program| program.is_file())
}

/// Takes a picture of a page; gives its size in bytes.
fn picture(browser: &Path, html: &str, file: &Path, dark: bool) -> u64 {
    let page = file.with_extension("html");
    std::fs::write(&page, html).unwrap();
    let profile = tempfile::tempdir().unwrap();
    let _ = std::fs::remove_file(file);
    let status = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ])
        .args([
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--window-size=1200,1500",
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

#[test]
fn a_browser_shows_the_plots() {
    let Some(browser) = chromium() else {
        eprintln!("no Chromium here: the report was not looked at");
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let html = report().render().unwrap();
    let bare = html.split("<svg").enumerate().map(|(index, part)| match (index, part.split_once("</svg>")) {
        (0, _) | (_, None) => part,
        (_, Some((_, rest))) => rest,
    });
    let bare = picture(&browser, &bare.collect::<String>(), &folder.join("bare.png"), false);
    for dark in [false, true] {
        let name = if dark { "dark.png" } else { "light.png" };
        let full = picture(&browser, &html, &folder.join(name), dark);
        assert!(full > bare + 20_000, "the picture with plots has {full} bytes, without them {bare}");
    }
}

/// Dots of a picture in each of some colours.
fn dots<const COLOURS: usize>(picture: &Path, colours: [[u8; 3]; COLOURS]) -> [usize; COLOURS] {
    let file = std::io::BufReader::new(std::fs::File::open(picture).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let of =
        |colour: [u8; 3]| bytes.chunks(info.color_type.samples()).filter(|dot| dot[..3] == colour).count();
    colours.map(of)
}

#[test]
fn the_report_of_each_command_shows_its_plots() {
    let Some(browser) = chromium() else {
        eprintln!("no Chromium here: the reports were not looked at");
        return;
    };
    for (command, short) in [
        ("ddp-linear", &["--epochs", "1"][..]),
        ("ddp-trainer", &["--epochs", "1"]),
        ("ddp-transformer", &["--epochs", "5"]),
        ("pipeline-transformer", &["--epochs", "5"]),
        ("ddp-mlp", &[]),
        ("cifar10", &["--samples", "40", "--test-samples", "9"]),
    ] {
        let folder = Folder::new();
        let report = folder.argument("report.html");
        Girandole(command).succeed(&[short, &["--report", &report]].concat());
        let file = folder.path("picture.png");
        picture(&browser, &std::fs::read_to_string(&report).unwrap(), &file, false);
        // A curve and the time computing; the time communicating; memory.
        let found = dots(&file, [[0x1D, 0x63, 0xD8], [0xC4, 0x5A, 0x0A], [0x80, 0x3F, 0xC4]]);
        assert!(found.into_iter().all(|dots| dots > 500), "{command}: {found:?}");
    }
}
