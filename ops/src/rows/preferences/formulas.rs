//! The losses of a pair of answers, and their derivatives.

use super::{Pair, PairResult};

/// The loss of a pair of answers. Where a reference is named, a *ratio* is the answer's log-probability less that of the reference; the
/// *margin* is that of the chosen answer less that of the rejected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PreferenceLoss {
    /// `-ln sigmoid(beta margin)`, of ratios; with label smoothing, that much of the loss is of the exchanged pair.
    ///
    /// # Source
    /// Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023), equation 7; label
    /// smoothing: Mitchell, "A note on DPO with noisy preferences" (2023).
    #[default]
    Dpo,
    /// `(margin - 1 / (2 beta))^2`, of ratios that are divided by the answers' lengths.
    ///
    /// # Source
    /// Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), equation 17.
    Ipo,
    /// `max(0, 1 - beta margin)`, of ratios.
    ///
    /// # Source
    /// Zhao et al., "SLiC-HF: Sequence Likelihood Calibration with Human Feedback" (2023).
    Hinge,
    /// The mean cross-entropy of all tokens of chosen answers and their prompts, and `-beta ln sigmoid(log odds ratio)`, of mean
    /// log-probabilities of the answers' tokens. It needs no reference.
    ///
    /// # Source
    /// Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model" (2024), equations 4 to 7.
    Orpo,
    /// `-ln sigmoid(beta margin - gamma)`, of mean log-probabilities; label smoothing as with DPO. It needs no reference.
    ///
    /// # Source
    /// Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward" (2024), equation 6.
    SimPo,
    /// `-ln sigmoid(chosen - rejected - margin)` of rewards, the scores that a reward model gives both documents, with a
    /// [margin](Pair::margin) of each pair; and `centering (chosen + rejected)^2`. It needs no reference and no beta.
    ///
    /// # Source
    /// Ouyang et al., "Training language models to follow instructions with human feedback" (2022), equation 1; margins: Touvron et al.,
    /// "Llama 2" (2023), equation 2; centering: Eisenstein et al., "Helping or Herding?" (2023), equation 2.
    Reward,
}

impl PreferenceLoss {
    /// Whether it compares with a reference model.
    pub fn needs_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Ipo | Self::Hinge)
    }
}

/// Configuration of a loss of pairs, with the defaults of TRL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PreferenceConfig {
    /// The loss. Default: DPO.
    pub loss: PreferenceLoss,
    /// Its beta, above 0. Default: 0.1.
    pub beta: f64,
    /// Label smoothing of DPO and SimPO, from 0 to below 0.5. Default: 0.
    pub label_smoothing: f64,
    /// The margin that SimPO asks for, 0 or more. Default: 0.5.
    pub simpo_gamma: f64,
    /// How much rewards are drawn to a mean of 0, 0 or more. Default: 0.
    pub centering: f64,
}

impl Default for PreferenceConfig {
    fn default() -> Self {
        Self { loss: PreferenceLoss::Dpo, beta: 0.1, label_smoothing: 0.0, simpo_gamma: 0.5, centering: 0.0 }
    }
}

/// Sums over the places of a pair, of all ranks.
#[derive(Clone, Copy, Default)]
pub(super) struct PairSums {
    /// Of the log-probabilities of each answer.
    pub(super) sums: [f64; 2],
    /// Number of their targets.
    pub(super) counts: [f64; 2],
    /// Of the log-probabilities of the chosen document's targets, and their number.
    pub(super) chosen: (f64, f64),
}

