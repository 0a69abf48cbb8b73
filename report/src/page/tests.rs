//! Tests that the page is well-formed whatever the input.

use super::*;
use crate::{Evaluation, OptionValue, Quantity, Speedup, Timeline};

fn full() -> Report {
    let losses =
        |shift: f32| (0..3000).map(move |step| 4. * (-step as f32 / 700.).exp() + 0.01 + shift).collect();
    Report {
        title: "ddp-linear".into(),
        command_line: "girandole ddp-linear --world-size 2".into(),
        date: "2025-01-31T08:05:00Z".into(),
        host: "localhost".into(),
        facts: vec![("backend".into(), "tcp".into())],
        runs: vec![
            RunSeries {
                name: "single".into(),
                losses: losses(0.),
                seconds: 0.2,
                world_size: 1,
                steps_per_epoch: 300,
                ..RunSeries::default()
            },
            RunSeries {
                name: "ddp".into(),
                losses: losses(0.01),
                seconds: 0.1,
                world_size: 2,
                steps_per_epoch: 150,
                ..RunSeries::default()
            },
        ],
        ranks: (0..2)
            .map(|rank| RankTimes {
                rank,
                compute_s: 3e-5,
                communication_s: 1e-5,
                peak_rss_bytes: Some(20 << 20),
            })
            .collect(),
        speedup: Some(Speedup { single_s: 0.2, ddp_s: 0.11, ranks: 2 }),
        ..Report::default()
    }
}

/// Checks that every element is closed, in order.
fn assert_well_formed(html: &str) {
    let mut open = Vec::new();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        let end =
            start + rest[start..].find('>').unwrap_or_else(|| panic!("`<` without end: {}", &rest[start..]));
        let tag = &rest[start + 1..end];
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "</{closed}>");
        } else if !tag.ends_with('/') && !tag.starts_with('!') && name != "meta" {
            open.push(name);
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn evaluations_are_drawn_and_samples_shown() {
    let evaluation = |step, loss: f64, sample: &str| Evaluation {
        step,
        loss,
        sample: Some(sample.to_string()),
        ..Evaluation::default()
    };
    let evaluations = vec![evaluation(100, 2.5, "the <cat>\n sat"), evaluation(200, f64::NAN, "")];
    let run = RunSeries {
        name: "dp=2".into(),
        losses: vec![3.0; 200],
        first_step: 50,
        evaluations,
        ..RunSeries::default()
    };
    let plain = Report { runs: vec![run.clone()], ..Report::default() };
    let html = plain.render().unwrap();
    assert_well_formed(&html);
    assert!(html.contains("cat") && html.contains("\n sat</td>") && !html.contains("<cat>"), "{html}");
    for part in ["Evaluations", "sample of text", "</span>evaluation</li>", "evaluation: from 2.5 to 2.5"] {
        assert!(html.contains(part), "{part}");
    }
    assert!(html.contains(&hex(COLOURS[1].0)));
    let bare = vec![Evaluation { step: 100, loss: 2.5, sample: None, ..Evaluation::default() }];
    let bare = Report { runs: vec![RunSeries { evaluations: bare, ..run.clone() }], ..Report::default() };
    let html = bare.render().unwrap();
    assert!(html.contains("Evaluations") && !html.contains("perplexity") && !html.contains("sample of text"));
    let none = RunSeries { evaluations: Vec::new(), ..run };
    let html = Report { runs: vec![none], ..Report::default() }.render().unwrap();
    assert!(!html.contains("Evaluations") && !html.contains("</span>evaluation"));
}

#[test]
fn a_full_report_has_every_part_and_no_link() {
    let html = full().render().unwrap();
    assert_well_formed(&html);
    assert_eq!(html.matches("class=\"plot\"").count(), 4);
    assert_eq!(html.matches("<svg").count(), 5, "the curves of losses once more for a narrow page");
    for part in
        ["Loss", "loss (log scale)", "epoch", "Time per step by rank", "time per step (µs)", "communication"]
    {
        assert!(html.contains(part), "{part}");
    }
    for part in [
        "Peak memory by rank", "resident memory (MiB)", "Speed-up of 2 ranks", "backend",
        "1.82 times as fast",
    ] {
        assert!(html.contains(part), "{part}");
    }
    let links = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for link in ["http", "href", "src=", "url(", "@import", "<script ", "<link"] {
        assert!(!links.contains(link), "{link}");
    }
    // Few points are drawn, however many steps there are.
    assert!(html.len() < 100_000, "{}", html.len());
    // The page's style sheet refers to the colours of the plots.
    let colour = hex(COLOURS[0].0);
    assert!(
        html.contains(&format!("stroke=\"{colour}\""))
            && html.contains(&format!("svg [stroke=\"{colour}\"]"))
    );
}

#[test]
fn an_empty_report_is_a_page() {
    let html = Report::default().render().unwrap();
    assert_well_formed(&html);
    assert!(!html.contains("<svg") && !html.contains("<table") && !html.contains("<pre"));
}

#[test]
fn text_is_escaped_everywhere() {
    let evil = "<script>alert(\"&'1\")</script>".to_string();
    let mut report = full();
    report.facts.push((evil.clone(), evil.clone()));
    report.runs.iter_mut().for_each(|run| run.name = evil.clone());
    report.runs[0].losses[0] = f32::NAN;
    let report =
        Report { title: evil.clone(), command_line: evil.clone(), date: evil.clone(), host: evil, ..report };
    let html = report.render().unwrap();
    assert_well_formed(&html);
    assert_eq!(html.matches("<script").count(), 1, "the page's own");
    assert!(!html.contains("alert(\""));
}

#[test]
fn no_numbers_break_it() {
    let strange =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0., -1., f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45];
    let mut cases: Vec<Vec<f32>> = strange.iter().map(|&loss| vec![loss]).collect();
    cases.extend(strange.iter().map(|&loss| vec![loss; 5000]));
    cases.extend(strange.iter().map(|&loss| vec![1., loss, 2.]));
    cases.push(strange.to_vec());
    cases.push(vec![]);
    for losses in cases {
        for number in [f64::NAN, f64::INFINITY, 0., -1., 1e-300, 1e300] {
            let run = |losses, steps_per_epoch| RunSeries {
                name: "r".into(),
                losses,
                seconds: number,
                world_size: 1,
                steps_per_epoch,
                ..RunSeries::default()
            };
            let rank = RankTimes {
                rank: 0,
                compute_s: number,
                communication_s: number,
                peak_rss_bytes: Some(u64::MAX),
            };
            let report = Report {
                runs: vec![run(losses.clone(), 0), run(losses.clone(), 7)],
                ranks: vec![rank; 3],
                speedup: Some(Speedup { single_s: number, ddp_s: 1., ranks: usize::MAX }),
                ..Report::default()
            };
            assert_well_formed(&report.render().unwrap());
        }
    }
}

