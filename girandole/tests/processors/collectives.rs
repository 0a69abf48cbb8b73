//! Every operation between two ranks, with every dtype, on numbers that are rounded.

use std::hash::{DefaultHasher, Hasher};

use candle_core::{DType, Device, Tensor};
use girandole::comm::{Communicator, Message, ReduceOp, Result};

use super::Outcome;

const DTYPES: [DType; 7] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
/// Two lengths that fit into one message, and one that is split.
const LENGTHS: [usize; 3] = [1, 37, 70_001];

pub(super) fn all(comm: &dyn Communicator) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    for dtype in DTYPES {
        for len in LENGTHS {
            let mut keep = |name: &str, tensor: &Tensor| {
                outcome.insert(format!("{name} {dtype:?} {len}"), digest(tensor));
            };
            for op in OPS.into_iter().filter(|op| *op != ReduceOp::Avg || dtype.is_float()) {
                reduced(comm, dtype, len, op, &mut |name, tensor| keep(&format!("{name} {op:?}"), tensor))?;
            }
            moved(comm, dtype, len, &mut keep)?;
            uneven(comm, dtype, len, &mut keep)?;
        }
    }
    comm.barrier()?.wait()?;
    Ok(outcome)
}

fn reduced(
    comm: &dyn Communicator,
    dtype: DType,
    len: usize,
    op: ReduceOp,
    keep: &mut dyn FnMut(&str, &Tensor),
) -> Result<()> {
    let own = || input(comm.rank(), len, dtype);
    let tensor = own()?;
    comm.all_reduce(&tensor, op)?.wait()?;
    keep("all_reduce", &tensor);
    let tensor = own()?;
    comm.reduce(&tensor, op, 1)?.wait()?;
    keep("reduce", &tensor);
    let output = zeros(len, dtype)?;
    comm.reduce_scatter(&output, &input(comm.rank(), 2 * len, dtype)?, op)?.wait()?;
    keep("reduce_scatter", &output);
    Ok(())
}

fn moved(
    comm: &dyn Communicator,
    dtype: DType,
    len: usize,
    keep: &mut dyn FnMut(&str, &Tensor),
) -> Result<()> {
    let rank = comm.rank();
    let (own, whole) = (input(rank, len, dtype)?, input(rank, 2 * len, dtype)?);
    let (part, output) = (zeros(len, dtype)?, zeros(2 * len, dtype)?);
    comm.all_gather(&output, &own)?.wait()?;
    keep("all_gather", &output);
    comm.all_to_all(&output, &whole)?.wait()?;
    keep("all_to_all", &output);
    comm.gather((rank == 1).then_some(&output), &own, 1)?.wait()?;
    keep("gather", &output);
    comm.scatter(&part, (rank == 0).then_some(&whole), 0)?.wait()?;
    keep("scatter", &part);
    comm.broadcast(&own, 1)?.wait()?;
    keep("broadcast", &own);
    let (tensor, peer) = (zeros(len, dtype)?, 1 - rank);
    let send = Message::Send { tensor: input(rank, len, dtype)?, to: peer };
    comm.batch(vec![send, Message::Recv { tensor: tensor.clone(), from: peer }])?.wait()?;
    keep("batch", &tensor);
    if rank == 0 {
        comm.send(&whole, 1)?.wait()?;
    } else {
        comm.recv(&output, 0)?.wait()?;
        keep("recv", &output);
    }
    Ok(())
}

fn uneven(
    comm: &dyn Communicator,
    dtype: DType,
    len: usize,
    keep: &mut dyn FnMut(&str, &Tensor),
) -> Result<()> {
    let counts = [len, 3];
    let rank = comm.rank();
    let (all, part) = (zeros(len + 3, dtype)?, zeros(counts[rank], dtype)?);
    comm.all_gather_v(&all, &input(rank, counts[rank], dtype)?, &counts)?.wait()?;
    keep("all_gather_v", &all);
    comm.reduce_scatter_v(&part, &input(rank, len + 3, dtype)?, ReduceOp::Sum, &counts)?.wait()?;
    keep("reduce_scatter_v", &part);
    Ok(())
}

/// Returns numbers with many digits, which differ by rank and index; integers for integer dtypes.
fn input(rank: usize, len: usize, dtype: DType) -> Result<Tensor> {
    let number = |index: usize| ((index * 7919 + rank * 104_729 + 1) % 1009) as f64 / 1009.0;
    let scaled = |index| if dtype.is_float() { number(index) - 0.4 } else { (number(index) * 15.0).floor() };
    let values: Vec<f64> = (0..len).map(scaled).collect();
    Ok(Tensor::from_vec(values, len, &Device::Cpu)?.to_dtype(dtype)?)
}

fn zeros(len: usize, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::zeros(len, dtype, &Device::Cpu)?)
}

/// Returns a digest of the elements' bits, which are too many to store.
fn digest(tensor: &Tensor) -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    hasher.write(&bytes(tensor));
    hasher.finish().to_le_bytes().to_vec()
}

/// Returns the elements' bits.
pub(super) fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).unwrap();
    bytes
}
