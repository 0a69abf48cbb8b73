//! Tests of the scaling report with a small model; the page is rendered in a real browser if one is installed.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../bin/tests/common/browser.rs"]
mod browser;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SMALL: [&str; 14] = [
    "--rounds", "1", "--seconds", "0.01", "--d-model", "16", "--num-heads", "2", "--num-layers", "2",
    "--length", "4", "--vocab-size", "8",
];

fn report(out: &Path, more: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_scaling-report");
    Command::new(program).arg("--out").arg(out).args(SMALL).args(more).output().unwrap()
}

/// Returns the number at a JSON pointer.
fn number(value: &Value, place: &str) -> f64 {
    value.pointer(place).and_then(Value::as_f64).unwrap_or_else(|| panic!("{place} of {value}"))
}

#[test]
fn every_strategy_is_measured_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    // The path need not be UTF-8.
    let out = folder.path().join(OsStr::from_bytes(b"new\xff"));
    let output = report(&out, &["--ranks", "1,2", "--batch-size", "2", "--most-ranks", "16"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(out.join("scaling.json")).unwrap();
    let scaling: Value = serde_json::from_str(&text).unwrap();
    let runs = scaling["runs"].as_array().unwrap();
    // The run on 2 ranks is shared by weak and strong scaling.
    assert_eq!(runs.len(), 4 * 3);
    for run in runs {
        let (ranks, step) = (number(run, "/ranks") as usize, number(run, "/step_s"));
        let by_rank = run["by_rank"].as_array().unwrap();
        assert!(step > 0.0 && by_rank.len() == ranks);
        for rank in by_rank {
            let parts = ["compute_s", "communication_s", "waiting_s"];
            let sum: f64 = parts.map(|part| number(rank, &format!("/split/{part}"))).iter().sum();
            assert!((sum - step).abs() < 1e-6 * step.max(1e-3), "{sum} of {step}");
            assert_eq!(number(rank, "/bytes_sent") > 0.0, ranks > 1, "{run}");
            assert!(number(rank, "/parameters") > 0.0);
        }
    }
    predicted(&scaling);
    let page = folder.path().join("scaling.html");
    std::fs::copy(out.join("scaling.html"), &page).unwrap();
    looked_at(&page);
}

fn predicted(scaling: &Value) {
    let compared = scaling["compared"].as_array().unwrap();
    assert_eq!(compared.len(), 4);
    assert!(compared.iter().all(|run| number(run, "/predicted_s") > 0.0 && number(run, "/ranks") == 2.0));
    assert!(number(scaling, "/network/link/s_per_byte") >= 0.0);
    let forecasts = scaling["forecasts"].as_array().unwrap();
    assert_eq!(forecasts.len(), 3);
    for forecast in forecasts {
        // 5 layouts on 8 ranks and on 16.
        let points = forecast["points"].as_array().unwrap();
        assert_eq!(points.len(), 10);
        for point in points {
            let efficiency = number(point, "/efficiency");
            assert!(efficiency > 0.0 && efficiency < 1.1, "{point}");
        }
    }
}

fn looked_at(page: &Path) {
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.matches("<svg").count() >= 11, "{}", html.matches("<svg").count());
    let links = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    // The only link is that to the guide, and nothing is loaded.
    assert_eq!(links.matches("href").count(), 1);
    assert!(links.contains("#reading-the-scaling-report\">"));
    for link in ["http", "src=", "url(", "import", "fetch(", "<link"] {
        assert!(!links.contains(link), "{link}");
    }
    let Some(browser) = browser::chromium() else {
        eprintln!("no Chromium here: the report was not looked at");
        return;
    };
    let picture = page.with_extension("png");
    browser::picture(&browser, &html, &picture, false);
    // One colour for each of the four strategies.
    let colours = [[0x1D, 0x63, 0xD8], [0xC4, 0x5A, 0x0A], [0x1A, 0x7F, 0x4B], [0x80, 0x3F, 0xC4]];
    let found = browser::dots(&picture, colours);
    assert!(found.into_iter().all(|dots| dots > 200), "{found:?}");
    for width in [500, 1200] {
        let cut = browser::cut(&browser, &html, "html, .plot, svg", page.parent().unwrap(), width);
        assert_eq!(cut, 0, "{width} pixels");
    }
}

#[test]
fn what_is_given_wrongly_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (more, part) in [
        (&["--ranks", "0,2"][..], "--ranks: got 0; give 1 to 64"),
        (&["--ranks", "3"], "--num-heads: got 2; tensor parallelism divides it by 3 ranks"),
        (
            &["--ranks", "2,3", "--batch-size", "1"],
            "--batch-size: got 1; strong scaling splits 3 rows over 2 ranks",
        ),
        (&["--ranks", "8", "--strategies", "pipeline"], "--ranks: got 8; the model has 5 modules"),
        (&["--flops", "-1"], "--flops"),
        (&["--networks", "string"], "invalid value 'string' for '--networks"),
        (&["--threads", "0"], "--threads: got 0; give 1 to 1024"),
        (&["--strategies", "magic"], "invalid value 'magic' for '--strategies"),
    ] {
        let output = report(&folder.path().join("out"), more);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(part), "{more:?}: {stderr}");
    }
    // Reported before anything is measured, so that not even the page is written.
    let taken = folder.path().join("taken");
    std::fs::create_dir_all(taken.join("scaling.json")).unwrap();
    let output = report(&taken, &["--ranks", "1"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("taken/scaling.json: "), "{stderr}");
    assert!(!taken.join("scaling.html").exists());
    let output = report(&file.join("x"), &["--ranks", "1"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.starts_with("error: cannot write "), "{stderr}");
}
