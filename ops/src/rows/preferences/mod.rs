//! Losses of pairs of answers, of which one is preferred to the other.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Tensor};

use super::{Documents, RowContext};

mod formulas;

use crate::lock::lock;
use crate::{Error, tape};
use formulas::PairSums;
pub use formulas::{PreferenceConfig, PreferenceLoss};

const NAME: &str = "preference_loss";

/// A pair of answers: two documents of a row that follow each other, the chosen one first.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pair {
    /// In each document, the position of the first place whose target is a token of the answer.
    pub answers: [u32; 2],
    /// The log-probabilities of both answers in the reference model. Default: 0.
    pub reference: [f64; 2],
    /// By how much the chosen document's reward is to exceed that of the rejected one, with [`PreferenceLoss::Reward`]. Default: 0.
    pub margin: f64,
}

/// What was found of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PairResult {
    /// The loss, without ORPO's cross-entropy.
    pub loss: f64,
    /// The log-probabilities of both answers; of a reward model the rewards.
    pub log_probs: [f64; 2],
    /// Their numbers of tokens.
    pub lengths: [f64; 2],
    /// Beta times the ratios; with ORPO and SimPO, times the mean log-probabilities; of a reward model the rewards themselves.
    pub rewards: [f64; 2],
    /// With ORPO: the sum of cross-entropies of the chosen document's targets, and their number.
    pub cross_entropy: (f64, f64),
}

/// The pairs of a batch's rows and their loss: a part of the [`RowContext`]. All documents of the rows are those of pairs.
///
/// A model computes [`loss`](Self::loss) in place of the mean over targets; each pair's result is then recorded. Clones and parts share
/// the record.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::{Documents, Pair, PreferenceConfig, Preferences, RowContext};
///
/// // A row of one pair, whose answers have two tokens and one.
/// let pair = Pair { answers: [1, 1], reference: [-3.0, -1.0], ..Pair::default() };
/// let preferences = Preferences::new(PreferenceConfig::default(), vec![vec![pair]])?;
/// let documents = Some(Documents::new([vec![4, 3]])?);
/// let context = RowContext { documents, preferences: Some(preferences.clone()), ..RowContext::default() };
/// let log_probs = Tensor::new(&[[0f64, -1., -1., 0., 0., -1., 0.]], &Device::Cpu)?;
/// let targets = Tensor::new(&[[-100i64, 5, 6, -100, -100, 7, -100]], &Device::Cpu)?;
/// let loss = context.scope(|| preferences.loss(&log_probs, &targets, -100))?;
/// // The ratios are 1 and 0, so that the margin of rewards is 0.1.
/// assert!((loss.to_scalar::<f64>()? - (1.0 + (-0.1f64).exp()).ln()).abs() < 1e-12);
/// assert_eq!(preferences.results()[0].log_probs, [-2.0, -1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Preferences {
    config: PreferenceConfig,
    rows: Arc<[Vec<Pair>]>,
    cross_entropy: f64,
    results: Arc<Mutex<Vec<PairResult>>>,
}

impl Preferences {
    /// Pairs of rows.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for numbers that no loss has.
    pub fn new(config: PreferenceConfig, rows: Vec<Vec<Pair>>) -> crate::Result<Self> {
        let refuse =
            |field, got, help| Err(Error::InvalidConfig { of: "PreferenceConfig", field, got, help });
        if !(config.beta > 0.0 && config.beta.is_finite()) {
            return refuse("beta", config.beta, "it must be a number above 0");
        }
        if !(0.0..0.5).contains(&config.label_smoothing) {
            return refuse("label_smoothing", config.label_smoothing, "it must be from 0 to below 0.5");
        }
        if !(config.simpo_gamma >= 0.0 && config.simpo_gamma.is_finite()) {
            return refuse("simpo_gamma", config.simpo_gamma, "it must be a number, 0 or more");
        }
        if !(config.centering >= 0.0 && config.centering.is_finite()) {
            return refuse("centering", config.centering, "it must be a number, 0 or more");
        }
        Ok(Self { config, rows: rows.into(), cross_entropy: 1.0, results: Arc::default() })
    }

