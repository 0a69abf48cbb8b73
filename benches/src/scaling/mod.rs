//! The scaling report: every strategy measured over numbers of ranks, as an HTML page and a JSON file.

mod case;
mod kind;
mod machine;
mod measure;
mod options;
mod page;
mod predict;
mod scale;

use std::path::{Path, PathBuf};

use clap::Parser;
use cli::console::note;
use cli::error::Result;
use cli::outputs::check_in_place;
use plan::forecast::fit::{Fit, fit};
use report::{command_line, now_rfc3339};
use serde::{Deserialize, Serialize};
use training::FileError;

pub use case::Case;
pub use kind::Kind;
pub use machine::Machine;
pub use measure::Run;
pub use options::{Options, Preset};
pub use predict::{Compared, Forecast, Predicted};
pub use scale::{Point, Scale, points};

/// Everything that a report shows; serialized as `scaling.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// The command line.
    pub command_line: String,
    /// Date and time, as RFC 3339.
    pub date: String,
    /// The machine and the commit.
    pub machine: Machine,
    /// The options.
    pub options: Options,
    /// The measured runs.
    pub runs: Vec<Run>,
    /// Measured collectives, and the network parameters fitted to them.
    pub network: Option<Fit>,
    /// Measured and predicted times of each run on several ranks.
    pub compared: Vec<Compared>,
    /// Predictions for networks and numbers of ranks that this machine does not have.
    pub forecasts: Vec<Forecast>,
}

/// Measures, and writes `scaling.html` and `scaling.json`.
///
/// # Errors
/// Incompatible options, a folder that cannot be written to, ranks that fail.
pub fn main() -> Result<()> {
    let options = Options::parse();
    options.check()?;
    let out = options.out.clone();
    let writable = |error| FileError::write(&out, error);
    std::fs::create_dir_all(&out).map_err(writable)?;
    // Checked first, as measuring takes minutes.
    files(&out).iter().try_for_each(|file| check_in_place(file))?;
    let machine = Machine::this();
    let rows = predict::table(&options)?;
    let runs = measure::all(&options)?;
    let scaling = Scaling {
        network: fit(&rows),
        compared: predict::compared(&options, &runs, &rows, &machine)?,
        forecasts: predict::forecasts(&options)?,
        command_line: command_line(),
        date: now_rfc3339(),
        machine,
        options,
        runs,
    };
    write(&scaling, &out)
}

/// Returns the paths of the page and of the JSON file.
fn files(out: &Path) -> [PathBuf; 2] {
    ["scaling.html", "scaling.json"].map(|name| out.join(name))
}

fn write(scaling: &Scaling, out: &Path) -> Result<()> {
    let [html, json] = files(out);
    page::sheet(scaling, out).write(&html)?;
    let text = serde_json::to_string_pretty(scaling).map_err(std::io::Error::from);
    text.and_then(|text| training::internal::write_output(&json, text.as_bytes()))
        .map_err(|error| FileError::write(&json, error))?;
    note(format_args!("{} and {} are written", html.display(), json.display()));
    Ok(())
}
