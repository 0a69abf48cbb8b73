//! Comparison table: memory and communication of tensor parallelism and of data parallelism.

use cli::console::say;
use cli::error::Result;

use super::measurements::Measurements;
use super::training::Trained;

/// Prints the table for these numbers of data-parallel and of tensor-parallel ranks.
///
/// # Errors
/// Standard output that cannot be written.
pub fn print(sizes: (usize, usize), trained: &Trained) -> Result<()> {
    lines(sizes, &trained.own, &trained.data_parallel).iter().try_for_each(|line| say(format_args!("{line}")))
}

fn lines((dp, tp): (usize, usize), own: &Measurements, other: &Measurements) -> Vec<String> {
    let ranks = dp * tp;
    let own_name = if dp == 1 { format!("tp {tp}") } else { format!("tp {tp}, dp {dp}") };
    let mut lines = vec![
        String::new(),
        "===== memory and communication of each rank, measured =====".to_string(),
        row("", &own_name, &format!("dp {ranks}"), "ratio"),
    ];
    let mut bytes = |name: &str, own: f64, other: f64| {
        let ratio = if other > 0.0 { format!("{:.3}", own / other) } else { "-".into() };
        lines.push(row(name, &megabytes(own), &megabytes(other), &ratio));
    };
    bytes("weights", own.held.weights as f64, other.held.weights as f64);
    bytes("gradients", own.held.gradients as f64, other.held.gradients as f64);
    bytes("optimizer", own.held.optimizer as f64, other.held.optimizer as f64);
    bytes("all three", own.held.model() as f64, other.held.model() as f64);
    if let (Some(own), Some(other)) = (own.peak_rss, other.peak_rss) {
        bytes("peak of the process", own as f64, other as f64);
    }
    bytes("sent in a step", own.held.sent, other.held.sent);
    let time = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
    let ratio = format!("{:.3}", own.step_s / other.step_s);
    lines.push(row("time of a step", &time(own.step_s), &time(other.step_s), &ratio));
    lines
}

fn row(name: &str, own: &str, other: &str, ratio: &str) -> String {
    format!("{name:<20}{own:>14}{other:>14}{ratio:>9}")
}

/// Formats bytes as megabytes (10^6).
fn megabytes(bytes: f64) -> String {
    format!("{:.3} MB", bytes / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use report::metrics::MemoryUse;

    #[test]
    fn every_figure_has_a_line() {
        let held = MemoryUse {
            weights: 500_000,
            gradients: 500_000,
            optimizer: 1_000_000,
            sent: 1000.0,
            ..MemoryUse::default()
        };
        let own = Measurements { held, step_s: 0.001, peak_rss: None };
        let held = MemoryUse { weights: 1_000_000, sent: 0.0, ..held };
        let other = Measurements { held, step_s: 0.002, ..own };
        let lines = lines((1, 2), &own, &other);
        assert_eq!(lines[3], "weights                   0.500 MB      1.000 MB    0.500");
        assert_eq!(lines[7], "sent in a step            0.001 MB      0.000 MB        -");
        assert_eq!(lines[8], "time of a step             1.00 ms       2.00 ms    0.500");
    }
}
