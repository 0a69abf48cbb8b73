//! Pairs of answers in training: their data, and the reference that they are compared with.

use std::sync::Arc;

use girandole::Parallel;
use girandole::trainer::{Data, ObserverState, PreferenceData, Reference, pair_log_probs};
use models::CausalLm;
use models::tokens::{Packing, Rows, TooLong};

use super::job::Job;
use super::options::TrainOptions;
use crate::error::{Error, Result};

/// Prefix of the names of the evaluation's tensors.
const EVALUATION: &str = "evaluation_";
/// Number of characters of a fingerprint in names.
const FINGERPRINT: usize = 12;

/// Refuses options of rows that pairs have no use for.
pub(super) fn check_options(options: &TrainOptions) -> Result<()> {
    let refuse = |option, got: String, help: &str| Err(Error::Option { option, got, help: help.into() });
    if let Some(field) = &options.field {
        let help = "pairs are the fields `chosen` and `rejected`: leave it out";
        return refuse("--field", field.clone(), help);
    }
    if let Some(packing) = options.packing.filter(|packing| *packing != Packing::Whole) {
        return refuse("--packing", packing.to_string(), "rows have whole pairs: leave it out");
    }
    match options.too_long {
        Some(too_long @ (TooLong::Cut | TooLong::Truncate)) => {
            let help = "a cut pair cannot be compared: give drop or error, or a greater --length";
            refuse("--too-long", too_long.to_string(), help)
        }
        _ => Ok(()),
    }
}

/// The rows that a run trains and evaluates on, which may be pairs. Clones share the reference.
#[derive(Clone)]
pub(super) struct RunData {
    pub(super) rows: Arc<Rows>,
    evaluation: Option<Arc<Rows>>,
    pairs: Option<PreferenceData>,
    evaluation_pairs: Option<PreferenceData>,
    /// Number of rows of an evaluation.
    evaluate_rows: usize,
}

impl RunData {
    pub(super) fn new(job: &impl Job, rows: Rows, evaluation: Option<Rows>) -> Result<Self> {
        let (rows, evaluation) = (Arc::new(rows), evaluation.map(Arc::new));
        let of = |rows: &Arc<Rows>| {
            job.preferences().map(|config| PreferenceData::new(rows.clone(), config)).transpose()
        };
        let evaluation_pairs = evaluation.as_ref().map(of).transpose()?.flatten();
        let evaluate_rows = job.options().evaluate_rows;
        Ok(Self { pairs: of(&rows)?, evaluation_pairs, rows, evaluation, evaluate_rows })
    }

    /// The data to train on.
    pub(super) fn training(&self) -> Arc<dyn Data> {
        match &self.pairs {
            Some(pairs) => Arc::new(pairs.clone()),
            None => self.rows.clone(),
        }
    }

    /// The data to evaluate on.
    pub(super) fn evaluation(&self) -> Option<&dyn Data> {
        match &self.evaluation_pairs {
            Some(pairs) => Some(pairs),
            None => self.evaluation.as_ref().map(|rows| &**rows as &dyn Data),
        }
    }

    /// All pairs, each with the prefix of its tensors' names, and the number of rows that are compared with the reference.
    fn all(&self) -> impl Iterator<Item = (String, usize, &PreferenceData)> {
        let training = self.pairs.iter().map(|pairs| (String::new(), usize::MAX, pairs));
        // A run may go on with another file to evaluate on, whose reference is another.
        let evaluation = self.evaluation_pairs.iter().map(|pairs| {
            let rows: String = pairs.fingerprint().chars().take(FINGERPRINT).collect();
            (format!("{EVALUATION}{rows}_"), self.evaluate_rows, pairs)
        });
        training.chain(evaluation)
    }

    /// Adds the reference to what a checkpoint keeps.
    pub(super) fn add_to(&self, state: &mut ObserverState) -> girandole::Result<()> {
        for (name, _, pairs) in self.all() {
            if let Some(reference) = pairs.reference() {
                reference.add_to(&name, &mut state.tensors)?;
            }
        }
        Ok(())
    }

    /// Takes the reference out of what a checkpoint keeps, if it has it.
    pub(super) fn take_from(&self, state: &mut ObserverState) -> girandole::Result<()> {
        for (name, rows, pairs) in self.all() {
            let found = Reference::take_from(&name, &mut state.tensors)?;
            // The run of a checkpoint may have evaluated fewer rows.
            if let Some(reference) = found.filter(|reference| reference.covers(rows)) {
                pairs.set_reference(reference)?;
            }
        }
        Ok(())
    }

    /// Whether pairs are not compared with a reference yet.
    pub(super) fn lacks_reference(&self) -> bool {
        self.all().any(|(.., pairs)| pairs.reference().is_none())
    }

    /// Computes the log-probabilities that it lacks, of a reference. Every rank must call it.
    pub(super) fn compute_reference(
        &self,
        reference: &mut Parallel<CausalLm>,
        batch_size: usize,
    ) -> girandole::Result<()> {
        for (_, rows, pairs) in self.all().filter(|(.., pairs)| pairs.reference().is_none()) {
            let data = pairs.without_reference();
            pairs.set_reference(pair_log_probs(reference, &data, rows, batch_size)?.into())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use models::Tokenizer;
    use models::tokens::DataConfig;

    use super::*;

    fn rows(folder: &Path, chosen: &str) -> Arc<Rows> {
        let path = folder.join(format!("{chosen}.jsonl"));
        std::fs::write(&path, format!(r#"{{"prompt": "a ", "chosen": "{chosen}", "rejected": "no"}}"#))
            .unwrap();
        let tokenizer = Tokenizer::bytes().unwrap();
        let config = DataConfig {
            tokenizer: Some(&tokenizer),
            pairs: true,
            length: Some(32),
            ..DataConfig::default()
        };
        Arc::new(models::tokens::Data::open(&[path.display().to_string().parse().unwrap()], &config).unwrap())
    }

    #[test]
    fn another_evaluation_has_another_reference() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other, training] = ["b", "c", "d"].map(|chosen| rows(folder.path(), chosen));
        let of = |evaluation: &Arc<Rows>| {
            let pairs = |rows: &Arc<Rows>| PreferenceData::new(rows.clone(), Default::default()).unwrap();
            RunData {
                rows: training.clone(),
                evaluation: Some(evaluation.clone()),
                pairs: Some(pairs(&training)),
                evaluation_pairs: Some(pairs(evaluation)),
                evaluate_rows: 1,
            }
        };
        let before = of(&one);
        for (.., pairs) in before.all() {
            pairs.set_reference(vec![vec![[-1.0, -2.0]]].into()).unwrap();
        }
        for (evaluation, is_kept) in [(&one, true), (&other, false)] {
            let (after, mut state) = (of(evaluation), ObserverState::default());
            before.add_to(&mut state).unwrap();
            after.take_from(&mut state).unwrap();
            let known: Vec<bool> = after.all().map(|(.., pairs)| pairs.reference().is_some()).collect();
            assert_eq!(known, [true, is_kept]);
        }
    }
}
