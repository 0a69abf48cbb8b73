//! Do all ranks build the same model? If not: who differs, and where first.

use candle_core::{CpuStorage, Storage, Tensor};
use comm::{Communicator, all_gather_object};
use serde::{Deserialize, Serialize};

use crate::{Error, Parameter, Result, Split};

/// What each rank says of its model.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// Why it could not be built.
    error: Option<String>,
    /// The rank's place along the tensor-parallel axis.
    place: usize,
    /// Of what must be equal on all ranks.
    common: u64,
    /// Of what must be equal on all ranks of the same place.
    own: u64,
}

/// One line for each thing that must be equal, and what its values add up to.
#[derive(Serialize, Deserialize, Clone, PartialEq)]
struct Line {
    text: String,
    values: u64,
    /// Whether the values must be equal on all ranks, or on those of the same place.
    everywhere: bool,
}

/// Gives each rank its own parameters back if all ranks have built the same model of the same weights.
///
/// # Cost
/// One all-gather of a hundred bytes; more only where they differ. One pass over the parameters.
pub(crate) fn check(
    comm: &dyn Communicator,
    place: usize,
    configuration: String,
    built: Result<Vec<Parameter>>,
) -> Result<Vec<Parameter>> {
    let lines = match &built {
        Ok(parameters) => lines(configuration, parameters)?,
        Err(_) => Vec::new(),
    };
    let values = |everywhere| lines.iter().filter(move |line| line.everywhere == everywhere);
    let common = lines.iter().fold(0, |hash, line| add_text(hash, &line.text));
    let common = values(true).fold(common, |hash, line| add(hash, line.values));
    let own = values(false).fold(0, |hash, line| add(hash, line.values));
    let error = built.as_ref().err().map(ToString::to_string);
    let answers = all_gather_object(comm, &Answer { error, place, common, own })?;
    let parameters = built?;
    // In the whole job.
    let number = |rank: usize| comm.world_ranks()[rank];
    for (rank, answer) in answers.iter().enumerate() {
        if let Some(reason) = &answer.error {
            return Err(Error::PeerBuild { rank: number(rank), reason: reason.clone() });
        }
    }
    if let Some((rank, odd_rank)) = odd_pair(&answers) {
        let same_place = answers[rank].place == answers[odd_rank].place;
        let (odd, expected) = difference(&all_gather_object(comm, &lines)?, rank, odd_rank, same_place);
        return Err(Error::ModelMismatch { odd_rank: number(odd_rank), odd, rank: number(rank), expected });
    }
    Ok(parameters)
}

/// Two ranks that should be equal, and are not.
fn odd_pair(answers: &[Answer]) -> Option<(usize, usize)> {
    let differs = |rank: usize, odd: usize| {
        let (a, b) = (&answers[rank], &answers[odd]);
        a.common != b.common || (a.place == b.place && a.own != b.own)
    };
    (0..answers.len()).find_map(|odd| (0..odd).find(|rank| differs(*rank, odd)).map(|rank| (rank, odd)))
}

/// What the odd one has, and what the other.
fn difference(lines: &[Vec<Line>], rank: usize, odd_rank: usize, same_place: bool) -> (String, String) {
    let (expected, odd) = (&lines[rank], &lines[odd_rank]);
    let text =
        |lines: &[Line], place: usize| lines.get(place).map_or("nothing".into(), |line| line.text.clone());
    let most = expected.len().max(odd.len());
    let texts = (0..most).find(|&place| text(expected, place) != text(odd, place));
    match texts {
        Some(place) => (text(odd, place), text(expected, place)),
        None => {
            let comparable = |place: usize| same_place || odd.get(place).is_some_and(|line| line.everywhere);
            let differs = |place: &usize| comparable(*place) && expected.get(*place) != odd.get(*place);
            let place = (0..most).find(differs).unwrap_or(0);
            (format!("other values of {}", text(odd, place)), "its own".into())
        }
    }
}

fn lines(configuration: String, parameters: &[Parameter]) -> Result<Vec<Line>> {
    let mut lines = vec![Line { text: configuration, values: 0, everywhere: true }];
    for parameter in parameters {
        lines.push(Line {
            text: parameter.describe(),
            values: values(parameter.var())?,
            everywhere: parameter.split() == Split::Whole,
        });
    }
    Ok(lines)
}

/// A number that stands for all values, to the bit.
fn values(tensor: &Tensor) -> Result<u64> {
    let tensor = tensor.detach().contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let start = layout.start_offset();
    let range = start..start + tensor.elem_count();
    let Storage::Cpu(storage) = &*storage else { return Ok(0) };
    let hash = |bits: &mut dyn Iterator<Item = u64>| bits.fold(0, add);
    Ok(match storage {
        CpuStorage::F32(all) => hash(&mut all[range].iter().map(|x| x.to_bits().into())),
        CpuStorage::F64(all) => hash(&mut all[range].iter().map(|x| x.to_bits())),
        CpuStorage::F16(all) => hash(&mut all[range].iter().map(|x| x.to_bits().into())),
        CpuStorage::BF16(all) => hash(&mut all[range].iter().map(|x| x.to_bits().into())),
        _ => 0,
    })
}

/// Source: Fowler, Noll and Vo's hash function, version 1a, on words.
fn add(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
}

fn add_text(hash: u64, text: &str) -> u64 {
    text.bytes().fold(hash, |hash, byte| add(hash, byte.into()))
}
