//! Norm of all gradients, each parameter counted once over all axes.

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use comm::{Communicator, first_of, global_norm};
use training::build::Model;
use training::internal::{clip_by_norm, first_not_finite};
use training::{ScaledModel, grad_norm};

use super::{Kind, Parallel};
use crate::{Error, Result};

impl<M: Model> Parallel<M> {
    /// Returns the 2-norm of the gradients of all parameters together, over all ranks: the same bits on each. Call on
    /// every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients; an all-gather of 8 bytes along each axis on which ranks have different parameters.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        let counted: Vec<Var> = self.named_vars().into_iter().map(|(_, var)| var).collect();
        let counted: Vec<Var> = counted.into_iter().filter(|var| self.counted.contains(&var.id())).collect();
        Ok(global_norm(self.partition_groups()?, grad_norm(grads, &counted)?)?)
    }

    /// Scales all gradients so that their norm is at most `max_norm`, like PyTorch's `clip_grad_norm_` with
    /// `error_if_nonfinite=True`. Returns the norm before scaling. Call on every rank.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] if a gradient holds a NaN or an infinity on any rank; a `max_norm` that is
    /// negative or NaN; failures of communication. Nothing is changed then.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        self.check_finite(grads, norm, 0)?;
        let vars: Vec<Var> = self.named_vars().into_iter().map(|(_, var)| var).collect();
        clip_by_norm(grads, &vars, norm, max_norm)?;
        Ok(norm)
    }

    /// Fails on every rank if the norm is not finite, and names a parameter. Call on every rank.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with this step; failures of communication.
    pub fn check_finite(&self, grads: &GradStore, norm: f64, step: u64) -> Result<()> {
        if norm.is_finite() {
            return Ok(());
        }
        let (names, vars): (Vec<String>, Vec<Var>) = self.named_vars().into_iter().unzip();
        let own = first_not_finite(grads, &vars)?.map(|place| names[place].clone());
        // `None` if only the sum of all squares overflows.
        let first = first_of(self.partition_groups()?, own)?;
        let parameter = first.map_or_else(|| "all parameters together".into(), |(_, name)| name);
        Err(Error::NotFinite { step, parameter, norm })
    }

    /// Returns the groups along the axes on which ranks have different parameters.
    pub(super) fn partition_groups(&self) -> Result<Vec<&dyn Communicator>> {
        let axes = ["shard", "tp", "pp"].into_iter();
        Ok(axes.map(|axis| Ok(&**self.mesh.axis(axis)?)).collect::<comm::Result<_>>()?)
    }

    /// Returns the variables whose gradients this rank contributes to the norm: of parameters tied across stages only
    /// the first one, and of parameters that all ranks of `tp` have only the first rank's.
    pub(super) fn find_counted(&self) -> Result<HashSet<TensorId>> {
        let is_first = self.mesh.axis("tp")?.rank() == 0;
        let tied = self.ties_of();
        let counts = |name: &str| {
            let first_of_tied = !matches!(self.model, Kind::Stages(_)) || !tied.contains_key(name);
            first_of_tied && (is_first || self.shards.is_divided(name))
        };
        let vars = self.named_vars().into_iter().filter(|(name, _)| counts(name));
        Ok(vars.map(|(_, var)| var.id()).collect())
    }

    /// Returns, for each parameter that is tied to an earlier one, the name of the first one.
    pub(crate) fn ties_of(&self) -> HashMap<String, String> {
        tie_roots(&self.ties)
    }
}

impl<M: Model> ScaledModel for Parallel<M> {
    type Error = Error;

    fn scaled_vars(&self) -> Vec<Var> {
        self.named_vars().into_iter().map(|(_, var)| var).collect()
    }

    fn norm(&self, grads: &GradStore) -> Result<f64> {
        self.grad_norm(grads)
    }
}

/// Maps each tied name to the first name of its set.
pub(super) fn tie_roots(ties: &[(String, String)]) -> HashMap<String, String> {
    let mut roots: HashMap<String, String> = HashMap::new();
    for (first, second) in ties {
        let root = roots.get(first).unwrap_or(first).clone();
        if root != *second {
            roots.insert(second.clone(), root);
        }
    }
    roots
}
