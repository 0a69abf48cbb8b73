//! Comparison of lines of text between ranks: finds the first line that differs, and on which rank.

use crate::api::communicator::group::all_gather_words;
use crate::base::digest::Digest;
use crate::{Communicator, Result, all_gather_object};

/// How many lines are compared at once after a difference was found.
const MAX_LINES: usize = 1 << 16;

/// The first line that is not the same on all ranks. Ranks are those of the whole job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {odd_rank} has {odd}, and rank {rank} has {expected}")]
#[non_exhaustive]
pub struct LineDifference {
    /// A rank that differs from most others.
    pub odd_rank: usize,
    /// Its line; `nothing` if it has fewer lines.
    pub odd: String,
    /// A rank to compare it with.
    pub rank: usize,
    /// That rank's line.
    pub expected: String,
    /// The index of the line, from 0. The lines before it are equal.
    pub place: usize,
}

/// Compares lines of text that should be the same on every rank of a party, such as descriptions of a model's
/// parameters. Returns `None` if they are equal, else a difference that is the same on every rank. Every rank of the
/// group must call it; ranks that pass the same number as `party` are compared with each other.
///
/// # Cost
/// An all-gather of 24 bytes a rank. Only where lines differ: 8 bytes for each line up to the first that differs (in
/// blocks of 65,536 lines), and then that line.
///
/// # Errors
/// Those of [`Communicator::run`].
///
/// ```
/// use comm::internal::line_difference;
/// use comm::{Communicator, Local};
///
/// let said = Local::run(3, |comm| {
///     let width = if comm.rank() == 1 { 128 } else { 64 };
///     let lines = ["fc1 (64, 64)".to_string(), format!("fc2 (64, {width})")];
///     Ok(line_difference(comm, 0, &lines)?.map(|difference| difference.to_string()))
/// })?;
/// assert_eq!(said, vec![Some("rank 1 has fc2 (64, 128), and rank 0 has fc2 (64, 64)".to_string()); 3]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn line_difference(
    comm: &dyn Communicator,
    party: usize,
    lines: &[String],
) -> Result<Option<LineDifference>> {
    let digests: Vec<i64> = lines.iter().map(|line| Digest::new().text(line).value().cast_signed()).collect();
    let whole = digests.iter().fold(Digest::new(), |digest, line| digest.word(line.cast_unsigned()));
    let own = [party as i64, lines.len() as i64, whole.value().cast_signed()];
    let all = all_gather_words(comm, &own)?;
    let Some((rank, odd_rank)) = odd_of_a_party(&all) else { return Ok(None) };

    let longest = all.iter().map(|answer| answer[1]).max().unwrap_or(0);
    let mut place = usize::try_from(longest).unwrap_or(0);
    let mut padded = digests;
    padded.resize(place, 0);
    for (block, own) in padded.chunks(MAX_LINES).enumerate() {
        let all = all_gather_words(comm, own)?;
        if let Some(line) = (0..own.len()).find(|&line| all[rank][line] != all[odd_rank][line]) {
            place = block * MAX_LINES + line;
            break;
        }
    }

    let all = all_gather_object(comm, &lines.get(place).cloned())?;
    let line = |rank: usize| all[rank].clone().unwrap_or_else(|| "nothing".into());
    let number = |rank: usize| comm.world_ranks()[rank];
    let (odd, expected) = (line(odd_rank), line(rank));
    Ok(Some(LineDifference { odd_rank: number(odd_rank), odd, rank: number(rank), expected, place }))
}

/// Finds the first party with different answers, and returns a usual and an odd rank of it. An answer begins with the
/// party.
fn odd_of_a_party(all: &[Vec<i64>]) -> Option<(usize, usize)> {
    all.iter().find_map(|first| {
        let party: Vec<usize> = (0..all.len()).filter(|&rank| all[rank][0] == first[0]).collect();
        let answers: Vec<&Vec<i64>> = party.iter().map(|&rank| &all[rank]).collect();
        odd_one(&answers).map(|(rank, odd_rank)| (party[rank], party[odd_rank]))
    })
}

/// Returns the index of the first of the most frequent answers, and that of the first answer that differs from it.
/// `None` if all are equal.
///
/// ```
/// assert_eq!(comm::internal::odd_one(&[5, 5, 5]), None);
/// assert_eq!(comm::internal::odd_one(&[4, 5, 5]), Some((1, 0)));
/// assert_eq!(comm::internal::odd_one(&[5, 4]), Some((0, 1)));
/// ```
pub fn odd_one<T: PartialEq>(answers: &[T]) -> Option<(usize, usize)> {
    if answers.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    let party = |answer: &T| answers.iter().filter(|other| *other == answer).count();
    let largest = answers.iter().map(party).max()?;
    let expected = answers.iter().position(|answer| party(answer) == largest)?;
    let odd = answers.iter().position(|answer| *answer != answers[expected])?;
    Some((expected, odd))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Local;

    fn said(ranks: usize, party: fn(usize) -> usize, lines: fn(usize) -> Vec<String>) -> Option<String> {
        let said = Local::run(ranks, |comm| line_difference(comm, party(comm.rank()), &lines(comm.rank())));
        let said = said.unwrap();
        assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
        said[0].as_ref().map(|difference| format!("{}: {difference}", difference.place))
    }

    #[test]
    fn all_ranks_get_the_same_verdict() {
        assert_eq!(said(3, |_| 0, |_| vec!["a".into(), "b".into()]), None);
        assert_eq!(said(3, |_| 0, |_| vec![]), None);
        let differs = said(3, |_| 0, |rank| vec!["a".into(), format!("b{}", rank == 1), "c".into()]);
        assert_eq!(differs.unwrap(), "1: rank 1 has btrue, and rank 0 has bfalse");
        let longer = said(3, |_| 0, |rank| vec!["a".into(); 1 + usize::from(rank == 0)]);
        assert_eq!(longer.unwrap(), "1: rank 0 has a, and rank 1 has nothing");
        let late = |rank: usize| {
            (0..70_000)
                .map(|line| (line * 2 + usize::from(line == 69_000 && rank == 2)).to_string())
                .collect()
        };
        let differs = said(3, |_| 0, late);
        assert_eq!(differs.unwrap(), "69000: rank 2 has 138001, and rank 0 has 138000");
    }

    #[test]
    fn parties_are_compared_among_themselves() {
        assert_eq!(said(4, |rank| rank % 2, |rank| vec![format!("part {}", rank % 2)]), None);
        let differs = said(6, |rank| rank % 2, |rank| vec![format!("part {}", rank % 2 + rank / 5)]);
        assert_eq!(differs.unwrap(), "0: rank 5 has part 2, and rank 1 has part 1");
    }

    #[test]
    fn the_minority_is_odd() {
        assert_eq!(odd_one(&[5, 5, 4]), Some((0, 2)));
        assert_eq!(odd_one(&[1, 2, 3]), Some((0, 1)));
        assert_eq!(odd_one::<u8>(&[]), None);
    }
}
