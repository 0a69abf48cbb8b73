//! Which places of a row each rank has.

use std::ops::Range;

use ops::Documents;

use crate::{Error, Result};

/// Places that a rank has one after the other, at least: attention computes blocks of as many queries.
const LEAST: usize = 64;

/// Work of the busiest rank, relative to the mean, from which on rows are divided more finely.
const UNEQUAL: f64 = 1.1;

/// Divides the places of rows over ranks, so that causal attention is equal work for all: the row is cut into twice as many parts
/// as ranks, and each rank has one from its beginning and the corresponding one from its end. If the documents of packed rows
/// make that unequal, the row is cut into more of these, as few as are needed.
///
/// Returns each rank's places, in ascending order. If the ranks divide the length, all have equally many. The result depends on
/// the arguments alone.
///
/// # Errors
/// [`Error::Indivisible`]: fewer places than ranks, or a length that is not a multiple of `multiple`; with it, each rank has a
/// multiple of so many places.
///
/// ```
/// assert_eq!(context_parallel::places(8, 2, 1, None)?, [[0, 1, 6, 7], [2, 3, 4, 5]]);
/// # Ok::<(), context_parallel::Error>(())
/// ```
pub fn places(
    len: usize,
    ranks: usize,
    multiple: usize,
    documents: Option<&Documents>,
) -> Result<Vec<Vec<u32>>> {
    let refuse = |help: String| Err(Error::Indivisible { len, ranks, multiple, help });
    if ranks == 0 || multiple == 0 || !len.is_multiple_of(multiple) {
        return refuse(format!("give a length that is a multiple of {multiple}"));
    }
    let units = len / multiple;
    if units < ranks {
        return refuse(format!(
            "give rows of {} places or more, or divide them over fewer ranks",
            ranks * multiple
        ));
    }
    let parts = match documents {
        None => 1,
        Some(documents) => equal_parts(units, ranks, multiple, documents),
    };
    let mut places: Vec<Vec<u32>> = vec![Vec::new(); ranks];
    for (rank, part) in divided(units, ranks, parts) {
        places[rank].extend((part.start * multiple..part.end * multiple).map(|place| place as u32));
    }
    if places.iter().any(Vec::is_empty) {
        // There are nearly as many ranks as places.
        let own = |rank: usize| rank * units / ranks * multiple..(rank + 1) * units / ranks * multiple;
        places = (0..ranks).map(|rank| own(rank).map(|place| place as u32).collect()).collect();
    }
    Ok(places)
}

/// The parts of a row of `units`, each with its rank: `parts` times for each rank one on the way there and one on the way back.
fn divided(units: usize, ranks: usize, parts: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let count = 2 * ranks * parts;
    (0..count).map(move |part| {
        let turn = part % (2 * ranks);
        let rank = turn.min(2 * ranks - 1 - turn);
        (rank, part * units / count..(part + 1) * units / count)
    })
}

/// The least number of parts, a power of two, with which the ranks have equal work, or nearly; the best one if there is none.
fn equal_parts(units: usize, ranks: usize, multiple: usize, documents: &Documents) -> usize {
    // The work before each unit: the number of keys that the queries of all rows see.
    let len = units * multiple;
    let mut before = vec![0u64; units + 1];
    let positions = documents.positions(0..len);
    for row in positions.chunks(len.max(1)) {
        for (unit, places) in row.chunks(multiple).enumerate() {
            before[unit + 1] += places.iter().map(|position| u64::from(*position) + 1).sum::<u64>();
        }
    }
    for unit in 0..units {
        before[unit + 1] += before[unit];
    }
    let inequality = |parts: usize| {
        let mut work = vec![0; ranks];
        divided(units, ranks, parts)
            .for_each(|(rank, part)| work[rank] += before[part.end] - before[part.start]);
        work.iter().max().map_or(1.0, |most| *most as f64 * ranks as f64 / before[units].max(1) as f64)
    };
    let fits = |parts: &usize| {
        let count = 2 * ranks * parts;
        *parts == 1 || (units.is_multiple_of(count) && len / count >= LEAST)
    };
    let choices: Vec<usize> = (0..).map(|power| 1 << power).take_while(fits).collect();
    let equal = choices.iter().copied().find(|parts| inequality(*parts) <= UNEQUAL);
    let best = || choices.iter().copied().min_by(|a, b| inequality(*a).total_cmp(&inequality(*b)));
    equal.or_else(best).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn work(places: &[Vec<u32>], documents: &Documents, len: usize) -> Vec<u64> {
        let positions = documents.positions(0..len);
        let of =
            |place: &u32| positions.chunks(len).map(|row| u64::from(row[*place as usize]) + 1).sum::<u64>();
        places.iter().map(|own| own.iter().map(of).sum()).collect()
    }

    #[test]
    fn each_place_is_of_one_rank_and_numbers_are_equal_where_they_can_be() -> Result<()> {
        for (len, ranks, multiple) in
            (1..40).flat_map(|len| (1..6).map(move |ranks| (len, ranks, 1 + len % 3)))
        {
            let Ok(found) = places(len, ranks, multiple, None) else {
                assert!(len % multiple != 0 || len / multiple < ranks);
                continue;
            };
            let mut all: Vec<u32> = found.concat();
            all.sort();
            assert!(all.into_iter().eq(0..len as u32), "{len} over {ranks}");
            for own in &found {
                assert!(!own.is_empty() && own.len() % multiple == 0 && own.is_sorted());
                if (len / multiple).is_multiple_of(ranks) && (len / multiple) % (2 * ranks) == 0 {
                    assert_eq!(own.len(), len / ranks);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_row_that_is_one_document_is_equal_work() -> Result<()> {
        let documents = Documents::new([vec![4096]])?;
        let found = places(4096, 4, 1, None)?;
        let work = work(&found, &documents, 4096);
        assert!(work.iter().all(|own| *own == work[0]), "{work:?}");
        assert_eq!(places(4096, 4, 1, Some(&documents))?, found);
        Ok(())
    }

    #[test]
    fn documents_of_unequal_length_are_equal_work() -> Result<()> {
        let documents = Documents::new([[vec![2048], vec![128; 16]].concat(), vec![100, 3000, 996]])?;
        let coarse = work(&places(4096, 2, 1, None)?, &documents, 4096);
        let fine = work(&places(4096, 2, 1, Some(&documents))?, &documents, 4096);
        let inequality =
            |work: &[u64]| *work.iter().max().unwrap() as f64 / *work.iter().min().unwrap() as f64;
        assert!(inequality(&coarse) > 1.2 && inequality(&fine) < 1.2, "{coarse:?} {fine:?}");
        Ok(())
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        let said = |len, ranks, multiple| places(len, ranks, multiple, None).unwrap_err().to_string();
        assert!(said(3, 4, 1).contains("rows of 3 places cannot be divided over 4 ranks"));
        assert!(said(6, 2, 4).contains("give a length that is a multiple of 4"));
    }
}
