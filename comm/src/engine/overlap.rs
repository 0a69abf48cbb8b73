//! Overlap checks: which tensors share memory.

use std::ops::Range;
use std::ptr;

use candle_core::Tensor;

/// Storage and element range of a contiguous tensor. Only spans of tensors that live at the same time may be compared.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    /// Address of the storage, the same for all views of it.
    storage: usize,
    pub(crate) elements: Range<usize>,
}

impl Span {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        // One guard at a time: with two, the second could wait for a writer that waits for the first.
        let (storage, layout) = tensor.storage_and_layout();
        let start = layout.start_offset();
        let elements = start..start + layout.shape().elem_count();
        Self { storage: ptr::from_ref(&*storage).addr(), elements }
    }

    fn begin(&self) -> (usize, usize) {
        (self.storage, self.elements.start)
    }

    fn end(&self) -> (usize, usize) {
        (self.storage, self.elements.end)
    }

    pub(crate) fn shares_storage(&self, other: &Self) -> bool {
        self.storage == other.storage
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (mine, theirs) = (&self.elements, &other.elements);
        let within = mine.start.max(theirs.start)..mine.end.min(theirs.end);
        self.shares_storage(other) && !within.is_empty()
    }
}

/// Number of a tensor, its span, and whether it is written.
type Entry = (usize, Span, bool);

/// Returns the numbers of two tensors that overlap and of which at least one is written, if there are any. Each tensor
/// is given with whether it is written.
pub(crate) fn first_overlap<'a>(tensors: impl Iterator<Item = (&'a Tensor, bool)>) -> Option<(usize, usize)> {
    let numbered = tensors.enumerate().filter(|(_, (tensor, _))| tensor.elem_count() > 0);
    let mut entries: Vec<Entry> =
        numbered.map(|(number, (tensor, writes))| (number, Span::of(tensor), writes)).collect();
    entries.sort_unstable_by_key(|(_, span, _)| span.begin());
    // Of the earlier entries, which begin no later, the one that ends last: of all, and of those written.
    let (mut of_all, mut of_written) = (None::<&Entry>, None::<&Entry>);
    for entry in &entries {
        let (number, span, writes) = entry;
        if let Some((other, before, _)) = if *writes { of_all } else { of_written }
            && before.overlaps(span)
        {
            return Some((*number.min(other), *number.max(other)));
        }
        let is_further = |known: Option<&Entry>| known.is_none_or(|(_, known, _)| known.end() < span.end());
        if is_further(of_all) {
            of_all = Some(entry);
        }
        if *writes && is_further(of_written) {
            of_written = Some(entry);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn views_overlap_where_they_have_an_element_in_common() {
        let whole = Tensor::zeros(10, DType::F32, &Device::Cpu).unwrap();
        let other = whole.copy().unwrap();
        let view = |start, len| Span::of(&whole.narrow(0, start, len).unwrap());
        assert!(view(0, 5).overlaps(&view(4, 2)) && view(4, 2).overlaps(&view(0, 5)));
        assert!(!view(0, 5).overlaps(&view(5, 5)) && view(0, 5).shares_storage(&view(5, 5)));
        assert!(!view(3, 0).overlaps(&view(0, 10)));
        assert!(!Span::of(&other).overlaps(&view(0, 10)) && !Span::of(&other).shares_storage(&view(0, 1)));
    }

    /// Compared with a check of all pairs.
    #[test]
    fn what_is_written_clashes_with_all_that_it_overlaps() {
        let storages = [0, 1].map(|_| Tensor::zeros(12, DType::F32, &Device::Cpu).unwrap());
        let mut state = 1u32;
        let mut number = |below: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as usize % below
        };
        let mut found = [0, 0];
        for _ in 0..2000 {
            let tensors: Vec<(Tensor, bool)> = (0..1 + number(4))
                .map(|_| {
                    let (start, storage) = (number(12), &storages[number(2)]);
                    (storage.narrow(0, start, number(5).min(12 - start)).unwrap(), number(2) == 0)
                })
                .collect();
            let clashes = |a: usize, b: usize| {
                let ((one, write), (other, also)) = (&tensors[a], &tensors[b]);
                (*write || *also) && Span::of(one).overlaps(&Span::of(other))
            };
            let any = (0..tensors.len()).any(|b| (0..b).any(|a| clashes(a, b)));
            let got = first_overlap(tensors.iter().map(|(tensor, writes)| (tensor, *writes)));
            assert_eq!(got.is_some(), any, "{tensors:?}");
            assert!(got.is_none_or(|(a, b)| a < b && clashes(a, b)), "{tensors:?}");
            found[usize::from(any)] += 1;
        }
        assert!(found[0] > 200 && found[1] > 200, "{found:?}");
    }
}
