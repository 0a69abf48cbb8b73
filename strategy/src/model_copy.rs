//! Copies of a model, which share the writing of a checkpoint.

use std::ops::Range;

use comm::Communicator;

use crate::Piece;

/// One of the copies of a model, which share the writing of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelCopy {
    /// Its number, from 0.
    pub number: usize,
    /// How many copies there are.
    pub of: usize,
}

impl ModelCopy {
    /// The only copy, which writes all of the model.
    pub const ONLY: Self = Self { number: 0, of: 1 };

    /// Returns the copy of a rank, given the group of the copies; without one there is no other.
    pub fn along(copies: Option<&dyn Communicator>) -> Self {
        copies.map_or(Self::ONLY, |copies| Self { number: copies.rank(), of: copies.world_size() })
    }

    /// Returns for each piece which of its elements this copy writes; `None`: the piece is not written by it. Each copy
    /// writes an equal number of elements, in the order of the pieces; buffers, which differ between copies, are those of the first.
    pub(crate) fn shares(self, pieces: &[Piece]) -> Vec<Option<Range<usize>>> {
        let counts =
            |piece: &Piece| if piece.is_described() && !piece.is_buffer { piece.region.len() } else { 0 };
        let all: usize = pieces.iter().map(counts).sum();
        let bound = |number: usize| (all as u128 * number as u128 / self.of as u128) as usize;
        let (own, mut begin) = (bound(self.number)..bound(self.number + 1), 0);
        let share = |piece: &Piece| {
            let place = begin..begin + counts(piece);
            begin = place.end;
            let (start, end) = (own.start.max(place.start), own.end.min(place.end));
            match place.is_empty() {
                true => (piece.is_described() && self.number == 0).then(|| 0..piece.region.len()),
                false => (start < end).then(|| start - place.start..end - place.start),
            }
        };
        pieces.iter().map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    fn piece(dims: &[usize], is_buffer: bool) -> Piece {
        let var = Var::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        Piece { is_buffer, ..Piece::whole("p".into(), var) }
    }

    #[test]
    fn copies_write_each_element_once_and_equally_many() {
        let pieces = [
            piece(&[2, 5], false),
            piece(&[0, 3], false),
            piece(&[7], false),
            piece(&[], false),
            piece(&[4], true),
        ];
        for of in [1, 2, 3, 5, 18, 40] {
            let shares: Vec<_> = (0..of).map(|number| ModelCopy { number, of }.shares(&pieces)).collect();
            for (place, piece) in pieces.iter().enumerate() {
                let mut end = 0;
                for share in shares.iter().filter_map(|shares| shares[place].clone()) {
                    assert_eq!(share.start, end);
                    end = share.end;
                }
                assert_eq!(end, piece.region.len());
            }
            let trained = |shares: &Vec<Option<Range<usize>>>| {
                shares[..4].iter().flatten().map(Range::len).sum::<usize>()
            };
            assert!(
                shares.iter().map(trained).all(|count| count == 18 / of || count == 18usize.div_ceil(of))
            );
            // What has no elements, and what is not trained, is of the first copy.
            assert!(
                shares
                    .iter()
                    .enumerate()
                    .all(|(number, shares)| [1, 4].iter().all(|&at| shares[at].is_some() == (number == 0)))
            );
        }
    }
}
