//! Object collectives: exchange of small values (names, times, traces) as CBOR, which has NaN and infinity, unlike JSON.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Communicator, Error, Operation, Result};

/// No value has more bytes: memory for a length that a rank has told is only reserved below it.
const MOST_BYTES: usize = 1 << 32;
/// Sent in place of the length of a value that cannot be encoded.
const NOT_ENCODED: i64 = -1;

/// Returns, on every rank, the values of all ranks, by rank.
///
/// # Cost
/// Two all-gathers: of the lengths, and of the values.
///
/// # Errors
/// Those of [`Communicator::run`]; a value that its `Serialize` refuses, which is an error on every rank that names the
/// first such rank; one that cannot be decoded.
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
/// Those of [`Communicator::run`]; a value that its `Serialize` refuses, which is an error on every rank that names the
/// first such rank; one that cannot be decoded.
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
/// Those of [`Communicator::run`]; a value of `root` that its `Serialize` refuses, which is an error on every rank; one that
/// cannot be decoded.
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
    let bytes = if comm.rank() == root { own_bytes(value) } else { Ok(Vec::new()) };
    let len = Tensor::new(&[length_or_error(&bytes)], &Device::Cpu)?;
    comm.run(Operation::Broadcast { tensor: len.clone(), root })?;
    let (bytes, len) = match (bytes, usize::try_from(len.to_vec1::<i64>()?[0])) {
        (Ok(bytes), Ok(len)) => (bytes, bounded(comm, operation, root, len)?),
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
    from_bytes(comm, &tensor.to_vec1::<u8>()?, operation, root)
}

/// Returns this rank's value as bytes, and the length of every rank's. Returns an error on every rank if the value of
/// any rank cannot be encoded.
fn encode<T: Serialize>(
    comm: &dyn Communicator,
    value: &T,
    operation: &'static str,
) -> Result<(Tensor, Vec<usize>)> {
    let bytes = own_bytes(value);
    let lengths = Tensor::zeros(comm.world_size(), DType::I64, &Device::Cpu)?;
    let own = Tensor::new(&[length_or_error(&bytes)], &Device::Cpu)?;
    comm.run(Operation::AllGather { output: lengths.clone(), input: own, counts: None })?;
    let lengths = lengths.to_vec1::<i64>()?.into_iter().map(|len| usize::try_from(len).ok());
    match (bytes, lengths.collect()) {
        (Ok(bytes), Some(lengths)) => {
            let lengths: Vec<usize> = lengths;
            for (rank, len) in lengths.iter().enumerate() {
                bounded(comm, operation, rank, *len)?;
            }
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

/// Encodes a value of this rank, if it is not too long.
fn own_bytes<T: Serialize>(value: &T) -> std::result::Result<Vec<u8>, String> {
    let bytes = to_bytes(value)?;
    match bytes.len() {
        len if len > MOST_BYTES => Err(format!("{len} bytes, at most {MOST_BYTES} are sent: send tensors")),
        _ => Ok(bytes),
    }
}

/// Returns the length that a rank has told, unless it can be none: then that rank has called another operation.
fn bounded(comm: &dyn Communicator, operation: &'static str, rank: usize, len: usize) -> Result<usize> {
    if len <= MOST_BYTES {
        return Ok(len);
    }
    let got = format!("a value of {len} bytes of rank {}", comm.world_ranks()[rank]);
    Err(Error::invalid(operation, got, "call the same operation on every rank"))
}

/// Returns the number to send for a value: its length in bytes, or [`NOT_ENCODED`].
fn length_or_error(bytes: &std::result::Result<Vec<u8>, String>) -> i64 {
    bytes.as_ref().map_or(NOT_ENCODED, |bytes| bytes.len() as i64)
}

fn refused(comm: &dyn Communicator, operation: &'static str, rank: usize, reason: &str) -> Error {
    let got = format!("a value of rank {} that cannot be encoded ({reason})", comm.world_ranks()[rank]);
    Error::invalid(operation, got, "give one that its Serialize does not refuse")
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
        from_bytes(comm, bytes, operation, rank)
    };
    counts.iter().enumerate().map(value).collect()
}

/// Encodes as CBOR.
///
/// # Errors
/// The reason why `Serialize` refuses the value.
pub fn to_bytes<T: Serialize>(value: &T) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).map_err(|error| match error {
        ciborium::ser::Error::Value(reason) => reason,
        ciborium::ser::Error::Io(error) => error.to_string(),
    })?;
    Ok(bytes)
}

