//! Tests of metrics files: their lines, and those that a resumed run replaces.

use super::*;

#[test]
fn lines_are_those_of_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    let mut metrics = MetricsWriter::create(&path).unwrap();
    metrics.step(None, 0, 1, 4.67, None).unwrap();
    metrics.step(Some("single"), 3, 200, 0.1 + 0.2, None).unwrap();
    for loss in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        metrics.step(None, 0, 0, loss, None).unwrap();
    }
    let evaluation = Evaluation { step: 7, loss: 1.5, sample: None, ..Evaluation::default() };
    metrics.evaluation(None, &evaluation).unwrap();
    metrics.evaluation(None, &Evaluation { sample: Some("a \"b\"\n".into()), ..evaluation }).unwrap();
    let memory = [5, 6];
    metrics
        .summary(&Summary {
            run: None,
            seconds: 0.25,
            world_size: 2,
            peak_rss_bytes: &memory,
            ..Summary::default()
        })
        .unwrap();
    metrics
        .summary(&Summary { run: Some("ddp"), seconds: 1.0, world_size: 3, ..Summary::default() })
        .unwrap();
    assert!(metrics.has_summary(Some("ddp")).unwrap() && !metrics.has_summary(Some("single")).unwrap());
    let expected = [
        r#"{"event":"step","epoch":0,"batch":1,"loss":4.67}"#,
        r#"{"event":"step","run":"single","epoch":3,"batch":200,"loss":0.3}"#,
        r#"{"event":"step","epoch":0,"batch":0,"loss":null}"#,
        r#"{"event":"step","epoch":0,"batch":0,"loss":null}"#,
        r#"{"event":"step","epoch":0,"batch":0,"loss":null}"#,
        r#"{"event":"evaluation","step":7,"loss":1.5}"#,
        r#"{"event":"evaluation","step":7,"loss":1.5,"sample":"a \"b\"\n"}"#,
        r#"{"event":"summary","seconds":0.25,"world_size":2,"peak_rss_bytes":[5,6]}"#,
        r#"{"event":"summary","run":"ddp","seconds":1.0,"world_size":3}"#,
    ];
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    assert!(text.ends_with('\n'));
}

#[test]
fn every_f32_comes_back_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    let losses = [0.1, f32::MIN_POSITIVE, f32::MAX, 1e-45, 16_777_217.0, -0.0, 3.402_823e38, 1.0 / 3.0];
    let mut metrics = MetricsWriter::create(&path).unwrap();
    losses.iter().for_each(|&loss| metrics.step(None, 0, 0, loss, None).unwrap());
    drop(metrics);
    for (line, loss) in std::fs::read_to_string(&path).unwrap().lines().zip(losses) {
        let digits = line.split("\"loss\":").nth(1).unwrap().trim_end_matches('}');
        assert_eq!(digits.parse::<f32>().unwrap().to_bits(), loss.to_bits(), "{digits}");
    }
}

#[test]
fn a_run_that_goes_on_takes_its_later_steps_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    let step =
        |epoch, batch| format!("{{\"event\":\"step\",\"epoch\":{epoch},\"batch\":{batch},\"loss\":1.0}}\n");
    let summary = "{\"event\":\"summary\",\"seconds\":1.0,\"world_size\":1}\n";
    let before = step(0, 0) + &step(0, 1) + &step(1, 0);
    for (rest, cut) in [
        (step(1, 1) + &step(2, 0) + summary, (1, 1)),
        (step(1, 1) + "{\"event\":\"st", (1, 1)),
        ("{\"event\":\"st".into(), (5, 0)),
        (summary.into(), (9, 9)),
        (String::new(), (1, 1)),
    ] {
        std::fs::write(&path, format!("{before}{rest}")).unwrap();
        let mut metrics = MetricsWriter::append(&path).unwrap();
        metrics.cut(None, cut.0, cut.1).unwrap();
        metrics.step(None, 7, 7, 1.0, None).unwrap();
        drop(metrics);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before.clone() + &step(7, 7), "{rest}");
    }
    let mut metrics = MetricsWriter::append(&path).unwrap();
    metrics.cut(None, 0, 0).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    MetricsWriter::append(Path::new("/dev/null")).unwrap().cut(None, 0, 0).unwrap();
}

#[test]
fn evaluations_stay_that_come_before_the_step_that_is_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    let mut metrics = MetricsWriter::create(&path).unwrap();
    for step in 0..4 {
        metrics.step(None, 0, step, 1.0, None).unwrap();
        metrics
            .evaluation(
                None,
                &Evaluation { step: step + 1, loss: 2.0, sample: None, ..Evaluation::default() },
            )
            .unwrap();
    }
    metrics.cut(None, 0, 2).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.ends_with("{\"event\":\"evaluation\",\"step\":2,\"loss\":2.0}\n"), "{text}");
    assert!(metrics.has_evaluation(None, 2).unwrap() && metrics.has(None, 0, 1).unwrap());
    assert!(!metrics.has_evaluation(None, 3).unwrap() && !metrics.has_evaluation(Some("other"), 2).unwrap());
}

#[test]
fn lines_of_an_earlier_run_stay_until_this_one_has_ended_well() {
    let names = |folder: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    for (steps, finishes) in [(0, false), (1, false), (0, true), (1, true)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        std::fs::write(&path, "earlier\n").unwrap();
        let mut metrics = MetricsWriter::create(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"", "whoever follows the file sees that a run begins");
        (0..steps).for_each(|step| metrics.step(None, 0, step, 1.0, None).unwrap());
        if finishes {
            metrics.finish();
        } else {
            drop(metrics);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        match (steps, finishes) {
            (0, false) => assert_eq!(text, "earlier\n"),
            (_, false) => {
                let earlier = std::fs::read_to_string(folder.path().join("m.jsonl.earlier")).unwrap();
                assert_eq!((earlier.as_str(), text.lines().count()), ("earlier\n", steps));
                assert_eq!(names(folder.path()), ["m.jsonl", "m.jsonl.earlier"]);
                continue;
            }
            (_, true) => assert_eq!(text.lines().count(), steps),
        }
        assert_eq!(names(folder.path()), ["m.jsonl"]);
    }
}

#[test]
fn a_wrong_path_is_one_line_with_path_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("no/such/m.jsonl"), folder.path().to_path_buf()] {
        let line = MetricsWriter::create(&path).unwrap_err().to_string();
        assert!(line.starts_with(&format!("cannot write {}: ", path.display())), "{line}");
        assert!(!line.contains('\n'), "{line}");
    }
}

#[test]
fn a_file_of_something_else_is_not_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    for text in ["my notes\nline 2\n", "{\"event\":\"step\",\"epoch\":0,\"batch\":0,\"loss\":1.0}\n[1]\n"] {
        std::fs::write(&path, text).unwrap();
        let line = MetricsWriter::append(&path).unwrap().cut(None, 0, 1).unwrap_err().to_string();
        assert!(line.contains("notes.txt: it has lines that are no metrics"), "{line}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn a_file_is_in_use_as_long_as_a_run_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    assert!(!MetricsWriter::is_in_use(&path));
    let launcher = MetricsWriter::create(&path).unwrap();
    let rank = MetricsWriter::append(&path).unwrap();
    drop(launcher);
    assert!(MetricsWriter::is_in_use(&path));
    drop(rank);
    assert!(!MetricsWriter::is_in_use(&path) && !MetricsWriter::is_in_use(std::path::Path::new("/dev/null")));
}
