//! Training speed in FLOP/s, and relative to the machine's measured peak (MFU).

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::rank::Rank;
use candle_core::{DType, Device, Module, Tensor};
use comm::all_gather_object;
use girandole::PreferenceReport;
use girandole::trainer::StepReport;
use ops::Linear;
use report::PairMetrics;
use report::metrics::{StepDetails, StepSpeed};

/// How long each rank measures its peak; two products may take longer.
const TIME: Duration = Duration::from_millis(100);

/// Operations of a step, and the peak of all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speed {
    /// Floating-point operations of a step, over all ranks.
    pub(super) step: f64,
    /// FLOP/s that all ranks together reach in a matrix product.
    pub(super) peak: f64,
    /// Tokens of a step, on average, where targets are documents; else each target is one.
    pub(super) tokens: Option<f64>,
}

impl Speed {
    /// Measures the peak on all ranks simultaneously, since they share the machine. Every rank must call it.
    pub(super) fn measured(rank: &Rank, dtype: DType, device: &Device, step: f64) -> Result<Self> {
        rank.comm.barrier()?.wait()?;
        let peaks = all_gather_object(&*rank.comm, &peak(dtype, device)?)?;
        Ok(Self { step, peak: peaks.into_iter().sum(), tokens: None })
    }

    /// Returns the speed of steps of so many tokens, where targets are documents.
    pub(super) fn with_tokens(self, tokens: Option<f64>) -> Self {
        Self { tokens, ..self }
    }

    /// Returns the number of tokens of `steps` steps with so many targets.
    pub(super) fn tokens(&self, targets: usize, steps: usize) -> f64 {
        self.tokens.map_or(targets as f64, |tokens| tokens * steps as f64)
    }

    /// Returns the FLOP/s of `steps` steps in `seconds`, and that as a fraction of the peak. `None` if it is more: the
    /// machine was busy with something else when the peak was measured.
    pub(super) fn of(&self, steps: usize, seconds: f64) -> (f64, Option<f64>) {
        let flops = self.step * steps as f64 / seconds;
        (flops, Some(flops / self.peak).filter(|part| *part <= 1.0))
    }

    /// Returns the speed on a rank that joins a running job: its own peak, times the number of ranks.
    pub(super) fn of_one(rank: &Rank, dtype: DType, device: &Device, step: f64) -> Result<Self> {
        let peak = peak(dtype, device)? * rank.comm.world_size() as f64;
        Ok(Self { step, peak, tokens: None })
    }

    /// Scales the peak to another number of ranks.
    pub(super) fn scale(&mut self, ranks: usize, before: usize) {
        self.peak *= ranks as f64 / before as f64;
    }

    /// Returns the details of a step for the metrics.
    pub(super) fn details(&self, report: &StepReport) -> StepDetails {
        StepDetails {
            learning_rate: report.learning_rate,
            grad_norm: report.grad_norm,
            tokens_per_second: self.tokens(report.targets, 1) / report.seconds,
            loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
            balance_loss: report.balance_loss,
            busiest_expert: report.busiest_expert,
            pairs: report.preferences.as_ref().map(pair_metrics),
            speed: Some(self.of_step(report.seconds, report.communication_seconds, report.waiting_seconds)),
        }
    }

    /// Returns the speed of one step, with the seconds in collectives and, as part of those, waiting for other ranks.
    pub(super) fn of_step(
        &self,
        seconds: f64,
        communication_seconds: f64,
        waiting_seconds: f64,
    ) -> StepSpeed {
        let (model_flops_per_second, mfu) = self.of(1, seconds);
        StepSpeed {
            model_flops_per_second,
            mfu,
            seconds,
            compute_seconds: (seconds - communication_seconds).max(0.0),
            communication_seconds,
            waiting_seconds,
            peak_rss_bytes: comm::internal::peak_rss_bytes(),
        }
    }
}

/// What metrics and page have of pairs.
pub(super) fn pair_metrics(pairs: &PreferenceReport) -> PairMetrics {
    let ([reward_chosen, reward_rejected], accuracy) = (pairs.rewards, pairs.accuracy);
    PairMetrics { reward_chosen, reward_rejected, margin: pairs.margin(), accuracy }
}

/// Formats a fraction of the peak.
pub(super) fn show_mfu(mfu: Option<f64>) -> String {
    mfu.map_or_else(|| "MFU unknown".into(), |mfu| format!("MFU {:.0} %", 100.0 * mfu))
}

/// Returns the best FLOP/s over repeated products of a linear layer, in this thread's precision.
fn peak(dtype: DType, device: &Device) -> candle_core::Result<f64> {
    // A GPU reaches its peak in large products only.
    let (rows, features) = if device.is_cpu() { (512, 1024) } else { (4096, 4096) };
    let x = Tensor::ones((rows, features), dtype, device)?;
    let layer = Linear::new(Tensor::ones((features, features), dtype, device)?, None);
    // The first one also loads what computes it.
    layer.forward(&x)?;
    device.synchronize()?;
    let (began, mut best) = (Instant::now(), Duration::MAX);
    while best == Duration::MAX || began.elapsed() < TIME {
        let call = Instant::now();
        layer.forward(&x)?;
        device.synchronize()?;
        best = best.min(call.elapsed());
    }
    Ok((2 * rows * features * features) as f64 / best.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_at_the_peak_is_all_of_it() {
        let speed = Speed { step: 6e9, peak: 2e9, tokens: Some(50.0) };
        assert_eq!((speed.tokens(7, 2), speed.with_tokens(None).tokens(7, 2)), (100.0, 7.0));
        let step = speed.of_step(6.0, 1.5, 0.5);
        assert_eq!((step.model_flops_per_second, step.mfu, step.compute_seconds), (1e9, Some(0.5), 4.5));
        assert_eq!(speed.of(2, 6.0), (2e9, Some(1.0)));
        // Nothing is faster than the peak.
        assert_eq!(speed.of(2, 3.0), (4e9, None));
        assert_eq!([Some(0.473), None].map(show_mfu), ["MFU 47 %", "MFU unknown"]);
        assert!(peak(DType::F32, &Device::Cpu).unwrap() > 1e6);
    }
}