/// Decodes what [`to_bytes`] has made.
///
/// # Errors
/// What is wrong with the bytes.
pub fn to_value<T: DeserializeOwned>(mut bytes: &[u8]) -> std::result::Result<T, String> {
    use ciborium::de::Error;
    let value = ciborium::from_reader(&mut bytes).map_err(|error| match error {
        Error::Semantic(_, reason) => reason,
        Error::Syntax(at) => format!("it is not CBOR at byte {at}"),
        Error::Io(_) => "it ends too early".into(),
        Error::RecursionLimitExceeded => "it is nested too deeply".into(),
    })?;
    if bytes.is_empty() { Ok(value) } else { Err(format!("{} bytes follow it", bytes.len())) }
}

fn from_bytes<T: DeserializeOwned>(
    comm: &dyn Communicator,
    bytes: &[u8],
    operation: &'static str,
    rank: usize,
) -> Result<T> {
    let what = || format!("{operation}: the value of rank {}", comm.world_ranks()[rank]);
    to_value(bytes).map_err(|reason| Error::system(what(), reason))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashMap;

    use serde::Deserialize;
    use serde::ser::{Error as _, Serializer};

    use super::*;
    use crate::Local;

    /// A value that is refused if it is true.
    #[derive(Serialize, Deserialize)]
    struct Refusing(#[serde(serialize_with = "refuse")] bool);

    fn refuse<S: Serializer>(is_refused: &bool, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        if *is_refused { Err(S::Error::custom("it is true")) } else { serializer.serialize_bool(false) }
    }

    type Call = fn(&dyn Communicator, &Refusing, usize) -> Result<usize>;

    /// Each call returns the number of values that a rank gets.
    const CALLS: [(&str, Call); 3] = [
        ("all_gather_object", |comm, value, _| Ok(all_gather_object(comm, value)?.len())),
        ("gather_object", |comm, value, root| {
            Ok(gather_object(comm, value, root)?.map_or(0, |all| all.len()))
        }),
        ("broadcast_object", |comm, value, root| broadcast_object(comm, value, root).map(|_| 1)),
    ];

    /// The error is the same on all ranks, whichever have such a value; and no rank is left waiting in a collective.
    #[test]
    fn a_value_that_cannot_be_encoded_is_an_error_on_all_ranks() {
        for ranks in 1..=4 {
            for (set, root) in (0..1 << ranks).flat_map(|set: usize| (0..ranks).map(move |root| (set, root)))
            {
                let is_refused = |rank: usize| set >> rank & 1 == 1;
                for (name, call) in CALLS {
                    let got = Local::run(ranks, |comm| {
                        let got = call(comm, &Refusing(is_refused(comm.rank())), root);
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
                                    "{name}: got a value of rank {culprit} that cannot be encoded (it is true); give"
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

    /// An exchange of lengths looks like one of numbers.
    #[test]
    fn a_number_that_is_no_length_is_an_error() {
        for operation in ["all_gather_object", "broadcast_object"] {
            let said = Local::run(2, |comm| {
                let number = Tensor::new(&[i64::MAX], &Device::Cpu)?;
                if comm.rank() == 0 && operation == "broadcast_object" {
                    comm.run(Operation::Broadcast { tensor: number, root: 0 })?;
                } else if comm.rank() == 0 {
                    let output = Tensor::zeros(2, DType::I64, &Device::Cpu)?;
                    comm.run(Operation::AllGather { output, input: number, counts: None })?;
                } else if operation == "broadcast_object" {
                    return Ok(broadcast_object(comm, &0u8, 0).unwrap_err().to_string());
                } else {
                    return Ok(all_gather_object(comm, &0u8).unwrap_err().to_string());
                }
                Ok(String::new())
            });
            let said = said.unwrap().remove(1);
            let expected = format!("{operation}: got a value of {} bytes of rank 0; call the same", i64::MAX);
            assert!(said.starts_with(&expected), "{said}");
        }
    }

    #[test]
    fn ranks_of_a_part_of_the_job_are_named_by_their_numbers_in_it() {
        for (name, call) in CALLS {
            let said = Local::run_shared(3, |comm| {
                let Some(group) = comm.new_group(&[2, 1])? else { return Ok(String::new()) };
                Ok(call(&*group, &Refusing(group.rank() == 0), 0).unwrap_err().to_string())
            });
            let said = said.unwrap();
            assert!(said[1].contains("a value of rank 2 that"), "{name}: {said:?}");
            assert_eq!(said[1], said[2], "{name}");
        }
    }

    #[test]
    fn a_value_that_cannot_be_read_is_said_to_be_whose() {
        #[derive(Serialize, Deserialize)]
        struct Port(#[serde(deserialize_with = "read")] u32);

        fn read<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<u32, D::Error> {
            u16::deserialize(from).map(u32::from)
        }

        let read = Local::run(2, |comm| {
            Ok(all_gather_object(comm, &Port([80, 65536][comm.rank()])).map(|all| all.len()))
        });
        for read in read.unwrap() {
            let message = read.unwrap_err().to_string();
            assert!(message.starts_with("all_gather_object: the value of rank 1: "), "{message}");
            assert!(message.contains("65536") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn every_number_comes_to_the_bit() {
        let floats = [f32::NAN, f32::INFINITY, -0.0, 0.1, f32::MIN_POSITIVE / 2.0];
        let own = |rank: usize| (Some(f32::NAN), -f64::NAN, floats, (u128::MAX, i64::MIN, rank));
        let told = Local::run(2, |comm| {
            let all = all_gather_object(comm, &own(comm.rank()))?;
            let (loss, wide, ..) = broadcast_object(comm, &own(0), 0)?;
            Ok((all, gather_object(comm, &Some(f64::INFINITY), 0)?, (loss, wide)))
        });
        for (rank, (all, gathered, (loss, wide))) in told.unwrap().into_iter().enumerate() {
            for (from, (loss, wide, narrow, exact)) in all.into_iter().enumerate() {
                assert_eq!(loss.map(f32::to_bits), Some(f32::NAN.to_bits()));
                assert_eq!(wide.to_bits(), (-f64::NAN).to_bits());
                assert_eq!(narrow.map(f32::to_bits), floats.map(f32::to_bits));
                assert_eq!(exact, (u128::MAX, i64::MIN, from));
            }
            assert!(loss.is_some_and(f32::is_nan) && wide.is_nan());
            assert_eq!(gathered, (rank == 0).then(|| vec![Some(f64::INFINITY); 2]));
        }
    }

    #[test]
    fn maps_may_have_any_keys() {
        let pairs = HashMap::from([((0usize, 1usize), 0.5), ((1, 0), f64::INFINITY)]);
        let told = Local::run(2, |comm| all_gather_object(comm, &pairs));
        assert_eq!(told.unwrap(), vec![vec![pairs.clone(), pairs]; 2]);
    }

    /// Of what a rank may be sent, nothing ends the process: neither a length that nobody has memory for, nor depth.
    #[test]
    fn bytes_that_are_no_value_are_an_error() {
        let whole = to_bytes(&vec!["a", "b"]).unwrap();
        let long = [0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        let deep = vec![0x81; 1 << 20];
        for bytes in [&[][..], &whole[..3], &[whole.clone(), vec![0]].concat(), &long, &deep, &[0xff]] {
            assert!(to_value::<Vec<String>>(bytes).is_err());
            let error = to_value::<serde_json::Value>(bytes).unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }
}
