//! Global gradient norm, gradient clipping, and the check that replicated parameters are equal.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use comm::{Communicator, first_of, global_norm, parameter_difference};
use training::grad_norm;
use training::internal::{clip_by_norm, first_not_finite};

use crate::{Error, Pipeline, Result};

impl Pipeline {
    /// Returns the 2-norm of the gradients of all stages, bitwise the same on every rank. Each parameter is counted once:
    /// tied ones on the rank that has the first, and those that every tensor-parallel rank holds whole on the first of these
    /// ranks. Must be called on every rank, with the gradients of a [`Step`](crate::Step).
    ///
    /// # Cost
    /// One pass over this rank's gradients, and all-gathers of 8 bytes per rank of the pipeline and per tensor-parallel rank.
    ///
    /// # Errors
    /// The cause, if an earlier step failed; [`Error::DividedUnknown`]; errors of candle; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.check("the norm of gradients")?;
        let repeated: HashSet<TensorId> =
            self.ties().iter().flat_map(|tie| tie.uncounted()).map(|var| var.id()).collect();
        let is_first = self.groups().tp.as_ref().is_none_or(|tp| tp.rank() == 0);
        let counts = |var: &Var| !repeated.contains(&var.id()) && (is_first || self.is_divided(var));
        let counted: Vec<Var> = self.vars().into_iter().filter(counts).collect();
        let own = grad_norm(grads, &counted)?;
        // Data-parallel replicas have the same gradients.
        let groups = [self.groups().tp.as_ref(), Some(&self.groups().pp)];
        Ok(global_norm(groups.into_iter().flatten().map(|group| &**group), own)?)
    }

    /// Scales the gradients so that their global norm, over all stages, is at most `max_norm`, and returns the norm before
    /// scaling. Must be called on every rank, with the gradients of a [`Step`](crate::Step), after they have been completed
    /// by e.g. `Shards::sum_gradients`.
    ///
    /// Like PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True` in a single process that has all stages: all gradients
    /// are multiplied by `max_norm / (norm + 1e-6)` if that is below 1.
    ///
    /// # Cost
    /// That of [`grad_norm`](Self::grad_norm), and another pass if they are scaled.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] if a gradient contains a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. The gradients are then unchanged.
    /// Otherwise as [`grad_norm`](Self::grad_norm).
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            let own = first_not_finite(grads, &self.vars())?;
            let own = own.map(|place| self.named_vars().remove(place).0);
            if let Some((rank, parameter)) = first_of(self.groups().all(), own)? {
                return Err(Error::NotFinite { parameter, rank, norm });
            }
        }
        clip_by_norm(grads, &self.vars(), norm, max_norm)?;
        Ok(norm)
    }

    /// Compares parameters, bit for bit, over all ranks that hold the same: all of them over data-parallel replicas, those
    /// that every tensor-parallel rank holds whole over these ranks, and tied ones on different ranks. Running statistics
    /// and other buffers ([`Modules::buffers`](crate::Modules::buffers)), which differ between replicas, are not compared. Must be called on every rank, at the same
    /// point: occasionally during a long training, or when debugging.
    ///
    /// # Cost
    /// Some passes over the variables, and all-gathers of a few bytes. Only if they differ: 8 bytes per variable, then a
    /// broadcast of one variable.
    ///
    /// # Errors
    /// [`Error::ParametersDiffer`], the same on every rank, names a variable that differs, the ranks, the element and both
    /// values. Training can continue after it. Otherwise as [`grad_norm`](Self::grad_norm).
    pub fn check_parameters(&self) -> Result<()> {
        self.check("a comparison of parameters")?;
        let vars = self.named_vars();
        let listed = |vars: &mut dyn Iterator<Item = &(String, Var)>, among: Option<&dyn Communicator>| {
            let Some(among) = among else { return Ok(None) };
            let tensors: Vec<(&str, &Tensor)> = vars.map(|(name, var)| (&**name, var.as_tensor())).collect();
            parameter_difference(among, &tensors)
        };
        // All comparisons are made, whatever is found: the other ranks of each group wait for this one.
        let mut found = vec![listed(&mut vars.iter(), self.groups().dp.as_deref())?];
        let mut whole = vars.iter().filter(|(_, var)| !self.is_divided(var));
        found.push(listed(&mut whole, self.groups().tp.as_deref())?);
        for (tied, among) in self.ties().iter().map(|tie| tie.local_and_group()) {
            let mut first =
                vars.iter().filter(|(_, var)| tied.first().is_some_and(|tied| tied.id() == var.id()));
            found.push(listed(&mut first, among)?);
        }
        match first_of(self.groups().all(), found.into_iter().flatten().next())? {
            Some((_, difference)) => Err(Box::new(difference).into()),
            None => Ok(()),
        }
    }

    fn is_divided(&self, var: &Var) -> bool {
        self.divided().is_some_and(|divided| divided.contains(&var.id()))
    }

    /// Returns an error if an earlier step failed, or if it is unknown which variables are divided.
    fn check(&self, what: &'static str) -> Result<()> {
        if let Some(first) = self.failed() {
            return Err(first.clone());
        }
        let several = self.groups().tp.as_ref().is_some_and(|tp| tp.world_size() > 1);
        if several && self.divided().is_none() { Err(Error::DividedUnknown { what }) } else { Ok(()) }
    }
}
