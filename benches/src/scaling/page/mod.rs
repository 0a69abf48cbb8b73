//! The HTML page of the scaling report.

mod guide;
mod predicted;

use std::path::Path;

use report::sheet::{Curve, Figure, Line, Plot, Section, Sheet, Stacks, Table};
use report::{counted, fact};

use super::scale::{Point, Scale, points};
use super::{Kind, Machine, Run, Scaling};
use crate::workload::RankFigures;

const MIB: f64 = (1 << 20) as f64;

pub(super) fn sheet(scaling: &Scaling, out: &Path) -> Sheet {
    let (runs, kinds) = (&scaling.runs[..], &scaling.options.strategies[..]);
    let rows = scaling.options.batch_size;
    let most = scaling.options.ranks().last().copied().unwrap_or(1);
    let weak = format!(
        "Each rank has {rows} rows of tokens, so that ideally a step takes as long on many ranks as on one."
    );
    let strong = format!(
        "All ranks together have {} rows of tokens, so that ideally a step takes half as long on twice as many.",
        rows * most
    );
    let sections = vec![
        scale(runs, kinds, Scale::Weak, "Weak scaling", weak),
        scale(runs, kinds, Scale::Strong, "Strong scaling", strong),
        time(runs, kinds),
        costs(runs, kinds),
        predicted::comparison_section(scaling),
        predicted::forecast_section(scaling),
    ];
    Sheet {
        title: "Scaling over ranks".into(),
        command_line: scaling.command_line.clone(),
        help: Some(guide::help(out)),
        date: scaling.date.clone(),
        host: scaling.machine.host.clone(),
        facts: facts(scaling),
        sections,
    }
}

fn scale(runs: &[Run], kinds: &[Kind], scale: Scale, heading: &str, text: String) -> Section {
    let curves = |of: fn(&Point<'_>) -> f64| -> Vec<Curve> {
        kinds
            .iter()
            .enumerate()
            .map(|(colour, kind)| curve(&points(runs, *kind, scale), *kind, colour, of))
            .collect()
    };
    let ideal = |of: fn(f64) -> f64| -> Curve {
        let points = kinds.iter().flat_map(|kind| points(runs, *kind, scale));
        let mut ranks: Vec<usize> = points.map(|point| point.run.case.ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let points = ranks.iter().map(|ranks| (*ranks as f64, of(*ranks as f64))).collect();
        Curve { name: "ideal".into(), points, line: Line::Thin, colour: 5 }
    };
    let plot = |title: &str, y_name: &str, mut curves: Vec<Curve>, ideal: Curve| {
        curves.push(ideal);
        let (title, x_name, y_name) = (format!("{heading}: {title}"), "ranks".into(), y_name.into());
        Figure::Plot(Plot { title, x_name, y_name, by_factor: true, curves, ..Plot::default() })
    };
    let figures = vec![
        plot(
            "speed-up",
            "times the rows a second of one rank",
            curves(|point| point.speedup),
            ideal(|ranks| ranks),
        ),
        plot("efficiency", "speed-up by ranks", curves(|point| point.efficiency), ideal(|_| 1.0)),
    ];
    let all: Vec<Point<'_>> = kinds.iter().flat_map(|kind| points(runs, *kind, scale)).collect();
    Section { heading: heading.into(), text: vec![text], figures, tables: vec![table(&all)] }
}

fn curve(points: &[Point<'_>], kind: Kind, colour: usize, of: fn(&Point<'_>) -> f64) -> Curve {
    let points = points.iter().map(|point| (point.run.case.ranks as f64, of(point))).collect();
    Curve { name: kind.name().into(), points, line: Line::Solid, colour }
}

fn table(points: &[Point<'_>]) -> Table {
    let heads = [
        "strategy", "ranks", "rows", "step", "rounds", "speed-up", "efficiency", "compute", "communication",
        "waiting", "sent", "memory",
    ];
    let row = |point: &Point<'_>| {
        let run = point.run;
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let mib = |bytes: f64| format!("{:.1} MiB", bytes / MIB);
        let (low, high) = run
            .rounds_s
            .iter()
            .fold((f64::INFINITY, 0f64), |(low, high), round| (low.min(*round), high.max(*round)));
        vec![
            run.case.strategy.name().to_string(),
            run.case.ranks.to_string(),
            run.case.batch_size.to_string(),
            ms(run.step_s),
            format!("{:.1} to {:.1}", low * 1e3, high * 1e3),
            format!("{:.2}", point.speedup),
            format!("{:.3}", point.efficiency),
            ms(run.mean(|rank| rank.split.compute_s)),
            ms(run.mean(|rank| rank.split.communication_s)),
            ms(run.mean(|rank| rank.split.waiting_s)),
            mib(run.most(|rank| rank.bytes_sent)),
            mib(run.most(memory)),
        ]
    };
    let rows = points.iter().map(row).collect();
    Table { heads: heads.map(String::from).to_vec(), rows, ..Table::default() }
}

fn memory(rank: &RankFigures) -> f64 {
    rank.peak_rss_bytes.unwrap_or(0) as f64
}

fn time(runs: &[Run], kinds: &[Kind]) -> Section {
    let all = kinds.iter().flat_map(|kind| points(runs, *kind, Scale::Weak));
    let bar = |point: Point<'_>| {
        let run = point.run;
        let heights = [
            run.mean(|rank| rank.split.compute_s),
            run.mean(|rank| rank.split.communication_s),
            run.mean(|rank| rank.split.waiting_s),
        ];
        (
            format!("{} {}", run.case.strategy.name(), run.case.ranks),
            heights.map(|seconds| seconds * 1e3).to_vec(),
        )
    };
    let stacks = Stacks {
        title: "Time of a step in weak scaling, by strategy and ranks".into(),
        y_name: "time (ms), mean over ranks".into(),
        parts: ["compute", "communication", "waiting"].map(String::from).to_vec(),
        bars: all.map(bar).collect(),
        note: "A rank that does not compute waits as long as another one does, and communicates when none does. What is \
               sent while it computes counts as computing."
            .into(),
    };
    let heading = "Where the time goes".into();
    Section { heading, figures: vec![Figure::Stacks(stacks)], ..Section::default() }
}

