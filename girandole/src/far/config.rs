//! How groups average what they have learned.

use serde::{Deserialize, Serialize};

use super::FarPrecision;
use crate::{Error, Result};

/// How groups of a layout with `far` average what they have learned.
///
/// After every [`every`](Self::every) steps of its own, each group sends how far its parameters have moved since the last average.
/// The mean over all targets of all groups is the gradient of an outer step, by SGD with Nesterov momentum, from where the
/// parameters were then; all groups go on from its result. With `every` 1, a learning rate of 1 and no momentum the mean of the
/// groups' parameters is what all go on with: with SGD within the groups, plain data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FarConfig {
    /// Steps from one average to the next. Default: 100.
    pub every: usize,
    /// Learning rate of the outer step. Default: 0.7.
    pub learning_rate: f64,
    /// Its momentum; 0 is none. Default: 0.9.
    pub momentum: f64,
    /// What is sent of each number. Default: all of it.
    pub precision: FarPrecision,
    /// Parts of the parameters that are averaged at steps of their own, evenly within `every`: so many times fewer bytes are sent at once.
    /// Layer n is in part n modulo this number, and a parameter of no numbered layer in one that its name determines. Default: 1.
    pub fragments: usize,
    /// Steps that groups go on with while what they send is on its way; fewer than from one fragment's average to the next one's. The outer
    /// step is then made from where the parameters were when it was sent, and what a group has learned since stays on top of it.
    /// Default: 0, groups wait.
    pub delay: usize,
}

impl Default for FarConfig {
    fn default() -> Self {
        Self {
            every: 100,
            learning_rate: 0.7,
            momentum: 0.9,
            precision: FarPrecision::F32,
            fragments: 1,
            delay: 0,
        }
    }
}

impl FarConfig {
    /// Checks that every field is in its range.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: &str, got: f64, help: &str| Err(Error::invalid(what, got, help));
        if self.every == 0 {
            return refuse("the steps between averages of far groups", 0.0, "give 1 or more");
        }
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return refuse("the outer learning rate", self.learning_rate, "give a finite number above 0");
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return refuse("the outer momentum", self.momentum, "give a number from 0 to below 1");
        }
        if !(1..=self.every).contains(&self.fragments) {
            let help = format!("give 1 to {}, the steps between averages", self.every);
            return refuse("the fragments of far groups", self.fragments as f64, &help);
        }
        if self.delay > self.most_delay() {
            let help = format!("give 0 to {}, fewer than the steps between two averages", self.most_delay());
            return refuse("the delay of far groups", self.delay as f64, &help);
        }
        Ok(())
    }

    /// The longest delay with which one fragment's sums have come before the next one's are sent.
    pub fn most_delay(&self) -> usize {
        (self.every / self.fragments.max(1)).saturating_sub(1)
    }

    /// The fragments that are sent after a step, from 1.
    pub(super) fn sent_after(&self, step: usize) -> Vec<usize> {
        let Self { every, fragments, .. } = *self;
        let offset = |fragment: usize| fragment * every / fragments;
        let is_due = |fragment: &usize| {
            let offset = offset(*fragment);
            step > 0 && step >= offset && (step - offset).is_multiple_of(every)
        };
        (0..fragments).filter(is_due).collect()
    }

    /// The fragments whose sums are applied after a step.
    pub(super) fn applied_after(&self, step: usize) -> Vec<usize> {
        self.sent_after(step.saturating_sub(self.delay))
    }

    /// Whether something is averaged after a step.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        !self.applied_after(step).is_empty()
    }

    /// The fragment of a parameter.
    pub(super) fn fragment_of(&self, name: &str) -> usize {
        let layer = name.split('.').find_map(|part| part.parse::<usize>().ok());
        // FNV-1a.
        let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(16_777_619);
        layer.unwrap_or_else(|| name.bytes().fold(2_166_136_261, hash) as usize) % self.fragments
    }
}
