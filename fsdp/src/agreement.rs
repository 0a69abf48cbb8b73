//! Do all ranks have the same?

use comm::{Communicator, all_gather_object};

use crate::{Error, Result};

/// Compares the descriptions of all ranks' models, one line for each thing.
///
/// # Cost
/// 8 bytes of each rank; only where they differ, the lines.
pub(crate) fn check(comm: &dyn Communicator, lines: &[String]) -> Result<()> {
    let digest = lines.iter().flat_map(|line| line.bytes().chain([b'\n'])).fold(Digest::new(), Digest::add);
    if odd_one(&all_gather_object(comm, &digest.0)?).is_none() {
        return Ok(());
    }
    let all = all_gather_object(comm, &lines.to_vec())?;
    let longest = all.iter().map(Vec::len).max().unwrap_or(0);
    let of = |place: usize| all.iter().map(|lines| lines.get(place)).collect::<Vec<_>>();
    let found = (0..longest).find_map(|place| odd_one(&of(place)).map(|odd| (of(place), odd)));
    let Some((lines, (rank, odd_rank))) = found else { return Ok(()) };
    let shown = |rank: usize| lines[rank].cloned().unwrap_or_else(|| "nothing".into());
    let (odd, expected) = (shown(odd_rank), shown(rank));
    // By their numbers in the whole job.
    let (odd_rank, rank) = (comm.world_ranks()[odd_rank], comm.world_ranks()[rank]);
    Err(Error::ModelMismatch { odd_rank, odd, rank, expected })
}

/// A rank of the largest party, and the first that is not of it.
pub(crate) fn odd_one<T: PartialEq>(answers: &[T]) -> Option<(usize, usize)> {
    let party = |answer: &T| answers.iter().filter(|other| *other == answer).count();
    let largest = answers.iter().map(party).max()?;
    let rank = answers.iter().position(|answer| party(answer) == largest)?;
    let odd_rank = answers.iter().position(|answer| *answer != answers[rank])?;
    Some((rank, odd_rank))
}

/// A hash that is the same in every build, which the standard library's do not promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(self, value: impl Into<u64>) -> Self {
        Self((self.0 ^ value.into()).wrapping_mul(0x0100_0000_01b3).rotate_left(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::Local;

    #[test]
    fn all_ranks_get_the_same_verdict() {
        let verdict = |lines: fn(usize) -> Vec<String>| {
            let verdicts = Local::run(3, |comm| {
                Ok(check(comm, &lines(comm.rank())).err().map(|error| error.to_string()))
            });
            let verdicts = verdicts.expect("the communicator works");
            assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
            verdicts[0].clone().unwrap_or_default()
        };
        assert_eq!(verdict(|_| vec!["a".into(), "b".into()]), "");
        let differs = verdict(|rank| vec!["a".into(), format!("b{}", rank == 1), "c".into()]);
        assert!(differs.contains("rank 1 has btrue, and rank 0 has bfalse"), "{differs}");
        let longer = verdict(|rank| vec!["a".into(); 1 + usize::from(rank == 0)]);
        assert!(longer.contains("rank 0 has a, and rank 1 has nothing"), "{longer}");
    }
}