    /// The configuration.
    pub fn config(&self) -> &PreferenceConfig {
        &self.config
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Number of pairs of the first `rows` rows.
    pub fn pairs(&self, rows: usize) -> usize {
        self.rows.iter().take(rows).map(Vec::len).sum()
    }

    /// Number of the cross-entropies of ORPO: of all tokens of chosen documents but their first; 0 with other losses.
    pub fn cross_entropies(&self, documents: &Documents) -> usize {
        let of_row = |lengths: &[u32]| lengths.iter().step_by(2).map(|len| *len as usize - 1).sum::<usize>();
        match self.config.loss {
            PreferenceLoss::Orpo => documents.lengths().map(of_row).sum(),
            _ => 0,
        }
    }

    /// Those of a range of the rows, with the same record.
    ///
    /// # Panics
    /// If the range exceeds the rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        Self { rows: self.rows[rows].into(), ..self.clone() }
    }

    /// The same pairs with a record of their own, and with this factor of the sum of ORPO's cross-entropies: the number of pairs of a step
    /// divided by that of its cross-entropies, of all ranks, makes their mean a part of the mean over pairs. By default 1.
    #[must_use]
    pub fn renewed(&self, cross_entropy: Option<f64>) -> Self {
        let cross_entropy = cross_entropy.unwrap_or(self.cross_entropy);
        Self { results: Arc::default(), cross_entropy, ..self.clone() }
    }

    /// The results so far, in the order of rows and pairs.
    pub fn results(&self) -> Vec<PairResult> {
        self.record().clone()
    }

    /// The mean loss over the pairs of all rows, and a record of each. Call it in the scope of the rows' context. Rows that are divided
    /// over ranks have the same loss on each of them; its gradient is that of the sum over these ranks.
    ///
    /// # Shapes
    /// Both `(rows, places)`: log-probabilities of targets, and targets, which are `ignored` where there is none. The loss has no
    /// dimensions.
    ///
    /// # Cost
    /// With divided rows, six numbers a pair are sent to each other rank; nothing in backward.
    ///
    /// # Errors
    /// Documents that are not those of the pairs, answers without a target, shapes that do not fit; failures of communication.
    pub fn loss(&self, log_probs: &Tensor, targets: &Tensor, ignored: i64) -> candle_core::Result<Tensor> {
        let (context, dims) = (RowContext::current(), log_probs.dims2()?);
        let places = Places::new(self, &context, dims.into(), targets, ignored)?;
        let values = log_probs.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?;
        let sums = places.sums(&values.to_vec1()?, &context)?;
        let pairs: Vec<Pair> = self.rows.iter().flatten().copied().collect();
        let chosen: f64 = sums.iter().map(|sums| sums.chosen.1).sum();
        let needed = context.documents.as_ref().map_or(0, |documents| self.cross_entropies(documents)) as f64;
        if needed > 0.0 && chosen != needed {
            let problem =
                format!("{chosen} targets of chosen documents: ORPO needs all {needed}, of prompts too");
            return Err(Error::UnfitDocuments { operation: NAME, problem }.into());
        }
        let (mut total, mut slopes) = (0.0, Vec::with_capacity(pairs.len()));
        for (at, (pair, sums)) in pairs.iter().zip(&sums).enumerate() {
            if sums.counts.contains(&0.0) {
                let problem =
                    format!("pair {at} has an answer without a target: each needs a token at least");
                return Err(Error::UnfitDocuments { operation: NAME, problem }.into());
            }
            let (result, slope) = self.config.of_pair(pair, sums);
            total += result.loss + self.cross_entropy * result.cross_entropy.0;
            slopes.push(slope);
            self.record().push(result);
        }
        let share = 1.0 / pairs.len().max(1) as f64;
        let ranks = context.divided.as_ref().map_or(1, crate::DividedRows::ranks);
        let gradient = places.gradient(&slopes, share * ranks as f64, self.of_cross_entropy());
        let gradient = Tensor::from_vec(gradient, dims, &Device::Cpu)?
            .to_dtype(log_probs.dtype())?
            .to_device(log_probs.device())?;
        let loss = Tensor::new(total * share, &Device::Cpu)?.to_dtype(log_probs.dtype())?;
        tape::explicit_op1(NAME, [log_probs], loss.to_device(log_probs.device())?, move |_, of_loss| {
            Ok([Some(gradient.broadcast_mul(&of_loss.detach())?)])
        })
    }

    /// Factor of a cross-entropy in the sum of losses.
    fn of_cross_entropy(&self) -> f64 {
        if self.config.loss == PreferenceLoss::Orpo { self.cross_entropy } else { 0.0 }
    }

    fn record(&self) -> MutexGuard<'_, Vec<PairResult>> {
        lock(&self.results)
    }
}