impl PreferenceConfig {
    /// The result of a pair, and the derivatives of its loss by the sums of both answers' log-probabilities.
    pub(super) fn of_pair(&self, pair: &Pair, sums: &PairSums) -> (PairResult, [f64; 2]) {
        let Self { loss, beta, label_smoothing, simpo_gamma, centering } = *self;
        let [chosen, rejected] = [0, 1].map(|which| sums.sums[which]);
        let ratios = [0, 1].map(|which| sums.sums[which] - pair.reference[which]);
        let means = [chosen / sums.counts[0], rejected / sums.counts[1]];
        let is_mean = matches!(loss, PreferenceLoss::Ipo | PreferenceLoss::Orpo | PreferenceLoss::SimPo);
        // By what an answer's sum is divided in the margin.
        let divisors = if is_mean { sums.counts } else { [1.0; 2] };
        let smoothed = |margin: f64| {
            let value = (1.0 - label_smoothing) * softplus(-margin) + label_smoothing * softplus(margin);
            (value, sigmoid(margin) - (1.0 - label_smoothing))
        };
        let margin = |of: [f64; 2]| of[0] / divisors[0] - of[1] / divisors[1];
        // The loss, and its derivatives by the terms of the margin.
        let (value, by) = match loss {
            PreferenceLoss::Dpo => {
                let (value, by) = smoothed(beta * margin(ratios));
                (value, [beta * by; 2])
            }
            PreferenceLoss::Hinge => {
                let rest = 1.0 - beta * margin(ratios);
                (rest.max(0.0), [if rest > 0.0 { -beta } else { 0.0 }; 2])
            }
            PreferenceLoss::Ipo => {
                let gap = margin(ratios) - 0.5 / beta;
                (gap * gap, [2.0 * gap; 2])
            }
            PreferenceLoss::SimPo => {
                let (value, by) = smoothed(beta * margin([chosen, rejected]) - simpo_gamma);
                (value, [beta * by; 2])
            }
            PreferenceLoss::Orpo => {
                // Odds of a probability of 1 would be infinite.
                let means = means.map(|mean| mean.min(-LEAST_REST));
                let odds = means.map(|mean| mean - log_of_rest(mean));
                let log_odds = odds[0] - odds[1];
                // The odds' derivative is 1 / (1 - p).
                let by = means.map(|mean| -beta * sigmoid(-log_odds) / -mean.exp_m1());
                (beta * softplus(-log_odds), by)
            }
            PreferenceLoss::Reward => {
                let (gap, sum) = (chosen - rejected - pair.margin, chosen + rejected);
                let (by, of_sum) = (-sigmoid(-gap), 2.0 * centering * sum);
                (softplus(-gap) + centering * sum * sum, [by + of_sum, by - of_sum])
            }
        };
        let rewards = match loss {
            PreferenceLoss::Reward => [chosen, rejected],
            _ if loss.needs_reference() => ratios.map(|ratio| beta * ratio),
            _ => means.map(|mean| beta * mean),
        };
        let is_orpo = loss == PreferenceLoss::Orpo;
        let cross_entropy = if is_orpo { (-sums.chosen.0, sums.chosen.1) } else { (0.0, 0.0) };
        let (log_probs, lengths) = ([chosen, rejected], sums.counts);
        let result = PairResult { loss: value, log_probs, lengths, rewards, cross_entropy };
        (result, [by[0] / divisors[0], -by[1] / divisors[1]])
    }
}

/// The least that an odds ratio's probabilities are below 1: less than rounding in 32 bits.
const LEAST_REST: f64 = 1e-9;

/// `ln(1 + exp(x))`, without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    let of_less = (-x.abs()).exp();
    if x < 0.0 { of_less / (1.0 + of_less) } else { 1.0 / (1.0 + of_less) }
}

/// `ln(1 - exp(x))` of a number below 0, precise near it.
fn log_of_rest(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The derivatives are those of the loss, by differences.
    #[test]
    fn derivatives_are_those_of_the_loss() {
        let all = [
            PreferenceLoss::Dpo,
            PreferenceLoss::Ipo,
            PreferenceLoss::Hinge,
            PreferenceLoss::Orpo,
            PreferenceLoss::SimPo,
            PreferenceLoss::Reward,
        ];
        let pair = Pair { reference: [-3.5, -7.25], margin: 0.75, ..Pair::default() };
        for (loss, label_smoothing) in all.into_iter().flat_map(|loss| [(loss, 0.0), (loss, 0.2)]) {
            let centering = label_smoothing;
            let config = PreferenceConfig { loss, label_smoothing, centering, ..PreferenceConfig::default() };
            for sums in [[-3.0, -9.0], [-12.0, -1.0], [-0.5, -0.25], [-400.0, -2.0]] {
                let at = |sums| {
                    config.of_pair(&pair, &PairSums { sums, counts: [3.0, 5.0], ..PairSums::default() })
                };
                let (_, slopes) = at(sums);
                for which in 0..2 {
                    let step = |by: f64| {
                        let mut moved = sums;
                        moved[which] += by;
                        at(moved).0.loss
                    };
                    let expected = (step(1e-5) - step(-1e-5)) / 2e-5;
                    assert!(
                        (slopes[which] - expected).abs() < 1e-6,
                        "{config:?} {sums:?} {slopes:?} {expected}"
                    );
                }
            }
        }
    }

    /// Rounding makes log-probabilities of sure answers 0.
    #[test]
    fn sure_answers_have_finite_losses() {
        for loss in [PreferenceLoss::Orpo, PreferenceLoss::SimPo] {
            let config = PreferenceConfig { loss, ..PreferenceConfig::default() };
            for sums in [[0.0, -2.0], [-2.0, 0.0], [0.0, 0.0], [1e-12, -400.0], [-400.0, 0.0]] {
                let of_pair = |pair| {
                    config.of_pair(&pair, &PairSums { sums, counts: [3.0, 5.0], ..PairSums::default() })
                };
                let (found, slopes) = of_pair(Pair::default());
                assert!(found.loss.is_finite(), "{config:?} {sums:?} {}", found.loss);
                let have_signs = slopes[0] <= 0.0 && slopes[1] >= 0.0;
                assert!(
                    have_signs && slopes.iter().all(|slope| slope.is_finite()),
                    "{config:?} {sums:?} {slopes:?}"
                );
            }
        }
    }
}
