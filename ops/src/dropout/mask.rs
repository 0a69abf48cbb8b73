//! Dropout masks.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor, bail};
use half::{bf16, f16};
use sampler::split_mix;

use crate::cuda::DeviceMask;
use crate::dense::dense;
use crate::{DividedRows, Error, Result};

/// Dropout mask of a tensor, computed from keys.
///
/// A line is the tensor's last dimension; each row (first dimension) has the same number of lines.
#[derive(Debug, Clone)]
pub(crate) struct Mask {
    keys: Keys,
    /// An element is kept if its 32 random bits are at least this.
    threshold: u64,
    scale: f64,
}

#[derive(Debug, Clone)]
enum Keys {
    /// One key for the whole tensor.
    All(u64),
    /// One key for each row. `before`: lines of the whole row before the tensor's first. `features`: offset of the
    /// tensor's line in the whole line, and width of the whole line, if lines are divided. `divided`: which of the whole row's
    /// lines those after `before` are, if rows are divided by position.
    Rows { keys: Vec<u64>, before: usize, features: Option<(usize, usize)>, divided: Option<DividedRows> },
}

/// The mask of one line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line {
    key: u64,
    first: u64,
    threshold: u64,
    scale: f64,
}

impl Mask {
    /// The same mask for a tensor of this shape on a device.
    pub(crate) fn on_device(&self, dims: &[usize], device: &Device) -> candle_core::Result<DeviceMask> {
        let (rows, width) = Self::rows_and_width(dims);
        let count = dims.iter().product::<usize>() / width.max(1);
        let (keys, lines, before, (first, whole)) = match &self.keys {
            Keys::All(key) => (std::slice::from_ref(key), count, 0, (0, width)),
            Keys::Rows { keys, before, features, .. } => {
                (&keys[..], count / rows, *before, features.unwrap_or((0, width)))
            }
        };
        let keys: Vec<i64> = keys.iter().map(|key| key.cast_signed()).collect();
        let keys = Tensor::new(keys, device)?;
        let (threshold, scale) = (self.threshold, self.scale);
        Ok(DeviceMask { keys, lines, width, before, first, whole, threshold, scale })
    }

    fn rows_and_width(dims: &[usize]) -> (usize, usize) {
        match dims {
            [] | [_] => (dims.iter().product(), 1),
            [rows, .., width] => (*rows, *width),
        }
    }

    pub(super) fn of_all(p: f64, key: u64) -> Self {
        Self::new(p, Keys::All(key))
    }

    pub(super) fn of_rows(p: f64, keys: Vec<u64>, before: usize, features: Option<(usize, usize)>) -> Self {
        Self::new(p, Keys::Rows { keys, before, features, divided: None })
    }

    /// The same for a tensor of this shape whose lines are some of the places that this rank has of divided rows.
    pub(super) fn of_places(mut self, rows: &DividedRows, dims: &[usize]) -> Result<Self> {
        if let Keys::Rows { before, divided, .. } = &mut self.keys {
            let lines =
                dims.iter().rev().skip(1).product::<usize>() / dims.first().copied().unwrap_or(1).max(1);
            if dims.len() < 3 || *before + lines > rows.places().len() {
                let own = rows.places().len();
                let problem =
                    format!("a tensor of shape {dims:?} after {before} places: this rank has {own} of a row");
                return Err(Error::UnfitDivision { operation: "dropout", problem });
            }
            *divided = Some(rows.clone());
        }
        Ok(self)
    }

    /// Whether its lines are not consecutive.
    pub(super) fn is_divided(&self) -> bool {
        matches!(&self.keys, Keys::Rows { divided: Some(_), .. })
    }

    fn new(p: f64, keys: Keys) -> Self {
        let threshold = (p * (1u64 << 32) as f64).round() as u64;
        Self { keys, threshold, scale: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 } }
    }

    /// The mask of line `at` of a tensor whose rows have `lines` lines of this width each.
    #[inline(always)]
    pub(crate) fn line(&self, at: usize, lines: usize, width: usize) -> Line {
        let (key, first) = match &self.keys {
            Keys::All(key) => (*key, at * width),
            Keys::Rows { keys, before, features, divided } => {
                let (first, width) = features.unwrap_or((0, width));
                let line = before + at % lines;
                let line = divided.as_ref().map_or(line, |rows| rows.places()[line] as usize);
                (keys[at / lines], line * width + first)
            }
        };
        Line { key, first: first as u64, threshold: self.threshold, scale: self.scale }
    }

    /// Masks and widths of the lines of a tensor of this shape.
    fn lines(&self, dims: &[usize]) -> impl Iterator<Item = (Line, usize)> {
        let (rows, width) = Self::rows_and_width(dims);
        let count = dims.iter().product::<usize>() / width.max(1);
        (0..count).map(move |at| (self.line(at, count / rows, width), width))
    }

    /// The factor of each element of a tensor of this shape.
    pub(crate) fn factors(&self, dims: &[usize]) -> Vec<f64> {
        self.lines(dims).flat_map(|(line, width)| (0..width).map(move |at| line.factor(at))).collect()
    }

    fn applied<T: Copy>(&self, x: &[T], dims: &[usize], times: impl Fn(T, f64) -> T) -> Vec<T> {
        let mut out = Vec::with_capacity(x.len());
        let mut rest = x;
        for (line, width) in self.lines(dims) {
            let (own, others) = rest.split_at(width);
            out.extend(own.iter().enumerate().map(|(at, &x)| times(x, line.factor(at))));
            rest = others;
        }
        out
    }
}

impl Line {
    /// The factor of the element at `index` of the line.
    #[inline(always)]
    pub(crate) fn factor(self, index: usize) -> f64 {
        let bits = split_mix(self.key, self.first + index as u64) >> 32;
        if bits >= self.threshold { self.scale } else { 0.0 }
    }
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let dims = layout.dims();
        let out = match storage {
            CpuStorage::F64(_) => {
                CpuStorage::F64(self.applied(dense(storage, layout)?, dims, |x: f64, factor| x * factor))
            }
            CpuStorage::F32(_) => {
                CpuStorage::F32(self.applied(dense(storage, layout)?, dims, |x, factor| x * factor as f32))
            }
            CpuStorage::F16(_) => {
                let times = |x: f16, factor| f16::from_f32(x.to_f32() * factor as f32);
                CpuStorage::F16(self.applied(dense(storage, layout)?, dims, times))
            }
            CpuStorage::BF16(_) => {
                let times = |x: bf16, factor| bf16::from_f32(x.to_f32() * factor as f32);
                CpuStorage::BF16(self.applied(dense(storage, layout)?, dims, times))
            }
            _ => bail!("dropout: {:?} is no dtype of real numbers", storage.dtype()),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        gradient.contiguous()?.apply_op1_no_bwd(self).map(Some)
    }
}
