//! Do all ranks have the same parameters? If not: which rank differs, and where first.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation};

use crate::{Error, Result};

/// Lines that are compared one by one after a difference was found.
const MAX_LINES: usize = 1 << 16;
/// Bytes of a line that are shown.
const LINE_BYTES: usize = 256;

/// Compares the descriptions of all ranks' models, one line for each parameter.
///
/// # Cost
/// 16 bytes of each rank. Only where they differ: 8 bytes for each line, then one line of at most 256 bytes.
pub(crate) fn check(comm: &dyn Communicator, lines: &[String]) -> Result<()> {
    let hashes: Vec<i64> = lines.iter().map(|line| hash(line.as_bytes())).collect();
    let whole: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    let all = gather(comm, vec![lines.len() as i64, hash(&whole)])?;
    let Some((rank, odd_rank)) = odd_one(&all) else { return Ok(()) };

    let longest = all.iter().map(|answer| answer[0]).max().unwrap_or(0);
    let compared = usize::try_from(longest).unwrap_or(0).min(MAX_LINES);
    let mut padded = hashes;
    padded.resize(compared, 0);
    let all = gather(comm, padded)?;
    let place = (0..compared).find(|&line| all[rank][line] != all[odd_rank][line]).unwrap_or(compared);

    let line = lines.get(place).map_or("nothing", String::as_str);
    let mut text: Vec<i64> = line.bytes().take(LINE_BYTES).map(i64::from).collect();
    text.resize(LINE_BYTES, 0);
    let all = gather(comm, text)?;
    let (odd, expected) = (shown(&all[odd_rank]), shown(&all[rank]));
    // By their numbers in the whole job.
    let (odd_rank, rank) = (comm.world_ranks()[odd_rank], comm.world_ranks()[rank]);
    Err(Error::ModelMismatch { odd_rank, odd, rank, expected, place })
}

/// Every rank's numbers, of which each gives equally many.
pub(crate) fn gather(comm: &dyn Communicator, own: Vec<i64>) -> Result<Vec<Vec<i64>>> {
    let (len, world_size) = (own.len(), comm.world_size());
    let input = Tensor::from_vec(own, len, &Device::Cpu)?;
    let output = Tensor::zeros((world_size, len), DType::I64, &Device::Cpu)?;
    comm.run(Operation::AllGather { output: output.clone(), input, counts: None })?;
    Ok(output.to_vec2()?)
}

/// A rank of the largest party, and the first that is not of it.
pub(crate) fn odd_one(answers: &[Vec<i64>]) -> Option<(usize, usize)> {
    let party = |answer: &Vec<i64>| answers.iter().filter(|other| *other == answer).count();
    let largest = answers.iter().map(party).max()?;
    let rank = answers.iter().position(|answer| party(answer) == largest)?;
    let odd_rank = answers.iter().position(|answer| *answer != answers[rank])?;
    Some((rank, odd_rank))
}

fn shown(text: &[i64]) -> String {
    let bytes: Vec<u8> = text.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// FNV-1a: the same in every build, which the standard library's hashes do not promise.
fn hash(bytes: &[u8]) -> i64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::Local;

    #[test]
    fn the_minority_is_odd() {
        let answers = |values: &[i64]| values.iter().map(|&value| vec![1, value]).collect::<Vec<_>>();
        assert_eq!(odd_one(&answers(&[5, 5, 5])), None);
        assert_eq!(odd_one(&answers(&[4, 5, 5])), Some((1, 0)));
        assert_eq!(odd_one(&answers(&[5, 5, 4])), Some((0, 2)));
        assert_eq!(odd_one(&answers(&[5, 4])), Some((0, 1)));
    }

    #[test]
    fn hashes_do_not_change_between_versions() {
        assert_eq!(hash(b"").cast_unsigned(), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a").cast_unsigned(), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn all_ranks_get_the_same_verdict() {
        let verdict = |lines: fn(usize) -> Vec<String>| {
            let verdicts = Local::run(3, |comm| {
                Ok(check(comm, &lines(comm.rank())).err().map(|error| error.to_string()))
            });
            let verdicts = verdicts.expect("the communicator works");
            assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
            verdicts[0].clone()
        };
        assert_eq!(verdict(|_| vec!["a".into(), "b".into()]), None);
        assert_eq!(verdict(|_| vec![]), None);
        let differs = verdict(|rank| vec!["a".into(), format!("b{}", rank == 1), "c".into()]);
        let differs = differs.unwrap_or_default();
        assert!(differs.contains("at place 1, rank 1 has btrue, and rank 0 has bfalse"), "{differs}");
        let longer = verdict(|rank| vec!["a".into(); 1 + usize::from(rank == 0)]).unwrap_or_default();
        assert!(longer.contains("at place 1, rank 0 has a, and rank 1 has nothing"), "{longer}");
    }
}
