//! A thousand ranks, each a thread: collectives return the right values, and send as many bytes as documented.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Local, Operation, ReduceOp, Result};

const RANKS: usize = 1000;
/// Bytes of an element.
const ELEMENT: u64 = 4;

/// Returns how many bytes each rank sent in `body`.
fn sent(body: impl Fn(&Local) -> Result<()> + Sync) -> Vec<u64> {
    let run = |comm: &Local| {
        let before = comm.stats().bytes_sent;
        body(comm)?;
        Ok(comm.stats().bytes_sent - before)
    };
    Local::run(RANKS, run).unwrap()
}

fn of_rank(comm: &Local, len: usize) -> Result<Tensor> {
    Ok(Tensor::full(comm.rank() as u32, len, &Device::Cpu)?)
}

fn holds(tensor: &Tensor, value: u32) -> Result<()> {
    assert!(tensor.to_vec1::<u32>()?.into_iter().all(|element| element == value));
    Ok(())
}

/// Sum of all rank numbers.
const SUM: u32 = (RANKS * (RANKS - 1) / 2) as u32;

#[test]
fn recursive_doubling() {
    let len = 10;
    let sent = sent(|comm| {
        let tensor = of_rank(comm, len)?;
        comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
        holds(&tensor, SUM)
    });
    // 488 pairs are first merged; then the buffer is sent in each of log2(512) steps, and back to the first rank of the
    // pair.
    let buffer = len as u64 * ELEMENT;
    for (rank, sent) in sent.into_iter().enumerate() {
        let steps = if rank >= 976 {
            9
        } else if rank % 2 == 0 {
            1
        } else {
            10
        };
        assert_eq!(sent, steps * buffer, "rank {rank}");
    }
}

#[test]
fn ring() {
    // More than the limit for recursive doubling.
    let len = 20 * RANKS;
    let sent = sent(|comm| {
        let tensor = of_rank(comm, len)?;
        comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
        holds(&tensor, SUM)
    });
    let formula = 2 * (RANKS as u64 - 1) * len as u64 * ELEMENT / RANKS as u64;
    assert!(sent.iter().all(|sent| *sent == formula), "{formula}");
}

#[test]
fn trees_and_dissemination() {
    let sent = sent(|comm| {
        let tensor = of_rank(comm, 8)?;
        comm.run(Operation::Barrier)?;
        comm.run(Operation::Broadcast { tensor: tensor.clone(), root: 7 })?;
        holds(&tensor, 7)?;
        let sum = Tensor::ones(8, DType::U32, &Device::Cpu)?;
        comm.run(Operation::Reduce { tensor: sum.clone(), op: ReduceOp::Sum, root: 3 })?;
        if comm.rank() == 3 { holds(&sum, RANKS as u32) } else { holds(&sum, 1) }
    });
    // Each rank but one receives the buffer in the broadcast, and sends one in the reduce; a barrier sends a byte in
    // each of ceil(log2(P)) steps.
    let barrier = RANKS as u64 * 10;
    assert_eq!(sent.into_iter().sum::<u64>(), barrier + 2 * (RANKS as u64 - 1) * 8 * ELEMENT);
}
