//! TensorBoard scalars of a training run.

use std::path::Path;

use crate::error::Result;
use girandole::trainer::StepReport;
use report::PairMetrics;
use report::metrics::{StepDetails, StepSpeed};
use report::tensorboard::EventWriter;

/// The event file of the reporting rank, created at its first step; a rank that replaces a lost reporter starts
/// another file.
pub(super) struct Events<'a> {
    dir: Option<&'a Path>,
    writer: Option<EventWriter>,
    /// The first step that is repeated, until a new file is begun for it.
    repeated: Option<usize>,
}

impl<'a> Events<'a> {
    pub(super) fn new(dir: Option<&'a Path>) -> Self {
        Self { dir, writer: None, repeated: None }
    }

    /// Goes back to the end of a step: TensorBoard then shows later ones only as they are when they are repeated.
    pub(super) fn go_back(&mut self, step: usize) {
        (self.writer, self.repeated) = (None, Some(step + 1));
    }

    /// Writes the scalars of a step.
    pub(super) fn stepped(&mut self, report: &StepReport, details: &StepDetails) -> Result<()> {
        self.scalars(report.step, report.step, &scalars(report, details))
    }

    /// Writes the loss of an evaluation, and what else was measured.
    pub(super) fn evaluated(
        &mut self,
        step: usize,
        loss: f64,
        measures: &[(&'static str, f64)],
    ) -> Result<()> {
        let named =
            |(name, measure): &(&str, f64)| (format!("evaluation/{}", name.replace(' ', "_")), *measure);
        let named: Vec<(String, f64)> = measures.iter().map(named).collect();
        let all = named.iter().map(|(name, measure)| (name.as_str(), *measure));
        let all: Vec<(&str, f64)> = std::iter::once(("evaluation/loss", loss)).chain(all).collect();
        // After the step, which an earlier file has.
        self.scalars(step, step + 1, &all)
    }

    /// `first` is the first step of a new file, unless steps are repeated.
    fn scalars(&mut self, step: usize, first: usize, scalars: &[(&str, f64)]) -> Result<()> {
        let Some(dir) = self.dir else { return Ok(()) };
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => none.insert(EventWriter::create(dir, self.repeated.take().unwrap_or(first))?),
        };
        Ok(writer.scalars(step, scalars)?)
    }
}

fn scalars(report: &StepReport, details: &StepDetails) -> Vec<(&'static str, f64)> {
    let mut scalars = vec![
        ("train/loss", report.loss),
        ("train/learning_rate", report.learning_rate),
        ("train/gradient_norm", report.grad_norm),
        ("speed/tokens_per_second", details.tokens_per_second),
    ];
    let of_speed = |speed: StepSpeed| {
        let held = speed.peak_rss_bytes.map(|bytes| ("memory/peak_rss_bytes", bytes as f64));
        let mfu = speed.mfu.map(|mfu| ("speed/mfu", mfu));
        let times = [
            ("speed/model_flops_per_second", speed.model_flops_per_second),
            ("speed/compute_seconds", speed.compute_seconds),
            ("speed/communication_seconds", speed.communication_seconds),
            ("speed/waiting_seconds", speed.waiting_seconds),
        ];
        times.into_iter().chain(mfu).chain(held)
    };
    scalars.extend(report.balance_loss.map(|loss| ("train/balance_loss", loss)));
    scalars.extend(report.busiest_expert.map(|share| ("train/busiest_expert", share)));
    let of_pairs = |pairs: PairMetrics| {
        [
            ("preferences/margin", pairs.margin),
            ("preferences/accuracy", pairs.accuracy),
            ("preferences/reward_chosen", pairs.reward_chosen),
            ("preferences/reward_rejected", pairs.reward_rejected),
        ]
    };
    scalars.extend(details.pairs.into_iter().flat_map(of_pairs));
    scalars.extend(details.speed.into_iter().flat_map(of_speed));
    scalars
}
