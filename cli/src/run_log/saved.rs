//! A run's log in checkpoints, so that the report of a resumed run covers all of it.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use girandole::trainer::ObserverState;
use report::Evaluation;
use serde::{Deserialize, Serialize};

use super::{LogState, RunLog};
use crate::error::{Error, Result};

const LOSSES: &str = "losses";
/// Prefix of the names of further quantities of the steps; their place follows, and their name.
const QUANTITY: &str = "quantity.";

/// The part of the state that is not stored as tensors.
#[derive(Serialize, Deserialize)]
struct SavedLog {
    log: LogState,
    evaluations: Vec<Evaluation>,
}

impl RunLog<'_> {
    /// Returns what a checkpoint stores.
    ///
    /// # Errors
    /// Losses that fit into no memory.
    pub(crate) fn saved(&self) -> girandole::Result<ObserverState> {
        let (state, losses) = self.state();
        // JSON cannot represent non-finite numbers.
        let mut evaluations = self.evaluations.clone();
        evaluations.retain(|evaluation| evaluation.loss.is_finite());
        for evaluation in &mut evaluations {
            evaluation.measures.retain(|_, measure| measure.is_finite());
        }
        let kept = SavedLog { log: state, evaluations };
        let values = serde_json::to_value(kept).map_err(comm::carry)?;
        let mut tensors = HashMap::new();
        if !losses.is_empty() {
            tensors.insert(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?);
            for (place, (name, values)) in self.curves.quantities().enumerate() {
                tensors.insert(format!("{QUANTITY}{place}.{name}"), Tensor::new(values, &Device::Cpu)?);
            }
        }
        Ok(ObserverState { values, tensors })
    }

    /// Restores what [`saved`](Self::saved) returned, after `steps` steps.
    ///
    /// # Errors
    /// The state of something else.
    pub(crate) fn restore(&mut self, steps: usize, state: ObserverState) -> Result<()> {
        let ObserverState { values, tensors } = state;
        if values.is_null() {
            self.begin_at(steps);
            return Ok(());
        }
        let kept: SavedLog = serde_json::from_value(values).map_err(|error| {
            let problem = format!("what it keeps of the run's losses cannot be read: {error}");
            Error::Checkpoint { problem }
        })?;
        let losses = tensors.get(LOSSES).map(Tensor::to_vec1::<f32>).transpose()?;
        self.resume(steps, kept.log, losses.unwrap_or_default());
        let mut quantities = Vec::new();
        for (name, values) in &tensors {
            if let Some((place, name)) = name.strip_prefix(QUANTITY).and_then(|name| name.split_once('.')) {
                quantities.push((place, name.to_string(), values.to_vec1::<f32>()?));
            }
        }
        quantities.sort_by_key(|(place, ..)| place.parse::<usize>().unwrap_or(usize::MAX));
        self.curves.resume_quantities(quantities.into_iter().map(|(_, name, values)| (name, values)));
        self.evaluations = kept.evaluations;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::LogConfig;
    use super::*;

    /// Such as the correlation with targets that are all equal.
    #[test]
    fn measures_that_are_no_numbers_are_left_out() {
        let log = || RunLog::new(&LogConfig { keep: true, muted: true, ..LogConfig::default() }, None);
        let evaluation = |measures: &[(&str, f64)]| {
            let measures = measures.iter().map(|(name, measure)| (name.to_string(), *measure)).collect();
            Evaluation { step: 1, loss: 2.0, measures, ..Evaluation::default() }
        };
        let (mut before, mut after) = (log(), log());
        before.evaluations = vec![
            evaluation(&[("pearson", f64::NAN), ("mse", 0.5)]),
            Evaluation { loss: f64::NAN, ..evaluation(&[]) },
        ];
        after.restore(1, before.saved().unwrap()).unwrap();
        assert_eq!(after.evaluations, [evaluation(&[("mse", 0.5)])]);
    }
}
