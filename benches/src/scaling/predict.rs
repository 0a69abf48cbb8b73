//! What was measured beside what is predicted from runs on one rank, and ranks that are not there.

use bin::comm_bench::Row;
use bin::console::note;
use bin::error::{Error, Result};
use comm::Transport;
use plan::forecast::fit::{Fit, Measurement, fit};
use plan::forecast::{Collectives, Layout, Network, Prediction, Transformer, Work, predict, predict_with};
use serde::{Deserialize, Serialize};

use super::{Case, Kind, Machine, Options, Run};
use crate::workload::RankFigures;
use crate::{Job, Ranks};

/// Operations and sizes that the network is fitted to.
const OPERATIONS: [&str; 4] = ["all_reduce", "all_gather", "reduce_scatter", "send_recv"];
const SIZES: [usize; 4] = [4 << 10, 256 << 10, 4 << 20, 16 << 20];
const SECONDS: f64 = 0.1;

/// The model whose scaling is predicted.
const MODEL: Transformer =
    Transformer { vocab_size: 50_304, d_model: 2048, d_ff: 8192, num_layers: 24, length: 2048 };
/// Its rows for each rank.
const ROWS: usize = 4;
const FEWEST_RANKS: usize = 8;

/// A run, and what was predicted of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// What ran.
    #[serde(flatten)]
    pub case: Case,
    /// Seconds of a step, measured.
    pub measured_s: f64,
    /// Seconds of a step, predicted from runs on one rank and from the network.
    pub predicted_s: f64,
}

/// What is predicted of a network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// The network.
    pub network: Network,
    /// By layout and ranks.
    pub points: Vec<Predicted>,
}

/// A step that nobody has run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// How the model is spread.
    pub layout: String,
    /// Over how many ranks.
    pub ranks: usize,
    /// Part of the time of one rank alone with as many rows a rank, which has no network to wait for.
    pub efficiency: f64,
    /// What it takes.
    #[serde(flatten)]
    pub prediction: Prediction,
}

/// The time of operations between processes of this machine, for each of several numbers of ranks: of the median round.
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

/// The network that fits rows of `comm-bench` best.
pub(super) fn fitted(rows: &[Row]) -> Option<Fit> {
    fit(&rows.iter().map(Measurement::from).collect::<Vec<_>>())
}

/// Each run on several ranks beside what is predicted of it.
pub(super) fn compared(
    options: &Options,
    runs: &[Run],
    rows: &[Row],
    machine: &Machine,
) -> Result<Vec<Compared>> {
    let several = runs.iter().filter(|run| run.case.ranks > 1);
    let compared = several.filter_map(|run| {
        let rows: Vec<Row> = rows.iter().filter(|row| row.world == run.case.ranks).cloned().collect();
        let Fit { link, combine_s_per_byte, .. } = fitted(&rows)?;
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

/// What a run computes, from runs of the same strategy on one rank; none where there are none.
fn calibrated(options: &Options, runs: &[Run], run: &Run) -> Option<(Work, Layout)> {
    let Case { strategy, ranks, batch_size } = run.case;
    let alone: Vec<&Run> =
        runs.iter().filter(|run| run.case.strategy == strategy && run.case.ranks == 1).collect();
    let sizes = options.sizes();
    let (vocab_size, d_model, d_ff) = (sizes.vocab_size, sizes.d_model, sizes.d_ff);
    let model = Transformer { vocab_size, d_model, d_ff, num_layers: sizes.num_layers, length: sizes.length };
    // Rows that one rank works on, and in how many parts.
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

/// The value at `x` on the line through the first and the last point.
fn interpolated(points: &[(f64, f64)], x: f64) -> Option<f64> {
    let exact = points.iter().find(|point| point.0 == x).map(|point| point.1);
    exact.or_else(|| match points {
        [(_, y)] => Some(*y),
        [(x0, y0), .., (x1, y1)] => Some((y0 + (x - x0) * (y1 - y0) / (x1 - x0)).max(0.0)),
        _ => None,
    })
}

/// Ways to spread the model over so many ranks, and what a rank computes then.
fn layouts(ranks: usize, flops: f64) -> Vec<(&'static str, Layout, Work)> {
    let work = |rows: usize| Work::transformer(&MODEL, rows, flops);
    let mut all = vec![
        ("ddp", Layout::ddp(ranks), work(ROWS)),
        ("fsdp", Layout::fsdp(ranks), work(ROWS)),
        ("fsdp over 8, ddp", Layout::hybrid(8, ranks / 8), work(ROWS)),
        ("tensor parallel over 8, ddp", Layout::tensor(8, ranks / 8), work(8 * ROWS)),
        // As many rows a rank, one at a time.
        ("pipeline over 8, ddp", Layout::pipeline(8, ranks / 8, 1, 8 * ROWS), work(1)),
    ];
    if ranks >= 32 {
        let layout = Layout::pipeline(4, ranks / 32, 8, 32);
        all.push(("tensor parallel over 8, pipeline over 4, ddp", layout, work(ROWS)));
    }
    all
}

/// A large model on many ranks.
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

/// The model of which [`forecasts`] are.
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
                // The work of all ranks together is that of as many alone.
                let all = flops(&work) * (layout.micro_batches * layout.dp) as f64;
                assert!((all / (one * ranks as f64) - 1.0).abs() < 1e-9, "{name} on {ranks}");
            }
        }
    }
}
