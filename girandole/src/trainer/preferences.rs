//! Training data of pairs of answers.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Result, Tensor, bail};
use models::tokens::{IGNORE_INDEX, Row, Rows};
use ops::{Pair, PreferenceConfig, PreferenceLoss, Preferences};

use super::Data;
use crate::{Batch, Error};

/// Names of tensors.
const LOG_PROBS: &str = "reference_log_probs";
const PAIRS: &str = "reference_pairs";

/// Log-probabilities of both answers of each pair in a reference model, by row: what [`pair_log_probs`](super::pair_log_probs) finds.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference(Vec<Vec<[f64; 2]>>);

impl From<Vec<Vec<[f64; 2]>>> for Reference {
    fn from(rows: Vec<Vec<[f64; 2]>>) -> Self {
        Self(rows)
    }
}

impl Reference {
    /// Whether it has the pairs of the first `rows` rows.
    pub fn covers(&self, rows: usize) -> bool {
        self.0.iter().take(rows).all(|pairs| !pairs.is_empty())
    }

    /// Adds it to the tensors of an observer's state, which checkpoints keep and new ranks get, under names with this prefix.
    ///
    /// # Errors
    /// Those of candle.
    pub fn add_to(&self, prefix: &str, tensors: &mut HashMap<String, Tensor>) -> Result<()> {
        let numbers: Vec<f64> = self.0.iter().flatten().flatten().copied().collect();
        let counts: Vec<u32> = self.0.iter().map(|row| row.len() as u32).collect();
        let pairs = numbers.len() / 2;
        tensors.insert(format!("{prefix}{LOG_PROBS}"), Tensor::from_vec(numbers, (pairs, 2), &Device::Cpu)?);
        tensors.insert(format!("{prefix}{PAIRS}"), Tensor::new(counts, &Device::Cpu)?);
        Ok(())
    }

    /// Takes it out of these tensors; `None` if it is not among them.
    ///
    /// # Errors
    /// Those of candle.
    pub fn take_from(prefix: &str, tensors: &mut HashMap<String, Tensor>) -> Result<Option<Self>> {
        let [numbers, counts] = [LOG_PROBS, PAIRS].map(|name| tensors.remove(&format!("{prefix}{name}")));
        let (Some(numbers), Some(counts)) = (numbers, counts) else { return Ok(None) };
        let numbers = numbers.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        let mut pairs = numbers.into_iter().map(|pair| [pair[0], pair[1]]);
        let rows = counts.to_vec1::<u32>()?.into_iter();
        Ok(Some(Self(rows.map(|count| pairs.by_ref().take(count as usize).collect()).collect())))
    }
}

/// Rows of pairs of answers ([`RowsConfig::pairs`](models::tokens::RowsConfig::pairs)) with the loss that they are trained with. Where that
/// compares with a reference, its log-probabilities are set before training: by [`set_reference`](Self::set_reference), or with all of 0
/// while they are computed. Clones share the reference.
#[derive(Debug, Clone)]
pub struct PreferenceData {
    rows: Arc<Rows>,
    config: PreferenceConfig,
    reference: Arc<OnceLock<Reference>>,
}

impl PreferenceData {
    /// Rows of pairs.
    ///
    /// # Errors
    /// Numbers that no loss has; rows that are not of pairs; rows of documents that a head scores, unless by
    /// [`Reward`](PreferenceLoss::Reward) for a head with one label.
    pub fn new(rows: Arc<Rows>, config: PreferenceConfig) -> crate::Result<Self> {
        if !rows.has_pairs() {
            let got = format!("{} rows that are not of pairs", rows.len());
            return Err(Error::invalid("the data of a loss of pairs", got, "set RowsConfig::pairs"));
        }
        let scores = rows.labels().map(|labels| labels.names.len());
        if scores != (config.loss == PreferenceLoss::Reward).then_some(1) {
            let got = match scores {
                None => "that of rewards, of rows without scores".to_string(),
                Some(scores) => format!("{:?}, of rows that a head gives {scores} scores", config.loss),
            };
            let help =
                "a reward model has a head with one label, and is trained by PreferenceLoss::Reward alone";
            return Err(Error::invalid("the loss of pairs", got, help));
        }
        Preferences::new(config, Vec::new()).map_err(candle_core::Error::from)?;
        Ok(Self { rows, config, reference: Arc::default() })
    }

    /// The rows.
    pub fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    /// The configuration of the loss.
    pub fn config(&self) -> &PreferenceConfig {
        &self.config
    }

    /// The reference, if it is set.
    pub fn reference(&self) -> Option<&Reference> {
        self.reference.get()
    }

    /// Sets the reference, once.
    ///
    /// # Errors
    /// A reference of other rows.
    pub fn set_reference(&self, reference: Reference) -> crate::Result<()> {
        let (got, rows) = (reference.0.len(), self.rows.len());
        if got != rows {
            let help = format!("there are {rows} rows: compute it of the same");
            return Err(Error::invalid("the reference of pairs", format!("that of {got} rows"), help));
        }
        // A later one is the same, of the same checkpoint.
        self.reference.get_or_init(|| reference);
        Ok(())
    }

    /// The same rows with log-probabilities of 0, to compute those of a reference with.
    #[must_use]
    pub fn without_reference(&self) -> Self {
        let zeros = OnceLock::from(Reference(Vec::new()));
        Self { reference: Arc::new(zeros), ..self.clone() }
    }

    fn pairs_of(&self, index: usize, row: &mut Row) -> Result<Vec<Pair>> {
        let known = match (self.config.loss.needs_reference(), self.reference.get()) {
            (false, _) => None,
            (true, Some(Reference(rows))) => rows.get(index),
            (true, None) => {
                bail!("the log-probabilities of the reference are not set: call set_reference first")
            }
        };
        let (mut pairs, mut begin) = (Vec::new(), 0);
        for (at, documents) in row.documents.chunks(2).enumerate() {
            let (mut answers, mut margin) = ([0; 2], 0.0);
            for (which, len) in documents.iter().map(|len| *len as usize).enumerate() {
                let own = begin..begin + len;
                // A document that is scored has one target, whatever it is.
                for (place, numbers) in
                    row.scored.iter().filter(|(place, _)| own.contains(&(*place as usize)))
                {
                    row.targets[*place as usize] = 0;
                    margin = f64::from(numbers[0]);
                }
                let answer = row.targets[own.clone()].iter().position(|target| *target != IGNORE_INDEX);
                answers[which] = answer.unwrap_or(len) as u32;
                if which == 0 && self.config.loss == PreferenceLoss::Orpo {
                    for place in begin..own.end - 1 {
                        row.targets[place] = i64::from(row.tokens[place + 1]);
                    }
                }
                begin += len;
            }
            let reference = known.map_or(Some([0.0; 2]), |known| known.get(at).copied());
            let Some(reference) = reference else { bail!("the reference has no pair {at} of row {index}") };
            pairs.push(Pair { answers, reference, margin });
        }
        Ok(pairs)
    }
}

impl Data for PreferenceData {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let (mut read, mut pairs) = (Vec::new(), Vec::new());
        for index in rows {
            let mut row = self.rows.get(*index).map_err(comm::carry)?;
            pairs.push(self.pairs_of(*index, &mut row)?);
            read.push(row);
        }
        let preferences = Some(Preferences::new(self.config, pairs)?);
        Ok(Batch { preferences, ..super::data::batch_of(read, self.rows.row_len(), device)? })
    }

    fn fingerprint(&self) -> String {
        self.rows.fingerprint()
    }
}
