//! Object collectives: exchange of small values (names, times, traces) as JSON.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Communicator, Error, Operation, Result};

/// Sent in place of the length of a value that cannot be encoded as JSON.
const NO_JSON: i64 = -1;

/// Returns, on every rank, the values of all ranks, by rank.
///
/// # Cost
/// Two all-gathers: of the lengths, and of the values.
///
/// # Errors
/// Those of [`Communicator::run`]; a value that cannot be encoded as JSON, which is an error on every rank that names
/// the first such rank; one that cannot be decoded.
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
    decode(comm, &output, &counts, "all_gather_object")
}

/// Returns, on rank `root`, the values of all ranks, by rank; `None` on the others.
///
/// # Cost
/// An all-gather of the lengths, and a gather of the values.
///
/// # Errors
/// Those of [`Communicator::run`]; a value that cannot be encoded as JSON, which is an error on every rank that names
/// the first such rank; one that cannot be decoded.
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
    output.map(|output| decode(comm, &output, &counts, "gather_object")).transpose()
}

/// Returns, on every rank, the value of rank `root`. What the others pass is ignored.
///
/// # Cost
/// Two broadcasts: of the length, and of the value.
///
/// # Errors
/// Those of [`Communicator::run`]; a value of `root` that cannot be encoded as JSON, which is an error on every rank;
/// one that cannot be decoded.
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
    let operation = "broadcast_object";
    let bytes = if comm.rank() == root { to_json(value) } else { Ok(Vec::new()) };
    let len = Tensor::new(&[length_or_error(&bytes)], &Device::Cpu)?;
    comm.run(Operation::Broadcast { tensor: len.clone(), root })?;
    let (bytes, len) = match (bytes, usize::try_from(len.to_vec1::<i64>()?[0])) {
        (Ok(bytes), Ok(len)) => (bytes, len),
        (bytes, _) => {
            // A text can always be encoded.
            let reason = broadcast_object(comm, &bytes.err().unwrap_or_default(), root)?;
            return Err(refused(comm, operation, root, &reason));
        }
    };
    let tensor = match comm.rank() == root {
        true => Tensor::from_vec(bytes, len, &Device::Cpu)?,
        false => Tensor::zeros(len, DType::U8, &Device::Cpu)?,
    };
    comm.run(Operation::Broadcast { tensor: tensor.clone(), root })?;
    from_json(comm, &tensor.to_vec1::<u8>()?, operation, root)
}

/// Returns this rank's value as bytes, and the length of every rank's. Returns an error on every rank if the value of
/// any rank cannot be encoded.
fn encode<T: Serialize>(
    comm: &dyn Communicator,
    value: &T,
    operation: &'static str,
) -> Result<(Tensor, Vec<usize>)> {
    let bytes = to_json(value);
    let lengths = Tensor::zeros(comm.world_size(), DType::I64, &Device::Cpu)?;
    let own = Tensor::new(&[length_or_error(&bytes)], &Device::Cpu)?;
    comm.run(Operation::AllGather { output: lengths.clone(), input: own, counts: None })?;
    let lengths = lengths.to_vec1::<i64>()?.into_iter().map(|len| usize::try_from(len).ok());
    match (bytes, lengths.collect()) {
        (Ok(bytes), Some(lengths)) => {
            let len = bytes.len();
            Ok((Tensor::from_vec(bytes, len, &Device::Cpu)?, lengths))
        }
        (bytes, _) => {
            // A text can always be encoded.
            let reasons = all_gather_object(comm, &bytes.err())?.into_iter().enumerate();
            let first = reasons.flat_map(|(rank, reason)| Some((rank, reason?))).next();
            let (rank, reason) = first.unwrap_or_default();
            Err(refused(comm, operation, rank, &reason))
        }
    }
}

/// Returns the number to send for a value: its length in bytes, or [`NO_JSON`].
fn length_or_error(bytes: &std::result::Result<Vec<u8>, String>) -> i64 {
    bytes.as_ref().map_or(NO_JSON, |bytes| bytes.len() as i64)
}

fn refused(comm: &dyn Communicator, operation: &'static str, rank: usize, reason: &str) -> Error {
    let got = format!("a value of rank {} that JSON cannot hold ({reason})", comm.world_ranks()[rank]);
    Error::invalid(
        operation,
        got,
        "give one that it can: a map, for instance, needs strings or numbers as keys",
    )
}

