//! Results of a training run, for output and report.

use girandole::trainer::Summary;
use models::tokens::{PackingReport, Rows};
use plan::units::show_flops;
use serde::{Deserialize, Serialize};

use report::RunSeries;
use report::metrics::{CheckpointTimes, PackedDocuments};

use super::speed::{Speed, show_mfu};

/// Result of training on rank 0, for the report.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    pub(super) series: RunSeries,
    /// Facts for the report: name and value.
    pub(super) facts: Vec<(String, String)>,
    /// What is printed at the end.
    pub(super) lines: Vec<String>,
}

/// Returns the times taken by checkpoints, if there were any.
pub(super) fn checkpoint_times(summary: &Summary) -> Option<CheckpointTimes> {
    let &Summary { checkpoints: count, checkpoint_seconds, last_checkpoint_seconds, .. } = summary;
    let times = CheckpointTimes {
        count,
        stood_still_seconds: checkpoint_seconds,
        at_end_seconds: last_checkpoint_seconds,
    };
    (count > 0).then_some(times)
}

/// Returns what became of documents, if they are packed whole.
pub(super) fn packed_documents(rows: &Rows) -> Option<PackedDocuments> {
    let PackingReport { documents, cut, dropped, padding } = rows.packing()?;
    Some(PackedDocuments { documents, cut, dropped, padding })
}

/// Formats steps, tokens and speed in one line, without the time of evaluations and checkpoints.
pub(super) fn line(summary: &Summary, speed: &Speed) -> String {
    let (flops, mfu) = speed.of(summary.steps, summary.step_seconds);
    let tokens = speed.tokens(summary.targets, summary.steps);
    format!(
        "{} steps, {tokens:.0} tokens in {:.1} s: {:.0} tokens/s, {}, {}",
        summary.steps,
        summary.step_seconds,
        tokens / summary.step_seconds,
        show_flops(flops),
        show_mfu(mfu)
    )
}

/// Returns the same as facts for the report.
pub(super) fn facts(summary: &Summary, speed: &Speed) -> Vec<(String, String)> {
    if summary.steps == 0 {
        return Vec::new();
    }
    let fact = |name: &str, value: String| (name.to_string(), value);
    let (flops, mfu) = speed.of(summary.steps, summary.step_seconds);
    let mut facts = vec![
        fact(
            "tokens/s",
            format!("{:.0}", speed.tokens(summary.targets, summary.steps) / summary.step_seconds),
        ),
        fact("model FLOP/s", show_flops(flops)),
        fact(
            "MFU",
            match mfu {
                Some(mfu) => {
                    format!("{:.1} % of {}, measured at the start", 100.0 * mfu, show_flops(speed.peak))
                }
                None => format!("unknown: faster than the {} measured at the start", show_flops(speed.peak)),
            },
        ),
    ];
    if let Some(CheckpointTimes { count, stood_still_seconds, at_end_seconds }) = checkpoint_times(summary) {
        let each = stood_still_seconds / count as f64;
        let value = format!(
            "{count}; training stood still for {each:.3} s each, and {at_end_seconds:.3} s at its end"
        );
        facts.push(fact("checkpoints", value));
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_that_of_the_steps_alone() {
        let summary =
            Summary { steps: 4, targets: 800, seconds: 10.0, step_seconds: 2.0, ..Summary::default() };
        let speed = Speed { step: 1e9, peak: 4e9, tokens: None };
        let line = line(&summary, &speed);
        assert!(line.starts_with("4 steps, 800 tokens in 2.0 s: 400 tokens/s, "), "{line}");
        assert!(line.ends_with("MFU 50 %"), "{line}");
        assert_eq!(facts(&summary, &speed)[0], ("tokens/s".into(), "400".into()));
    }
}
