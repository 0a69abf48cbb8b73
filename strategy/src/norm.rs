//! Norm of all gradients, each parameter counted once over all axes, and clipping by it.

use candle_core::Var;
use candle_core::backprop::GradStore;
use comm::{first_of, global_norm};
use training::internal::clip_by_norm;

use crate::{DistributedModel, Error};

pub(crate) fn grad_norm<M: DistributedModel + ?Sized>(model: &M, grads: &GradStore) -> Result<f64, M::Error> {
    let own = training::grad_norm(grads, &model.counted_vars()?)?;
    Ok(global_norm(model.partition_groups(), own)?)
}

pub(crate) fn clip_grad_norm<M: DistributedModel + ?Sized>(
    model: &M,
    grads: &mut GradStore,
    max_norm: f64,
) -> Result<f64, M::Error> {
    let norm = model.grad_norm(grads)?;
    if !norm.is_finite()
        && let Some((rank, parameter)) = model.first_not_finite(grads)?
    {
        return Err(Error::NotFinite { parameter, rank, norm }.into());
    }
    clip_by_norm(grads, &trained(model)?.1, norm, max_norm)?;
    Ok(norm)
}

pub(crate) fn first_not_finite<M: DistributedModel + ?Sized>(
    model: &M,
    grads: &GradStore,
) -> Result<Option<(usize, String)>, M::Error> {
    let (names, vars) = trained(model)?;
    let own = training::internal::first_not_finite(grads, &vars)?.map(|place| names[place].clone());
    Ok(first_of(model.groups().into_iter().chain(model.partition_groups()), own)?)
}

/// Returns names and variables of this rank's parameters.
fn trained<M: DistributedModel + ?Sized>(model: &M) -> Result<(Vec<String>, Vec<Var>), M::Error> {
    let pieces = model.pieces()?.into_iter().filter(|piece| !piece.is_buffer);
    Ok(pieces.map(|piece| (piece.var_name, piece.var)).unzip())
}
