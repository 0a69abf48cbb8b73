//! The check that replicated parameters are equal.

use candle_core::{Tensor, Var};
use comm::Communicator;
use strategy::{DistributedModel, first_of, parameter_difference};

use crate::{Pipeline, Result};

impl Pipeline {
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
    /// [`Error::ParametersDiffer`](crate::Error::ParametersDiffer), the same on every rank, names a variable that differs, the ranks, the element and both
    /// values. Training can continue after it. Otherwise as [`grad_norm`](DistributedModel::grad_norm).
    pub fn check_parameters(&self) -> Result<()> {
        self.check()?;
        let divided = self.divided_for("a comparison of parameters")?;
        let vars = self.named_vars();
        let listed = |vars: &mut dyn Iterator<Item = &(String, Var)>, among: Option<&dyn Communicator>| {
            let Some(among) = among else { return Ok(None) };
            let tensors: Vec<(&str, &Tensor)> = vars.map(|(name, var)| (&**name, var.as_tensor())).collect();
            parameter_difference(among, &tensors)
        };
        // All comparisons are made, whatever is found: the other ranks of each group wait for this one.
        let mut found = vec![listed(&mut vars.iter(), self.groups().dp.as_deref())?];
        let mut whole = vars.iter().filter(|(_, var)| !divided.contains_key(&var.id()));
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
}
