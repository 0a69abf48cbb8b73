//! A rank leaves, and the others continue.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
use comm::{Communicator, Local, ReduceOp};
use ddp::{Ddp, DdpConfig};

#[test]
fn the_sums_after_a_shrink_are_those_of_the_ranks_that_are_left() {
    let sums = Local::run_shared(3, |mut comm: Arc<dyn Communicator>| {
        let mut sums = vec![];
        for step in 0..4 {
            if comm.world_ranks()[comm.rank()] == 1 && step == 2 {
                return Ok(sums);
            }
            loop {
                let one = Tensor::new(&[1u32], &Device::Cpu)?;
                match comm.all_reduce(&one, ReduceOp::Sum).and_then(|work| work.wait()) {
                    Ok(()) => break sums.push(one.to_vec1::<u32>()?[0]),
                    Err(error) if error.is_loss() => comm = comm.elastic()?.shrink()?,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(sums)
    });
    assert_eq!(sums.unwrap(), [vec![3, 3, 2, 2], vec![3, 3], vec![3, 3, 2, 2]]);
}

#[test]
fn a_model_goes_on_in_the_smaller_group() {
    let trained = Local::run_shared(3, |mut comm| {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let leaves = comm.rank() == 0;
        let mut ddp = Ddp::new(comm.clone(), vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
        let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
        let mut step = 0;
        while step < if leaves { 2 } else { 4 } {
            let x = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
            let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
            match ddp.backward(&loss) {
                Ok(grads) => {
                    optimizer.step(&grads)?;
                    step += 1;
                }
                Err(ddp::Error::Comm(error)) if error.is_loss() => {
                    comm = comm.elastic()?.shrink()?;
                    ddp.regroup(comm.clone())?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok((comm.world_size(), ddp.vars()[1].to_vec1::<f32>()?))
    })
    .unwrap();
    assert_eq!((trained[1].0, &trained[1]), (2, &trained[2]));
}
