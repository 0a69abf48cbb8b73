//! Values that are no tensors, from every rank to every rank.

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Communicator, Error, Operation, Result};

/// Gives every rank the values of all ranks, by rank. For small things (names, times, traces): they travel as JSON.
///
/// # Cost
/// Two all-gathers; the second one carries `world_size` times the largest value.
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
    let wrong = |reason: serde_json::Error| Error::system("all_gather_object", reason);
    let mut bytes = serde_json::to_vec(value).map_err(wrong)?;
    let world_size = comm.world_size();
    let lengths = Tensor::zeros(world_size, candle_core::DType::I64, &Device::Cpu)?;
    let own = Tensor::new(&[bytes.len() as i64], &Device::Cpu)?;
    comm.run(Operation::AllGather { output: lengths.clone(), input: own, counts: None })?;
    let lengths: Vec<usize> = lengths.to_vec1::<i64>()?.into_iter().map(|len| len as usize).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    bytes.resize(longest, 0);
    let all = Tensor::zeros((world_size, longest), candle_core::DType::U8, &Device::Cpu)?;
    comm.run(Operation::AllGather {
        output: all.clone(),
        input: Tensor::from_vec(bytes, longest, &Device::Cpu)?,
        counts: None,
    })?;
    let all = all.flatten_all()?.to_vec1::<u8>()?;
    let value_of =
        |(rank, len): (usize, usize)| serde_json::from_slice(&all[rank * longest..][..len]).map_err(wrong);
    lengths.into_iter().enumerate().map(value_of).collect()
}
