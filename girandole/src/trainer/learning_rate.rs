//! Learning rate schedules.

use std::f64::consts::PI;

use crate::{Error, Result};

/// Learning rate schedule: linear warm-up over the first steps, then one of the decays.
///
/// ```
/// use girandole::trainer::{Decay, LearningRate};
///
/// let schedule = LearningRate { warmup: 2, decay: Decay::Linear, lowest: 0.0 };
/// let rates: Vec<f64> = (0..6).map(|step| schedule.factor(step, 6)).collect();
/// assert_eq!(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LearningRate {
    /// Warm-up steps: at step s, from 0, the learning rate is (s + 1) / warmup of the peak. Default: 0.
    pub warmup: usize,
    /// The decay after the warm-up. Default: constant.
    pub decay: Decay,
    /// Final learning rate, reached after the last step, as a fraction of the peak. Default: 0.
    pub lowest: f64,
}

/// How the learning rate decays after the warm-up. In the formulas p is the fraction of the steps after the warm-up
/// that are done:
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Decay {
    /// No decay.
    #[default]
    Constant,
    /// (1 + cos(pi p)) / 2.
    Cosine,
    /// 1 - p.
    Linear,
    /// Constant, then linear over the last part of all steps (warm-up, stable, decay), which begins at the peak: of few
    /// steps it has two, so that the last one is lower.
    Stable {
        /// Length of that part as a fraction of all steps, usually 0.1 to 0.2; with 0 there is none.
        last: f64,
    },
}

impl LearningRate {
    /// Returns the learning rate of a step, counted from 0, out of `steps`, as a fraction of the peak.
    pub fn factor(&self, step: usize, steps: usize) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        let after = |begin: usize| {
            let all = steps.saturating_sub(begin).max(1);
            ((step.saturating_sub(begin)) as f64 / all as f64).clamp(0.0, 1.0)
        };
        let part = match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => 0.5 * (1.0 + (PI * after(self.warmup)).cos()),
            Decay::Linear => 1.0 - after(self.warmup),
            Decay::Stable { last } => {
                let fewest = if last > 0.0 { 2 } else { 0 };
                let begin = steps.saturating_sub(((steps as f64 * last).round() as usize).max(fewest));
                1.0 - after(begin.max(self.warmup))
            }
        };
        self.lowest + (1.0 - self.lowest) * part
    }

    pub(super) fn check(&self, steps: usize) -> Result<()> {
        if steps == 0 {
            return Err(Error::invalid("the steps", 0, "give 1 or more"));
        }
        if !(0.0..=1.0).contains(&self.lowest) {
            return Err(Error::invalid(
                "the lowest learning rate",
                self.lowest,
                "give a part of the highest, from 0 to 1",
            ));
        }
        match self.decay {
            Decay::Stable { last } if !(0.0..=1.0).contains(&last) => {
                Err(Error::invalid("the last part of the steps", last, "give a number from 0 to 1"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosine_and_stable() {
        let cosine = LearningRate { warmup: 0, decay: Decay::Cosine, lowest: 0.1 };
        assert_eq!(cosine.factor(0, 4), 1.0);
        assert!((cosine.factor(2, 4) - 0.55).abs() < 1e-12);
        assert_eq!(cosine.factor(4, 4), 0.1);
        let stable = LearningRate { warmup: 1, decay: Decay::Stable { last: 0.4 }, lowest: 0.0 };
        let rates: Vec<f64> = (0..10).map(|step| stable.factor(step, 10)).collect();
        assert_eq!(rates, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]);
        // A fifth of few steps, and of many.
        let wsd = LearningRate { warmup: 1, decay: Decay::Stable { last: 0.2 }, lowest: 0.0 };
        let rates = |steps: usize| (0..steps).map(|step| wsd.factor(step, steps)).collect::<Vec<_>>();
        assert_eq!(rates(5), [1.0, 1.0, 1.0, 1.0, 0.5]);
        assert_eq!(rates(7), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]);
        assert_eq!(rates(15)[12..], [1.0, 1.0 - 1.0 / 3.0, 1.0 - 2.0 / 3.0]);
        assert_eq!([rates(1), rates(2)], [vec![1.0], vec![1.0, 1.0]]);
        let none = LearningRate { decay: Decay::Stable { last: 0.0 }, ..wsd };
        assert!((0..9).all(|step| none.factor(step, 9) == 1.0));
        assert!(LearningRate { lowest: 2.0, ..stable }.check(1).is_err() && stable.check(0).is_err());
    }
}
