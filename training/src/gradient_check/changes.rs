//! Changes of parameters along random directions, which are taken back.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, Var};

use super::CheckedPart;

/// Copies of variables, which get their values back when this is dropped.
pub struct KeptVars(Vec<(Var, Tensor)>);

impl KeptVars {
    /// Copies them.
    ///
    /// # Errors
    /// Those of candle's copy.
    pub fn of<'a>(vars: impl IntoIterator<Item = &'a Var>) -> candle_core::Result<Self> {
        let kept = |var: &Var| Ok((var.clone(), var.as_detached_tensor().copy()?));
        Ok(Self(vars.into_iter().map(kept).collect::<candle_core::Result<_>>()?))
    }

    fn restore(&self) {
        for (var, value) in &self.0 {
            // The variable has the shape and dtype of its copy.
            let _ = var.set(value);
        }
    }
}

impl Drop for KeptVars {
    fn drop(&mut self) {
        self.restore();
    }
}

/// A random direction, in which each element of a parameter goes by the same distance up or down. It depends on the parameter's
/// name and the element's index in the whole parameter, so that all copies of an element go together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direction {
    /// Of the parameter's name.
    pub(super) hash: u64,
    /// Numbers the directions of one parameter.
    pub(super) number: u64,
}

impl Direction {
    fn sign(self, element: usize) -> f64 {
        let mut z = self.hash ^ self.number.wrapping_mul(0xd6e8_feb8_6659_fd93);
        z = z.wrapping_add((element as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) >> 63 == 0 { 1.0 } else { -1.0 }
    }
}

/// FNV-1a.
pub(super) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The elements that a part has in common with ranges of the whole parameter (ascending): index in the part, index in the whole.
pub(super) fn common(part: &[Range<usize>], ranges: &[Range<usize>], mut f: impl FnMut(usize, usize)) {
    let (mut begin, mut next) = (0, 0);
    for held in part {
        // Ranges that end before this part of the parameter concern none after it either.
        while ranges.get(next).is_some_and(|range| range.end <= held.start) {
            next += 1;
        }
        for range in ranges[next..].iter().take_while(|range| range.start < held.end) {
            for element in range.start.max(held.start)..range.end.min(held.end) {
                f(begin + element - held.start, element);
            }
        }
        begin += held.len();
    }
}

/// A part and what is to change of it.
pub(super) struct Change {
    var: Var,
    start: Vec<f64>,
    /// Index in the part, and the signed distance.
    by: Vec<(usize, f64)>,
}

impl Change {
    /// Prepares to move elements in `ranges` of the whole parameter by `distance`.
    pub(super) fn new(
        part: &CheckedPart,
        ranges: &[Range<usize>],
        direction: Direction,
        distance: f64,
    ) -> candle_core::Result<Self> {
        let mut by = Vec::new();
        common(&part.elements, ranges, |own, element| by.push((own, direction.sign(element) * distance)));
        Ok(Self { var: part.var.clone(), start: numbers(&part.var.as_detached_tensor())?, by })
    }

    fn moved(&self, own: usize, by: f64) -> f64 {
        let to = self.start[own] + by;
        if self.var.dtype() == DType::F64 { to } else { f64::from(to as f32) }
    }

    /// Sets the variable to its values moved forward (1) or back (-1).
    pub(super) fn apply(&self, way: f64) -> candle_core::Result<()> {
        let mut values = self.start.clone();
        for &(own, by) in &self.by {
            values[own] = self.moved(own, way * by);
        }
        let values = Tensor::from_vec(values, self.var.shape(), &Device::Cpu)?.to_dtype(self.var.dtype())?;
        self.var.set(&values.to_device(self.var.device())?)
    }

    /// The difference of the loss between both ways that a gradient says: by the numbers as they are rounded.
    pub(super) fn predicted(&self, gradient: &Tensor) -> candle_core::Result<f64> {
        let gradient = numbers(gradient)?;
        let of = |&(own, by): &(usize, f64)| gradient[own] * (self.moved(own, by) - self.moved(own, -by));
        Ok(self.by.iter().map(of).sum())
    }

    pub(super) fn var(&self) -> &Var {
        &self.var
    }
}

/// All numbers of a tensor, in f64.
pub(super) fn numbers(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}
