//! Values that are no tensors. For small things (names, times, traces): they travel as JSON.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Communicator, Error, Operation, Result};

/// Gives every rank the values of all ranks, by rank.
///
/// # Cost
/// Two all-gathers: of the lengths, and of the values.
///
/// # Errors
/// Those of [`Communicator::run`], and a value that cannot be made to JSON or from it.
///
/// ```
/// use comm::{Communicator, Local};
///
/// let names = Local::run(3, |comm| comm::all_gather_object(comm, &format!("rank {}", comm.rank())))?;
/// assert_eq!(names[0], ["rank 0", "rank 1", "rank 2"]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn all_gather_object<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    value: &T,
) -> Result<Vec<T>> {
    let (input, counts) = encode(comm, value, "all_gather_object")?;
    let output = Tensor::zeros(counts.iter().sum::<usize>(), DType::U8, &Device::Cpu)?;
    comm.run(Operation::AllGather { output: output.clone(), input, counts: Some(counts.clone()) })?;
    decode(&output, &counts, "all_gather_object")
}

/// Gives rank `root` the values of all ranks, by rank; the others get none.
///
/// # Cost
/// An all-gather of the lengths, and a gather of the values.
///
/// # Errors
/// Those of [`Communicator::run`], and a value that cannot be made to JSON or from it.
///
/// ```
/// use comm::{Communicator, Local};
///
/// let ranks = Local::run(2, |comm| comm::gather_object(comm, &comm.rank(), 1))?;
/// assert_eq!(ranks, [None, Some(vec![0, 1])]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn gather_object<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    value: &T,
    root: usize,
) -> Result<Option<Vec<T>>> {
    let (input, counts) = encode(comm, value, "gather_object")?;
    let output = match comm.rank() == root {
        true => Some(Tensor::zeros(counts.iter().sum::<usize>(), DType::U8, &Device::Cpu)?),
        false => None,
    };
    comm.run(Operation::Gather { output: output.clone(), input, root, counts: Some(counts.clone()) })?;
    output.map(|output| decode(&output, &counts, "gather_object")).transpose()
}

/// Gives every rank the value of rank `root`; what the others pass is not looked at.
///
/// # Cost
/// Two broadcasts: of the length, and of the value.
///
/// # Errors
/// Those of [`Communicator::run`], and a value that cannot be made to JSON or from it.
///
/// ```
/// use comm::{Communicator, Local};
///
/// let names = Local::run(3, |comm| comm::broadcast_object(comm, &format!("rank {}", comm.rank()), 2))?;
/// assert_eq!(names, ["rank 2", "rank 2", "rank 2"]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn broadcast_object<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    value: &T,
    root: usize,
) -> Result<T> {
    let is_root = comm.rank() == root;
    let bytes = if is_root { to_json(value, "broadcast_object")? } else { Vec::new() };
    let len = Tensor::new(&[bytes.len() as i64], &Device::Cpu)?;
    comm.run(Operation::Broadcast { tensor: len.clone(), root })?;
    let len = len.to_vec1::<i64>()?[0] as usize;
    let tensor = match is_root {
        true => Tensor::from_vec(bytes, len, &Device::Cpu)?,
        false => Tensor::zeros(len, DType::U8, &Device::Cpu)?,
    };
    comm.run(Operation::Broadcast { tensor: tensor.clone(), root })?;
    from_json(&tensor.to_vec1::<u8>()?, "broadcast_object")
}

/// This rank's value as bytes, and the length of every rank's.
fn encode<T: Serialize>(
    comm: &dyn Communicator,
    value: &T,
    operation: &'static str,
) -> Result<(Tensor, Vec<usize>)> {
    let bytes = to_json(value, operation)?;
    let lengths = Tensor::zeros(comm.world_size(), DType::I64, &Device::Cpu)?;
    let own = Tensor::new(&[bytes.len() as i64], &Device::Cpu)?;
    comm.run(Operation::AllGather { output: lengths.clone(), input: own, counts: None })?;
    let lengths = lengths.to_vec1::<i64>()?.into_iter().map(|len| len as usize).collect();
    let len = bytes.len();
    Ok((Tensor::from_vec(bytes, len, &Device::Cpu)?, lengths))
}

fn decode<T: DeserializeOwned>(all: &Tensor, counts: &[usize], operation: &'static str) -> Result<Vec<T>> {
    let all = all.to_vec1::<u8>()?;
    let mut rest = &all[..];
    let value = |count: &usize| {
        let (bytes, others) = rest.split_at(*count);
        rest = others;
        from_json(bytes, operation)
    };
    counts.iter().map(value).collect()
}

fn to_json<T: Serialize>(value: &T, operation: &'static str) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|reason| Error::system(operation, reason))
}

fn from_json<T: DeserializeOwned>(bytes: &[u8], operation: &'static str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|reason| Error::system(operation, reason))
}