#[test]
fn losses_that_are_not_finite_are_told() {
    let run = RunSeries {
        name: "ddp".into(),
        losses: vec![1., f32::NAN, 0.5, f32::INFINITY],
        ..RunSeries::default()
    };
    let html = Report { runs: vec![run], ..Report::default() }.render().unwrap();
    assert!(html.contains("training: 2 of 4 losses are not finite, the first (NaN) at step 2."));
}

#[test]
fn many_ranks_fit() {
    let ranks =
        (0..256).map(|rank| RankTimes { rank, compute_s: 0.5, communication_s: 0.1, peak_rss_bytes: None });
    let html = Report { ranks: ranks.collect(), ..Report::default() }.render().unwrap();
    assert_well_formed(&html);
    assert_eq!(html.matches("<svg").count(), 1);
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let path = std::path::Path::new("/no/such/folder/report.html");
    let line = full().write(path).unwrap_err().to_string();
    assert!(line.starts_with("cannot write /no/such/folder/report.html: "), "{line}");
}

#[test]
fn a_pipeline_is_drawn_planned_and_measured() {
    let schedule = pipeline::Schedule::of(pipeline::ScheduleKind::OneFOneB, 2, 1, 3).unwrap();
    let plan = schedule.plan(&Default::default());
    let timeline =
        |measured| Timeline { title: format!("measured: {measured}"), plan: plan.clone(), measured };
    let html = Report { timelines: vec![timeline(false), timeline(true)], ..Report::default() };
    let html = html.render().unwrap();
    assert_well_formed(&html);
    assert_eq!(html.matches("<svg").count(), 2);
    for part in ["12 forward passes from the first action", "12 s from", "idle 25 %", ">backward</li>"] {
        assert!(html.contains(part), "{part}");
    }
    // Without data nothing is drawn.
    let empty = Report { timelines: vec![Timeline::default()], ..Report::default() };
    assert!(!empty.render().unwrap().contains("<svg"));
}

