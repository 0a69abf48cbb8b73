//! Norm of all gradients, each parameter counted once over all axes, and clipping by it.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use comm::{Communicator, Operation};
use training::internal::clip_by_norm;

use crate::{DistributedModel, Error, first_of};

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

/// Returns the 2-norm of the parts of all ranks of these groups together, given the norm of each rank's own part. The
/// result is bitwise equal on every rank: replicas that are scaled by it stay equal. Every rank of the groups must call
/// it.
///
/// The groups are those along axes of a [`comm::Mesh`], in the same order on every rank. Elements that several of
/// these ranks have in common must be included in the norm of only one of them. An axis along which ranks are replicas,
/// such as that of data parallelism, is left out.
///
/// # Cost
/// An all-gather of 8 bytes a rank for each group of several ranks; none for a group of one.
///
/// # Errors
/// Those of [`Communicator::run`].
pub(crate) fn global_norm<'a>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: f64,
) -> comm::Result<f64> {
    let mut norm = own;
    for group in groups.into_iter().filter(|group| group.world_size() > 1) {
        let all = Tensor::zeros(group.world_size(), DType::F64, &Device::Cpu)?;
        let input = Tensor::new(&[norm], &Device::Cpu)?;
        group.run(Operation::AllGather { output: all.clone(), input, counts: None })?;
        // Summed here, in the order of the ranks: the order in which an all-reduce sums depends on the hosts of the
        // group's ranks, which differ between the groups along an axis.
        norm = all.to_vec1::<f64>()?.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
    }
    Ok(norm)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use comm::{Local, Mesh};

    #[test]
    fn all_ranks_of_a_mesh_have_the_same_bits() {
        for axes in [[("pp", 3), ("tp", 2)], [("tp", 4), ("pp", 1)], [("pp", 1), ("tp", 1)]] {
            let own = |rank: usize| (rank as f64 + 0.1).exp();
            let world: usize = axes.iter().map(|(_, size)| size).product();
            let norms = Local::run_shared(world, |comm| {
                let mesh = Mesh::new(comm.clone(), &axes)?;
                let groups = [mesh.axis("tp")?, mesh.axis("pp")?];
                global_norm(groups.map(|group| &**group as &dyn Communicator), own(comm.rank()))
            });
            let norms = norms.unwrap();
            assert!(norms.iter().all(|norm| norm.to_bits() == norms[0].to_bits()), "{norms:?}");
            let expected = (0..world).map(|rank| own(rank).powi(2)).sum::<f64>().sqrt();
            assert!((norms[0] - expected).abs() <= 1e-15 * expected, "{norms:?}, {expected}");
        }
    }

    #[test]
    fn what_is_not_finite_on_one_rank_is_so_on_all() {
        for bad in [f64::NAN, f64::INFINITY] {
            let norm = |comm: &Local| {
                let own = if comm.rank() == 2 { bad } else { 1.0 };
                global_norm([comm as &dyn Communicator], own)
            };
            assert!(Local::run(4, norm).unwrap().iter().all(|norm| norm.is_nan() || norm.is_infinite()));
        }
    }
}
