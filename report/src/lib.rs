//! Reports on training runs: pages for people, and files for programs.
//!
//! Read it in this order:
//!
//! - [`metrics`]: one JSON object per line for each step, and one for the whole run.
//! - [`Report`]: a run as plots and tables, in one self-contained HTML file: losses, learning rate and other quantities of
//!   the steps, times and memory by rank, speed-up, the timeline of a pipeline. [`sheet`] makes the same plots and tables from any numbers.
//! - [`tensorboard`]: the same numbers as event files for TensorBoard.
//! - [`trace`]: what each rank did when, as one Chrome trace of all ranks.
//!
//! Nothing here communicates with other ranks: a program collects the measurements of its ranks itself.
//!
//! ```
//! use report::metrics::{MetricsWriter, Summary};
//! use report::{Report, RunSeries};
//!
//! let folder = std::env::temp_dir().join(format!("report-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! let mut metrics = MetricsWriter::create(&folder.join("steps.jsonl"))?;
//! let mut run = RunSeries { name: "ddp".into(), world_size: 2, ..RunSeries::default() };
//! for (batch, loss) in [4.0, 2.0, 1.0].into_iter().enumerate() {
//!     metrics.step(None, 0, batch, loss, None)?;
//!     run.losses.push(loss);
//! }
//! metrics.summary(&Summary { seconds: 0.3, world_size: 2, ..Summary::default() })?;
//! Report { title: "my model".into(), runs: vec![run], ..Report::default() }.write(&folder.join("run.html"))?;
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod axis;
mod bars;
mod chart;
mod clock;
mod command_line;
mod curves;
mod error;
mod evaluations;
mod experts;
mod hover;
pub mod metrics;
mod number;
mod page;
mod run;
pub mod sheet;
pub mod tensorboard;
mod thin;
mod timeline;
pub mod trace;

pub use clock::now_rfc3339;
pub use command_line::command_line;
pub use error::{Error, Result};
pub use page::mark_stopped;
pub use run::{
    Evaluation, OptionValue, PairMetrics, Quantity, RankTimes, Report, RoutedTokens, RouterTokens, RunSeries,
    RunState, Speedup, counted, fact,
};
pub use timeline::Timeline;
