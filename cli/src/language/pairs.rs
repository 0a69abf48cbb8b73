//! Pairs of answers in training: their data, and the reference that they are compared with.

use std::sync::Arc;

use girandole::Parallel;
use girandole::trainer::{Data, ObserverState, PreferenceData, Reference, pair_log_probs};
use models::CausalLm;
use models::tokens::Rows;

use super::job::Job;
use crate::error::Result;

/// Prefix of the names of the evaluation's tensors.
const EVALUATION: &str = "evaluation_";

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

    /// All pairs, each with the prefix of its tensors' names.
    fn all(&self) -> impl Iterator<Item = (&'static str, &PreferenceData)> {
        let named = [("", &self.pairs), (EVALUATION, &self.evaluation_pairs)];
        named.into_iter().filter_map(|(name, pairs)| Some((name, pairs.as_ref()?)))
    }

    /// Number of rows whose pairs are compared with the reference.
    fn rows_of(&self, name: &str) -> usize {
        if name == EVALUATION { self.evaluate_rows } else { usize::MAX }
    }

    /// Adds the reference to what a checkpoint keeps.
    pub(super) fn add_to(&self, state: &mut ObserverState) -> girandole::Result<()> {
        for (name, pairs) in self.all() {
            if let Some(reference) = pairs.reference() {
                reference.add_to(name, &mut state.tensors)?;
            }
        }
        Ok(())
    }

    /// Takes the reference out of what a checkpoint keeps, if it has it.
    pub(super) fn take_from(&self, state: &mut ObserverState) -> girandole::Result<()> {
        for (name, pairs) in self.all() {
            let found = Reference::take_from(name, &mut state.tensors)?;
            // The run of a checkpoint may have evaluated fewer rows.
            if let Some(reference) = found.filter(|reference| reference.covers(self.rows_of(name))) {
                pairs.set_reference(reference)?;
            }
        }
        Ok(())
    }

    /// Whether pairs are not compared with a reference yet.
    pub(super) fn lacks_reference(&self) -> bool {
        self.all().any(|(_, pairs)| pairs.reference().is_none())
    }

    /// Computes the log-probabilities that it lacks, of a reference. Every rank must call it.
    pub(super) fn compute_reference(
        &self,
        reference: &mut Parallel<CausalLm>,
        batch_size: usize,
    ) -> girandole::Result<()> {
        for (name, pairs) in self.all().filter(|(_, pairs)| pairs.reference().is_none()) {
            let (data, rows) = (pairs.without_reference(), self.rows_of(name));
            pairs.set_reference(pair_log_probs(reference, &data, rows, batch_size)?.into())?;
        }
        Ok(())
    }
}
