//! Sections of the page with predictions, separate from the measurements.

use plan::forecast::Network;
use report::sheet::{Curve, Figure, Line, Plot, Section, Table};

use super::super::predict::described;
use super::super::{Compared, Forecast, Kind, Predicted, Scaling};

const GB: f64 = 1e-9;

/// Returns the section that compares predictions with measurements.
pub(super) fn comparison_section(scaling: &Scaling) -> Section {
    let kinds = &scaling.options.strategies;
    let curves = kinds.iter().enumerate().map(|(colour, kind)| {
        let of = scaling.compared.iter().filter(|run| run.case.strategy == *kind);
        let mut points: Vec<(f64, f64)> =
            of.map(|run| (run.measured_s * 1e3, run.predicted_s * 1e3)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Curve { name: kind.name().into(), points, line: Line::Solid, colour }
    });
    let all = || scaling.compared.iter().flat_map(|run| [run.measured_s, run.predicted_s]).map(|s| s * 1e3);
    let ends = [all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)];
    let same = ends.map(|end| (end, end)).to_vec();
    let ideal = Curve { name: "the same".into(), points: same, line: Line::Thin, colour: 5 };
    let steps = Plot {
        title: "Steps: predicted against measured".into(),
        x_name: "measured (ms)".into(),
        y_name: "predicted (ms)".into(),
        curves: curves.chain([ideal]).collect(),
        ..Plot::default()
    };
    let text = "Predicted from runs on one rank and from the network alone, which is fitted to the collectives that were \
                measured between the ranks: no run on several ranks goes in.";
    Section {
        heading: "How well predictions fit".into(),
        text: vec![text.into()],
        figures: vec![Figure::Plot(steps), Figure::Plot(collectives(scaling))],
        tables: vec![table(&scaling.compared)],
    }
}

/// Returns the plot of the collectives that the network was fitted to.
fn collectives(scaling: &Scaling) -> Plot {
    let rows = scaling.network.iter().flat_map(|fit| &fit.rows);
    let mut curves: Vec<Curve> = Vec::new();
    for row in rows.filter(|row| row.world == 2) {
        for (name, seconds, line) in [
            (row.op.clone(), row.measured_s, Line::Solid),
            (format!("{}, fitted", row.op), row.fitted_s, Line::Dashed),
        ] {
            let point = (row.bytes as f64 / 1024.0, seconds * 1e3);
            match curves.iter_mut().find(|curve| curve.name == name) {
                Some(curve) => curve.points.push(point),
                None => {
                    let colour = curves.iter().filter(|curve| curve.line == line).count();
                    curves.push(Curve { name, points: vec![point], line, colour });
                }
            }
        }
    }
    let note = scaling.network.as_ref().map_or_else(String::new, |fit| {
        let Network { inside, combine_s_per_byte, .. } =
            Network::one_node("", fit.link, fit.combine_s_per_byte, false);
        format!(
            "Fitted: {:.1} µs latency, {:.2} GB/s, and {:.2} GB/s of reducing or copying.",
            inside.latency * 1e6,
            GB / inside.s_per_byte.max(1e-15),
            GB / combine_s_per_byte.max(1e-15)
        )
    });
    Plot {
        title: "Collectives of 2 ranks: measured and fitted".into(),
        x_name: "buffer (KiB)".into(),
        y_name: "time (ms)".into(),
        by_factor: true,
        log: true,
        curves,
        note,
    }
}

fn table(compared: &[Compared]) -> Table {
    let row = |run: &Compared| {
        let (name, difference) = (Kind::name(run.case.strategy), run.predicted_s / run.measured_s - 1.0);
        vec![
            name.to_string(),
            run.case.ranks.to_string(),
            run.case.batch_size.to_string(),
            format!("{:.1} ms", run.measured_s * 1e3),
            format!("{:.1} ms", run.predicted_s * 1e3),
            format!("{:+.1} %", difference * 100.0),
        ]
    };
    let heads = ["strategy", "ranks", "rows", "measured", "predicted", "difference"];
    let rows = compared.iter().map(row).collect();
    Table { heads: heads.map(String::from).to_vec(), rows, ..Table::default() }
}

/// Returns the section with predictions for more ranks than this machine has.
pub(super) fn forecast_section(scaling: &Scaling) -> Section {
    let plots = scaling.forecasts.iter().map(|forecast| Figure::Plot(plot(forecast)));
    Section {
        heading: "Beyond this machine: predictions, nothing measured".into(),
        text: vec![described(scaling.options.flops)],
        figures: plots.collect(),
        tables: scaling.forecasts.iter().map(largest_ranks_table).collect(),
    }
}

fn plot(forecast: &Forecast) -> Plot {
    let mut curves: Vec<Curve> = Vec::new();
    for Predicted { layout, ranks, efficiency, .. } in &forecast.points {
        let point = (*ranks as f64, *efficiency);
        match curves.iter_mut().find(|curve| curve.name == *layout) {
            Some(curve) => curve.points.push(point),
            None => {
                let colour = curves.len();
                curves.push(Curve { name: layout.clone(), points: vec![point], line: Line::Dashed, colour });
            }
        }
    }
    Plot {
        title: forecast.network.name.clone(),
        x_name: "ranks".into(),
        y_name: "predicted efficiency of weak scaling".into(),
        by_factor: true,
        curves,
        ..Plot::default()
    }
}

/// Returns the table for the largest number of ranks.
fn largest_ranks_table(forecast: &Forecast) -> Table {
    let most = forecast.points.iter().map(|point| point.ranks).max().unwrap_or(0);
    let row = |point: &Predicted| {
        vec![
            point.layout.clone(),
            point.ranks.to_string(),
            format!("{:.3} s", point.prediction.step_s),
            format!("{:.3} s", point.prediction.compute_s),
            format!("{:.3}", point.efficiency),
            format!("{:.1} GB", point.prediction.state_bytes * GB),
        ]
    };
    let heads = ["layout", "ranks", "step", "computing", "efficiency", "weights, gradients, Adam"];
    let rows = forecast.points.iter().filter(|point| point.ranks == most).map(row).collect();
    Table { caption: forecast.network.name.clone(), heads: heads.map(String::from).to_vec(), rows }
}
