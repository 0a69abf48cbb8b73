//! The check that replicated parameters are equal.

use candle_core::{Tensor, Var};
use strategy::{DistributedModel, Replicas, check_replicas};

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
    /// [`strategy::Error::ParametersDiffer`], the same on every rank, names a variable that differs, the ranks, the element and both
    /// values. Training can continue after it. Otherwise as [`grad_norm`](DistributedModel::grad_norm).
    pub fn check_parameters(&self) -> Result<()> {
        self.check()?;
        let divided = self.divided_for("a comparison of parameters")?;
        let vars = self.named_vars();
        let all = |keep: &dyn Fn(&Var) -> bool| -> Vec<(&str, &Tensor)> {
            let kept = vars.iter().filter(|(_, var)| keep(var));
            kept.map(|(name, var)| (&**name, var.as_tensor())).collect()
        };
        let groups = self.groups();
        let mut held = vec![Replicas {
            among: groups.tp.as_deref(),
            tensors: all(&|var| !divided.contains_key(&var.id())),
        }];
        if let Some(averaged_over) = &groups.averaged_over {
            held.extend(averaged_over.groups().enumerate().map(|(group, among)| {
                let own = vars.iter().filter(|(name, _)| averaged_over.index_of(name) == group);
                let tensors = own.map(|(name, var)| (&**name, var.as_tensor())).collect();
                Replicas { among: Some(&**among), tensors }
            }));
        }
        for (tied, among) in self.ties().iter().map(|tie| tie.local_and_group()) {
            let tensors = all(&|var| tied.first().is_some_and(|tied| tied.id() == var.id()));
            held.push(Replicas { among, tensors });
        }
        Ok(check_replicas(&groups.all().collect::<Vec<_>>(), &held)?)
    }
}
