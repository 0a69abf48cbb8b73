//! What a step or an evaluation tells of pairs of answers.

use ops::{PairResult, Preferences};
use serde::{Deserialize, Serialize};
use training::build::Model;

use super::Parallel;
use crate::{Error, Result};

/// What was found of pairs of answers, of all ranks and micro-batches: means over the pairs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    /// Number of pairs.
    pub pairs: usize,
    /// Number of tokens of their answers.
    pub tokens: usize,
    /// The loss, without ORPO's cross-entropy.
    pub loss: f64,
    /// Rewards of chosen and of rejected answers ([`PairResult::rewards`]).
    pub rewards: [f64; 2],
    /// The share of pairs whose chosen answer has the greater reward.
    pub accuracy: f64,
    /// Log-probabilities of chosen and of rejected answers.
    pub log_probs: [f64; 2],
    /// With ORPO: the mean of the cross-entropies, which is a part of the loss, and their number; 0 otherwise.
    pub cross_entropy: (f64, usize),
}

impl PreferenceReport {
    /// The mean reward of chosen answers, less that of rejected ones.
    pub fn margin(&self) -> f64 {
        self.rewards[0] - self.rewards[1]
    }

    /// That of the pairs of both.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        let mean = |(a, count): (f64, usize), (b, others): (f64, usize)| match count + others {
            0 => 0.0,
            all => (a * count as f64 + b * others as f64) / all as f64,
        };
        let of = |own: f64, others: f64| mean((own, self.pairs), (others, other.pairs));
        let both = |own: [f64; 2], others: [f64; 2]| [of(own[0], others[0]), of(own[1], others[1])];
        let cross_entropies = self.cross_entropy.1 + other.cross_entropy.1;
        Self {
            pairs: self.pairs + other.pairs,
            tokens: self.tokens + other.tokens,
            loss: of(self.loss, other.loss),
            rewards: both(self.rewards, other.rewards),
            accuracy: of(self.accuracy, other.accuracy),
            log_probs: both(self.log_probs, other.log_probs),
            cross_entropy: (mean(self.cross_entropy, other.cross_entropy), cross_entropies),
        }
    }

    fn of(sums: [f64; 10]) -> Self {
        let [pairs, loss, chosen, rejected, correct, of_chosen, of_rejected, cross_entropy, count, tokens] =
            sums;
        let mean = |sum: f64| sum / pairs;
        Self {
            pairs: pairs.round() as usize,
            tokens: tokens.round() as usize,
            loss: mean(loss),
            rewards: [mean(chosen), mean(rejected)],
            accuracy: mean(correct),
            log_probs: [mean(of_chosen), mean(of_rejected)],
            cross_entropy: (cross_entropy / count.max(1.0), count.round() as usize),
        }
    }
}

impl<M: Model> Parallel<M> {
    /// Sums the results of micro-batches over ranks; `None` if their rows have no pairs.
    pub(crate) fn report_of_pairs(
        &self,
        parts: &[Preferences],
        total: usize,
    ) -> Result<Option<PreferenceReport>> {
        let own: Vec<PairResult> = parts.iter().flat_map(Preferences::results).collect();
        if parts.is_empty() { Ok(None) } else { self.report(&own, total).map(Some) }
    }

    pub(super) fn report(&self, own: &[PairResult], total: usize) -> Result<PreferenceReport> {
        // All ranks that divide rows have the same results.
        let share = self.axes.context.as_ref().map_or(1.0, |rows| 1.0 / rows.comm().world_size() as f64);
        let mut sums = [0.0; 10];
        for PairResult { loss, log_probs, lengths, rewards, cross_entropy } in own {
            let is_correct = f64::from(u8::from(rewards[0] > rewards[1]));
            let numbers = [
                [1.0, *loss, rewards[0], rewards[1], is_correct],
                [log_probs[0], log_probs[1], cross_entropy.0, cross_entropy.1, lengths[0] + lengths[1]],
            ];
            sums.iter_mut().zip(numbers.as_flattened()).for_each(|(sum, number)| *sum += share * number);
        }
        let report = PreferenceReport::of(self.numbers_of_all(sums)?);
        if report.pairs != total {
            let got = format!("{} results for {total} pairs", report.pairs);
            let help =
                "compute Preferences::loss in last_unit_loss, where RowContext::current() has preferences";
            return Err(Error::invalid("the model's loss", got, help));
        }
        Ok(report)
    }
}
