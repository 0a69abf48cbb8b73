//! Initial broadcast of rank 0's parameters and buffers.

use candle_core::{Tensor, Var};
use comm::{Communicator, Operation};

use crate::Result;
use crate::bucket_plan::Plan;
use crate::parameter::Kinds;

/// Sets `vars` on every rank to rank 0's values. Shapes and dtypes must be equal on all ranks.
///
/// # Cost
/// One broadcast per `bucket_bytes` of values, and that much memory; a larger variable is broadcast in place.
pub(crate) fn broadcast(comm: &dyn Communicator, vars: &[&Var], bucket_bytes: usize) -> Result<()> {
    let mut kinds = Kinds::default();
    let items: Vec<_> = vars.iter().map(|var| kinds.item(var, 0)).collect();
    let order: Vec<usize> = (0..vars.len()).collect();
    let plan = Plan::new(&items, &order, bucket_bytes, bucket_bytes);
    for bucket in plan.buckets.iter().filter(|bucket| bucket.elements > 0) {
        if let [index] = bucket.items[..] {
            comm.run(Operation::Broadcast { tensor: vars[index].as_tensor().clone(), root: 0 })?;
            continue;
        }
        let filled = || bucket.items.iter().filter(|&&index| items[index].elements > 0);
        let parts: Vec<Tensor> = filled()
            .map(|&index| vars[index].as_detached_tensor().reshape(items[index].elements))
            .collect::<candle_core::Result<_>>()?;
        let flat = Tensor::cat(&parts, 0)?;
        comm.run(Operation::Broadcast { tensor: flat.clone(), root: 0 })?;
        for &index in filled() {
            let (var, place) = (vars[index], plan.places[index]);
            var.set(&flat.narrow(0, place.offset, items[index].elements)?.reshape(var.shape())?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use comm::Local;

    #[test]
    fn every_rank_gets_rank_0s_values() {
        for bucket_bytes in [0, 20, 1000] {
            let results = Local::run(3, |comm| {
                let value = comm.rank() as f64 + 1.0;
                let var = |len: usize, dtype| {
                    Var::from_tensor(
                        &(Tensor::ones(len, DType::F64, &Device::Cpu)? * value)?.to_dtype(dtype)?,
                    )
                };
                let dtypes = [DType::F32, DType::F64, DType::F32, DType::BF16, DType::F32];
                let lens = [4, 3, 0, 2, 1];
                let vars = lens.iter().zip(dtypes).map(|(&len, dtype)| var(len, dtype));
                let vars: Vec<Var> = vars.collect::<candle_core::Result<_>>()?;
                broadcast(comm, &vars.iter().collect::<Vec<_>>(), bucket_bytes)?;
                let sum = |var: &Var| var.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>();
                Ok(vars.iter().map(sum).collect::<candle_core::Result<Vec<_>>>()?)
            });
            assert_eq!(results.expect("no failure"), vec![vec![4.0, 3.0, 0.0, 2.0, 1.0]; 3]);
        }
    }
}