fn costs(runs: &[Run], kinds: &[Kind]) -> Section {
    let plot = |title: &str, y_name: &str, of: fn(&Point<'_>) -> f64| {
        let curves = kinds.iter().enumerate();
        let curves = curves
            .map(|(colour, kind)| curve(&points(runs, *kind, Scale::Weak), *kind, colour, of))
            .collect();
        let (title, x_name, y_name) = (title.into(), "ranks".into(), y_name.into());
        Figure::Plot(Plot { title, x_name, y_name, by_factor: true, curves, ..Plot::default() })
    };
    let figures = vec![
        plot("Bytes sent in a step of weak scaling", "MiB, by the rank that sends most", |point| {
            point.run.most(|rank| rank.bytes_sent) / MIB
        }),
        plot("Memory in weak scaling", "MiB, the most that a process held", |point| {
            point.run.most(memory) / MIB
        }),
    ];
    Section { heading: "Bytes and memory".into(), figures, ..Section::default() }
}

fn facts(scaling: &Scaling) -> Vec<(String, String)> {
    let Scaling { options, machine, .. } = scaling;
    let Machine { processor, cores, memory_bytes, commit, optimised, .. } = machine;
    let unknown = || "unknown".to_string();
    let sizes = options.sizes();
    vec![
        fact("processor", processor.clone().unwrap_or_else(unknown)),
        fact("cores", cores),
        fact(
            "memory",
            memory_bytes.map_or_else(unknown, |bytes| format!("{:.1} GiB", bytes as f64 / MIB / 1024.0)),
        ),
        fact("commit", commit.clone().unwrap_or_else(unknown)),
        fact("built", if *optimised { "optimised" } else { "for debugging: times mean little" }),
        fact("threads of each rank", options.threads),
        fact("rounds, of which the median counts", options.rounds),
        fact(
            "model",
            format!(
                "Transformer of {}, {}, {}, feed-forward layers of {}, {} tokens",
                counted(sizes.num_layers, "block"),
                counted(sizes.d_model, "feature"),
                counted(sizes.num_heads, "head"),
                sizes.d_ff,
                sizes.vocab_size
            ),
        ),
        fact("tokens in a row", sizes.length),
        fact("optimizer", "Adam"),
    ]
}
