//! Predictions: for the measured runs, from runs on one rank; and for large numbers of ranks on known networks.

use cli::console::note;
use cli::error::{Error, Result};
use comm::Transport;
use plan::forecast::fit::{Fit, fit};
use plan::forecast::{Collectives, Layout, Network, Prediction, Transformer, Work, predict, predict_with};
use plan::measure::Row;
use serde::{Deserialize, Serialize};

use super::{Case, Kind, Machine, Options, Run};
use crate::workload::RankFigures;
use crate::{Job, Ranks};

/// Operations that the network is fitted to; below, their sizes and seconds of measurement.
const OPERATIONS: [&str; 4] = ["all_reduce", "all_gather", "reduce_scatter", "send_recv"];
const SIZES: [usize; 4] = [4 << 10, 256 << 10, 4 << 20, 16 << 20];
const SECONDS: f64 = 0.1;

/// The model whose scaling is predicted.
const MODEL: Transformer =
    Transformer { vocab_size: 50_304, d_model: 2048, d_ff: 8192, num_layers: 24, length: 2048 };
/// Rows of tokens for each rank.
const ROWS: usize = 4;
const FEWEST_RANKS: usize = 8;

/// A run with its measured and predicted time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// Measured seconds per step.
    pub measured_s: f64,
    /// Seconds per step, predicted from runs on one rank and from the fitted network.
    pub predicted_s: f64,
}

/// Predictions for a network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// The network.
    pub network: Network,
    /// Predictions by layout and number of ranks.
    pub points: Vec<Predicted>,
}

/// The prediction for one layout and number of ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Name of the layout.
    pub layout: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Step time of a single rank with as many rows per rank, and no communication, divided by the predicted step time.
    pub efficiency: f64,
    /// The predicted step.
    #[serde(flatten)]
    pub prediction: Prediction,
}

/// Measures collectives between processes of this machine for each number of ranks; returns the median round of each.
pub(super) fn table(options: &Options) -> Result<Vec<Row>> {
    let mut rounds = (0..options.rounds).map(|_| round(options)).collect::<Result<Vec<_>>>()?;
    let count = rounds.first().map_or(0, Vec::len);
    let median = |place: usize| {
        rounds.sort_by(|one, other| one[place].s.total_cmp(&other[place].s));
        rounds[(rounds.len() - 1) / 2][place].clone()
    };
    Ok((0..count).map(median).collect())
}

fn round(options: &Options) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for world_size in options.ranks().into_iter().filter(|ranks| *ranks > 1) {
        let ranks = Ranks { world_size, transport: Transport::Auto, threads: options.threads };
        let cases = OPERATIONS.iter().flat_map(|name| SIZES.map(|bytes| (name.to_string(), bytes))).collect();
        note(format_args!("collectives, ranks {world_size}"));
        rows.extend(ranks.run::<Vec<Row>>(&Job::Table { cases, seconds: SECONDS })?);
    }
    Ok(rows)
}

/// Returns each run on several ranks with its prediction.
pub(super) fn compared(
    options: &Options,
    runs: &[Run],
    rows: &[Row],
    machine: &Machine,
) -> Result<Vec<Compared>> {
    let several = runs.iter().filter(|run| run.case.ranks > 1);
    let compared = several.filter_map(|run| {
        let rows: Vec<Row> = rows.iter().filter(|row| row.world == run.case.ranks).cloned().collect();
        let Fit { link, combine_s_per_byte, .. } = fit(&rows)?;
        let overlaps = run.case.ranks * options.threads < machine.cores;
        let network = Network::one_node("this machine", link, combine_s_per_byte, overlaps);
        let (work, layout) = calibrated(options, runs, run)?;
        let predicted = predict(&work, &layout, &network).map_err(Error::from);
        Some(predicted.map(|prediction| Compared {
            case: run.case,
            measured_s: run.step_s,
            predicted_s: prediction.step_s,
        }))
    });
    compared.collect()
}

/// Returns the work of a run, calibrated with runs of the same strategy on one rank; `None` if there are none.
fn calibrated(options: &Options, runs: &[Run], run: &Run) -> Option<(Work, Layout)> {
    let Case { strategy, ranks, batch_size } = run.case;
    let alone: Vec<&Run> =
        runs.iter().filter(|run| run.case.strategy == strategy && run.case.ranks == 1).collect();
    let sizes = options.sizes();
    let (vocab_size, d_model, d_ff) = (sizes.vocab_size, sizes.d_model, sizes.d_ff);
    let model = Transformer { vocab_size, d_model, d_ff, num_layers: sizes.num_layers, length: sizes.length };
    // Rows that one rank processes, and into how many micro-batches they are cut.
    let (rows, parts, layout) = match strategy {
        Kind::Ddp => (batch_size / ranks, 1, Layout::ddp(ranks)),
        Kind::Fsdp => (batch_size / ranks, 1, Layout::fsdp(ranks)),
        Kind::TensorParallel => (batch_size, 1, Layout::tensor(ranks, 1)),
        Kind::Pipeline => {
            let parts = run.case.micro_batches();
            (batch_size, parts, Layout::pipeline(ranks, 1, 1, parts))
        }
    };
    let at = |of: fn(&RankFigures) -> f64| -> Option<f64> {
        let points: Vec<(f64, f64)> =
            alone.iter().map(|run| (run.case.batch_size as f64, run.mean(of))).collect();
        interpolated(&points, rows as f64)
    };
    let times = [
        at(|rank| rank.forward_s)? / parts as f64,
        at(|rank| rank.backward_s)? / parts as f64,
        at(|rank| rank.optimizer_s)?,
    ];
    Some((Work::measured(&model, rows / parts, times), layout))
}