/// Which pair and answer each place is of.
struct Places {
    /// Pair, which of its answers, and whether the target is one of the answer's tokens; `None` without a target.
    of: Vec<Option<(usize, usize, bool)>>,
    pairs: usize,
}

impl Places {
    fn new(
        preferences: &Preferences,
        context: &RowContext,
        dims: [usize; 2],
        targets: &Tensor,
        ignored: i64,
    ) -> candle_core::Result<Self> {
        let (rows, pairs) = (&preferences.rows, preferences.pairs(usize::MAX));
        let unfit = |problem| Error::UnfitDocuments { operation: NAME, problem };
        if targets.dims() != dims || rows.len() != dims[0] {
            let problem = format!(
                "targets of shape {:?} and pairs of {} rows: {dims:?} are needed",
                targets.dims(),
                rows.len()
            );
            return Err(unfit(problem).into());
        }
        let documents = context.document_count(dims[0]);
        if documents != 2 * pairs {
            return Err(unfit(format!("{documents} documents of {pairs} pairs: give two for each")).into());
        }
        let answers: Vec<[u32; 2]> = rows.iter().flatten().map(|pair| pair.answers).collect();
        let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let places = context.document_places(NAME, dims)?;
        let of = places.iter().zip(targets).map(|(place, target)| {
            let place = (*place)?;
            let (pair, which) = (place.document / 2, place.document % 2);
            let is_answer = place.position >= answers[pair][which] as usize;
            (target != ignored).then_some((pair, which, is_answer))
        });
        Ok(Self { of: of.collect(), pairs })
    }

    fn sums(&self, log_probs: &[f64], context: &RowContext) -> candle_core::Result<Vec<PairSums>> {
        let mut sums = vec![PairSums::default(); self.pairs];
        for (place, log_prob) in self.of.iter().zip(log_probs) {
            let Some((pair, which, is_answer)) = *place else { continue };
            let own = &mut sums[pair];
            if is_answer {
                own.sums[which] += log_prob;
                own.counts[which] += 1.0;
            }
            if which == 0 {
                own.chosen = (own.chosen.0 + log_prob, own.chosen.1 + 1.0);
            }
        }
        let Some(divided) = &context.divided else { return Ok(sums) };
        let numbers: Vec<f64> = sums
            .iter()
            .flat_map(|own| {
                [own.sums[0], own.sums[1], own.counts[0], own.counts[1], own.chosen.0, own.chosen.1]
            })
            .collect();
        let numbers = divided.sum_of_ranks(&Tensor::from_vec(numbers, 6 * self.pairs, &Device::Cpu)?)?;
        let of_pair =
            |of: &[f64]| PairSums { sums: [of[0], of[1]], counts: [of[2], of[3]], chosen: (of[4], of[5]) };
        Ok(numbers.to_vec1::<f64>()?.chunks(6).map(of_pair).collect())
    }

    /// The gradient of each place's log-probability, from the derivatives by the sums of each pair.
    fn gradient(&self, slopes: &[[f64; 2]], factor: f64, of_cross_entropy: f64) -> Vec<f64> {
        let of = |place: &Option<(usize, usize, bool)>| match *place {
            None => 0.0,
            Some((pair, which, is_answer)) => {
                let of_answer = if is_answer { slopes[pair][which] } else { 0.0 };
                let of_chosen = if which == 0 { of_cross_entropy } else { 0.0 };
                factor * (of_answer - of_chosen)
            }
        };
        self.of.iter().map(of).collect()
    }
}

impl PartialEq for Preferences {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.rows == other.rows
    }
}

impl Eq for Preferences {}

impl fmt::Debug for Preferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Preferences({:?}, {} pairs of {} rows)", self.config, self.pairs(usize::MAX), self.rows())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_loss_has_is_refused() {
        let of = |config| Preferences::new(config, Vec::new()).map(drop).map_err(|error| error.to_string());
        let default = PreferenceConfig::default;
        for (config, said) in [
            (PreferenceConfig { beta: 0.0, ..default() }, "beta"),
            (PreferenceConfig { beta: f64::NAN, ..default() }, "beta"),
            (PreferenceConfig { label_smoothing: 0.5, ..default() }, "label_smoothing"),
            (PreferenceConfig { simpo_gamma: -1.0, ..default() }, "simpo_gamma"),
            (PreferenceConfig { centering: -1.0, ..default() }, "centering"),
        ] {
            assert!(of(config).unwrap_err().contains(said), "{config:?}");
        }
        assert_eq!(of(default()), Ok(()));
    }
}
