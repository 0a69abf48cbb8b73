//! The report in a real browser: headless Chromium renders it. Without Chromium the test says so and passes.

#[path = "../common/browser.rs"]
mod browser;

use std::path::Path;

use crate::common::{Folder, Girandole};
use browser::{chromium, cut, dots, picture};

use ::report::{RankTimes, Report, RunSeries, Speedup, now_rfc3339};

fn run(name: &str, steps: usize, world_size: usize, seconds: f64) -> RunSeries {
    // Noisy losses without a random number generator.
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

#[test]
fn nothing_is_cut_off_on_a_narrow_page() {
    let Some(browser) = chromium() else {
        eprintln!("no Chromium here: the report was not looked at");
        return;
    };
    let (folder, html) = (Folder::new(), report().render().unwrap());
    for width in [400, 500, 650, 800, 1200] {
        let cut = cut(&browser, &html, "html, .plot, .scroll, svg", &folder.path(""), width);
        assert_eq!(cut, 0, "{width} pixels");
    }
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
        // Colours of a loss curve and compute time, of communication time, and of memory.
        let found = dots(&file, [[0x1D, 0x63, 0xD8], [0xC4, 0x5A, 0x0A], [0x80, 0x3F, 0xC4]]);
        assert!(found.into_iter().all(|dots| dots > 500), "{command}: {found:?}");
    }
}