fn decode<T: DeserializeOwned>(
    comm: &dyn Communicator,
    all: &Tensor,
    counts: &[usize],
    operation: &'static str,
) -> Result<Vec<T>> {
    let all = all.to_vec1::<u8>()?;
    let mut rest = &all[..];
    let value = |(rank, count): (usize, &usize)| {
        let (bytes, others) = rest.split_at(*count);
        rest = others;
        from_json(comm, bytes, operation, rank)
    };
    counts.iter().enumerate().map(value).collect()
}

fn to_json<T: Serialize>(value: &T) -> std::result::Result<Vec<u8>, String> {
    serde_json::to_vec(value).map_err(|reason| reason.to_string())
}

fn from_json<T: DeserializeOwned>(
    comm: &dyn Communicator,
    bytes: &[u8],
    operation: &'static str,
    rank: usize,
) -> Result<T> {
    let what = || format!("{operation}: the value of rank {}", comm.world_ranks()[rank]);
    serde_json::from_slice(bytes).map_err(|reason| Error::system(what(), reason))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashMap;

    use super::*;
    use crate::Local;

    /// JSON has strings and numbers as keys, but no pairs.
    type Distances = HashMap<(usize, usize), f64>;

    fn value(is_refused: bool) -> Distances {
        if is_refused { HashMap::from([((0, 1), 0.5)]) } else { HashMap::new() }
    }

    type Call = fn(&dyn Communicator, &Distances, usize) -> Result<usize>;

    /// Each call returns the number of values that a rank gets.
    const CALLS: [(&str, Call); 3] = [
        ("all_gather_object", |comm, value, _| Ok(all_gather_object(comm, value)?.len())),
        ("gather_object", |comm, value, root| {
            Ok(gather_object(comm, value, root)?.map_or(0, |all| all.len()))
        }),
        ("broadcast_object", |comm, value, root| Ok(broadcast_object(comm, value, root)?.len() + 1)),
    ];

    /// The error is the same on all ranks, whichever have such a value; and no rank is left waiting in a collective.
    #[test]
    fn a_value_that_json_cannot_hold_is_an_error_on_all_ranks() {
        for ranks in 1..=4 {
            for (set, root) in (0..1 << ranks).flat_map(|set: usize| (0..ranks).map(move |root| (set, root)))
            {
                let is_refused = |rank: usize| set >> rank & 1 == 1;
                for (name, call) in CALLS {
                    let got = Local::run(ranks, |comm| {
                        let got = call(comm, &value(is_refused(comm.rank())), root);
                        comm.barrier()?.wait()?;
                        Ok(got.map_err(|error| error.to_string()))
                    });
                    let culprit = match name {
                        "broadcast_object" => Some(root).filter(|root| is_refused(*root)),
                        _ => (0..ranks).find(|rank| is_refused(*rank)),
                    };
                    for (rank, got) in got.unwrap().into_iter().enumerate() {
                        let what =
                            format!("{name}, rank {rank} of {ranks}, set {set:b}, root {root}: {got:?}");
                        match (culprit, got) {
                            (Some(culprit), Err(message)) => {
                                let start = format!(
                                    "{name}: got a value of rank {culprit} that JSON cannot hold (key"
                                );
                                assert!(message.starts_with(&start), "{what}");
                            }
                            (None, Ok(count)) => {
                                let all = if name == "broadcast_object" { 1 } else { ranks };
                                let has = name != "gather_object" || rank == root;
                                assert_eq!(count, if has { all } else { 0 }, "{what}");
                            }
                            _ => panic!("{what}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_of_a_part_of_the_job_are_named_by_their_numbers_in_it() {
        for (name, call) in CALLS {
            let said = Local::run_shared(3, |comm| {
                let Some(group) = comm.new_group(&[2, 1])? else { return Ok(String::new()) };
                Ok(call(&*group, &value(group.rank() == 0), 0).unwrap_err().to_string())
            });
            let said = said.unwrap();
            assert!(said[1].contains("a value of rank 2 that"), "{name}: {said:?}");
            assert_eq!(said[1], said[2], "{name}");
        }
    }

    /// JSON writes NaN as null, which is not read as a number.
    #[test]
    fn a_value_that_cannot_be_read_is_said_to_be_whose() {
        let read = Local::run(2, |comm| Ok(all_gather_object(comm, &[1.0, f64::NAN][comm.rank()])));
        for read in read.unwrap() {
            let message = read.unwrap_err().to_string();
            assert!(message.starts_with("all_gather_object: the value of rank 1: "), "{message}");
        }
    }
}