/// Returns the value at `x`: that of an exact point, or else on the line through the first and the last point.
fn interpolated(points: &[(f64, f64)], x: f64) -> Option<f64> {
    let exact = points.iter().find(|point| point.0 == x).map(|point| point.1);
    exact.or_else(|| match points {
        [(_, y)] => Some(*y),
        [(x0, y0), .., (x1, y1)] => Some((y0 + (x - x0) * (y1 - y0) / (x1 - x0)).max(0.0)),
        _ => None,
    })
}

/// Returns layouts of the model over `ranks` ranks, with the work of a rank in each.
fn layouts(ranks: usize, flops: f64) -> Vec<(&'static str, Layout, Work)> {
    let work = |rows: usize| Work::transformer(&MODEL, rows, flops);
    let mut all = vec![
        ("ddp", Layout::ddp(ranks), work(ROWS)),
        ("fsdp", Layout::fsdp(ranks), work(ROWS)),
        ("fsdp over 8, ddp", Layout::hybrid(8, ranks / 8), work(ROWS)),
        ("tensor parallel over 8, ddp", Layout::tensor(8, ranks / 8), work(8 * ROWS)),
        // As many rows per rank, in micro-batches of one row.
        ("pipeline over 8, ddp", Layout::pipeline(8, ranks / 8, 1, 8 * ROWS), work(1)),
    ];
    if ranks >= 32 {
        let layout = Layout::pipeline(4, ranks / 32, 8, 32);
        all.push(("tensor parallel over 8, pipeline over 4, ddp", layout, work(ROWS)));
    }
    all
}

/// Predicts the scaling of a large model on each network.
pub(super) fn forecasts(options: &Options) -> Result<Vec<Forecast>> {
    options.networks.iter().map(|network| forecast(network.network(), options)).collect()
}

fn forecast(network: Network, options: &Options) -> Result<Forecast> {
    note(format_args!("predictions: {}", network.name));
    let alone = predict(&Work::transformer(&MODEL, ROWS, options.flops), &Layout::ddp(1), &network)?.step_s;
    let mut collectives = Collectives::new(&network);
    let mut points = Vec::new();
    let counts = std::iter::successors(Some(FEWEST_RANKS), |ranks| Some(ranks * 2));
    for ranks in counts.take_while(|ranks| *ranks <= options.most_ranks) {
        for (name, layout, work) in layouts(ranks, options.flops) {
            let prediction = predict_with(&work, &layout, &mut collectives)?;
            let efficiency = alone / prediction.step_s;
            points.push(Predicted { layout: name.into(), ranks, efficiency, prediction });
        }
    }
    Ok(Forecast { network, points })
}

/// Describes the model and hardware of [`forecasts`].
pub(super) fn described(flops: f64) -> String {
    let parameters: usize = MODEL.parts().iter().map(|part| part.0).sum();
    format!(
        "A Transformer of {:.2} billion parameters ({} blocks, {} features), f32 gradients, {ROWS} rows of {} tokens for each \
         rank, on accelerators that do {:.0} TFLOP/s. Collectives are run message by message, by the schedules that comm runs; \
         pipelines by their own.",
        parameters as f64 * 1e-9,
        MODEL.num_layers,
        MODEL.d_model,
        MODEL.length,
        flops * 1e-12
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_through_its_points() {
        assert_eq!(interpolated(&[(8.0, 1.0), (16.0, 3.0)], 8.0), Some(1.0));
        assert_eq!(interpolated(&[(8.0, 1.0), (16.0, 3.0)], 12.0), Some(2.0));
        assert_eq!(interpolated(&[(8.0, 1.0)], 4.0), Some(1.0));
        assert_eq!(interpolated(&[], 4.0), None);
    }

    #[test]
    fn layouts_use_all_ranks_for_as_many_rows() {
        for ranks in [8, 32, 1024] {
            let flops = |work: &Work| work.layers.iter().map(|layer| layer.forward_s).sum::<f64>();
            let one = flops(&Work::transformer(&MODEL, ROWS, 1e12));
            for (name, layout, work) in layouts(ranks, 1e12) {
                assert_eq!(layout.ranks(), ranks, "{name}");
                // The work of all ranks together equals that of as many single ranks.
                let all = flops(&work) * (layout.micro_batches * layout.dp) as f64;
                assert!((all / (one * ranks as f64) - 1.0).abs() < 1e-9, "{name} on {ranks}");
            }
        }
    }
}
