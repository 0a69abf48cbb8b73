//! What a rank has sent and received in several groups.

use std::sync::Arc;

use comm::{Communicator, Stats};

/// Returns this rank's traffic in these groups. Several of them may be the same communicator, which is counted once.
pub fn traffic<'a>(groups: impl IntoIterator<Item = &'a Arc<dyn Communicator>>) -> Stats {
    let all: Vec<_> = groups.into_iter().collect();
    let is_new = |index: usize| !all[..index].iter().any(|before| Arc::ptr_eq(before, all[index]));
    let new = all.iter().enumerate().filter(|(index, _)| is_new(*index));
    new.fold(Stats::default(), |sum, (_, comm)| sum + comm.stats())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use comm::{Local, Operation, ReduceOp};

    use super::*;

    #[test]
    fn a_group_is_counted_once() {
        let counted = Local::run_shared(2, |comm| {
            let other = comm.subgroup(&[0, 1])?;
            let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
            for group in [&comm, &other] {
                group.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
            }
            Ok((traffic([&comm, &other, &comm]), comm.stats() + other.stats()))
        });
        for (counted, sum) in counted.unwrap() {
            assert_eq!(counted.bytes_sent, sum.bytes_sent);
        }
    }
}