/// Names and values of a single run's quantities.
fn with_quantities(quantities: &[(&str, [f32; 4])]) -> Report {
    let quantities =
        quantities.iter().map(|(name, values)| Quantity { name: name.to_string(), values: values.to_vec() });
    let (name, losses) = ("dp=1".to_string(), vec![4., 3., 2., 1.]);
    let run =
        RunSeries { name, losses, world_size: 1, quantities: quantities.collect(), ..RunSeries::default() };
    let rank = RankTimes { rank: 0, compute_s: 0.25, communication_s: 0., peak_rss_bytes: Some(3 << 20) };
    Report { runs: vec![run], ranks: vec![rank], ..Report::default() }
}

/// Name and points of a curve.
type Points = (String, Vec<(f64, f64)>);

/// The curves whose values the page shows at the pointer, of each plot.
fn hovered(html: &str) -> Vec<Vec<Points>> {
    let attributes = html.split("data-curves=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    let plots = attributes.map(|text| {
        let json: serde_json::Value = serde_json::from_str(&text.replace("&#34;", "\"")).unwrap();
        let curves = json["curves"].as_array().unwrap().iter();
        let curve = |curve: &serde_json::Value| {
            (
                curve["name"].as_str().unwrap().to_string(),
                serde_json::from_value(curve["points"].clone()).unwrap(),
            )
        };
        curves.map(curve).collect()
    });
    plots.collect()
}

#[test]
fn each_quantity_has_a_plot_whose_values_the_page_knows() {
    let rates = [0.1, f32::NAN, 0.2, 0.3];
    let html = with_quantities(&[("Learning rate", rates), ("unknown", [f32::NAN; 4])]).render().unwrap();
    assert_well_formed(&html);
    let one = |name: &str, points: &[(f64, f64)]| vec![(name.to_string(), points.to_vec())];
    let losses = one("training", &[(1., 4.), (2., 3.), (3., 2.), (4., 1.)]);
    assert_eq!(hovered(&html), [losses, one("training", &[(1., 0.1), (3., 0.2), (4., 0.3)])]);
    assert!(html.contains("<figcaption>Learning rate</figcaption>") && !html.contains("unknown"));
}

#[test]
fn a_single_rank_has_numbers_instead_of_bars() {
    let html = with_quantities(&[]).render().unwrap();
    assert!(
        !html.contains("by rank") && html.contains("<td>250 ms</td>") && html.contains("<td>3 MiB</td>"),
        "{html}"
    );
}

#[test]
fn options_are_listed_and_defaults_marked() {
    let option = |name: &str, is_default| OptionValue { name: name.into(), value: "<7>".into(), is_default };
    let report =
        Report { options: vec![option("--seed", false), option("--steps", true)], ..Report::default() };
    let html = report.render().unwrap();
    assert_well_formed(&html);
    assert!(html.contains("All options: 1 given, 1 not"));
    assert!(html.contains("--seed</th><td>&#60;7&#62;</td>"));
    assert!(html.contains("--steps</th><td>&#60;7&#62; <span>default</span></td>"));
}

#[test]
fn only_the_page_of_a_run_that_goes_on_loads_itself_again() {
    let page = |state| Report { state, ..Report::default() }.render().unwrap();
    let loads = |html: &str| html.contains("<body data-reload>");
    assert!(loads(&page(RunState::Running)) && page(RunState::Running).contains(">running<"));
    assert!(
        !loads(&page(RunState::Stopped)) && page(RunState::Stopped).contains("ended before its last step")
    );
    assert!(!loads(&page(RunState::Ended)) && !page(RunState::Ended).contains("class=\"state\""));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.html");
    for (state, then) in [(RunState::Running, RunState::Stopped), (RunState::Ended, RunState::Ended)] {
        std::fs::write(&path, page(state)).unwrap();
        mark_stopped(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), page(then));
    }
    assert!(mark_stopped(&folder.path().join("none")).is_err());
}
