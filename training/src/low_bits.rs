//! What a parameter of 16 bits has no room for. It is kept beside the parameter, so that steps are those of an f32 parameter: a
//! step is often smaller than half the distance to the next number of 16 bits, and would round to nothing.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Tensor, Var, bail};
use half::{bf16, f16};
use ops::kernels::{Narrow, vectorized};

use crate::state::{DeferredCopy, on_host, state_dtype};

/// Name of the state in a saved file, after the parameter's.
pub(crate) const LOW_BITS: &str = "low_bits";

/// A number of 16 bits with 16 more, which together are an f32.
pub(crate) trait Split: Narrow {
    /// Rounds to 16 bits.
    fn round_into(wide: &[f32], high: &mut [Self]);

    /// The 16 bits by which `wide` differs from `rounded`, which it was rounded to.
    fn rest(wide: f32, rounded: f32) -> i16;

    /// The inverse of [`rest`](Self::rest).
    fn whole(rounded: f32, rest: i16) -> f32;

    fn of_bits(bits: u16) -> Self;

    fn bits(self) -> u16;

    /// The f32 numbers of both halves.
    fn join_into(high: &[Self], low: &[Self], wide: &mut [f32]) {
        Self::widen_into(high, wide);
        vectorized!({
            for (wide, low) in wide.iter_mut().zip(low) {
                *wide = Self::whole(*wide, low.bits() as i16);
            }
        });
    }

    /// Both halves of f32 numbers.
    fn split_into(wide: &[f32], high: &mut [Self], low: &mut [Self]) {
        Self::round_into(wide, high);
        Self::rest_into(wide, high, low);
    }

    /// The lower halves of f32 numbers that were rounded to `high`.
    fn rest_into(wide: &[f32], high: &[Self], low: &mut [Self]) {
        let mut rounded = vec![0.0; high.len()];
        Self::widen_into(high, &mut rounded);
        vectorized!({
            for ((low, &wide), &rounded) in low.iter_mut().zip(wide).zip(&rounded) {
                *low = Self::of_bits(Self::rest(wide, rounded) as u16);
            }
        });
    }
}

impl Split for bf16 {
    /// Ties are rounded away from 0, so that the rest of every number has 16 bits.
    fn round_into(wide: &[f32], high: &mut [Self]) {
        let round = |x: f32| {
            let bits = x.to_bits();
            let rounded = if x.is_nan() { bits | 0x40_0000 } else { bits.wrapping_add(0x8000) };
            Self::from_bits((rounded >> 16) as u16)
        };
        vectorized!({ high.iter_mut().zip(wide).for_each(|(high, &wide)| *high = round(wide)) });
    }

    #[inline(always)]
    fn rest(wide: f32, rounded: f32) -> i16 {
        // The bits of an f32 count its magnitudes. Another device may have rounded a tie down.
        let rest = (wide.to_bits() as i32).wrapping_sub(rounded.to_bits() as i32);
        if wide.is_nan() { 0 } else { rest.clamp(i16::MIN.into(), i16::MAX.into()) as i16 }
    }

    #[inline(always)]
    fn whole(rounded: f32, rest: i16) -> f32 {
        f32::from_bits((rounded.to_bits() as i32).wrapping_add(rest.into()) as u32)
    }

    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }

    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// The unit of an f16's rest: 2^-16 of the distance to the next f16. It keeps all digits of an f32 above 2^-14.
#[inline(always)]
fn unit(rounded: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    /// 2^-14, below which f16 are equally far apart, and the exponent of the largest f16.
    const RANGE: (f32, f32) = (6.103_515_6e-5, 32768.0);
    /// 2^-26.
    const REST: f32 = 1.490_116_1e-8;
    f32::from_bits(rounded.to_bits() & EXPONENT).clamp(RANGE.0, RANGE.1) * REST
}

impl Split for f16 {
    fn round_into(wide: &[f32], high: &mut [Self]) {
        Self::narrow_into(wide, high);
    }

    #[inline(always)]
    fn rest(wide: f32, rounded: f32) -> i16 {
        // NaN, as that of infinite numbers, becomes 0.
        ((wide - rounded) / unit(rounded)).round_ties_even() as i16
    }

    #[inline(always)]
    fn whole(rounded: f32, rest: i16) -> f32 {
        rounded + f32::from(rest) * unit(rounded)
    }

    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }

    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// The lower halves of one parameter's numbers. None for parameters of other dtypes, and before the first step.
#[derive(Debug, Default)]
pub(crate) enum LowBits {
    #[default]
    None,
    /// On a CPU: bit patterns, as numbers of the parameter's dtype, which all that copies and sends tensors knows.
    Host(Arc<CpuStorage>),
    /// On other devices: what was rounded off, in f32.
    Device(Tensor),
    /// Bit patterns that were loaded, until the first step on such a device: the parameter may be loaded after its state.
    Loaded(Tensor),
}

pub(crate) fn is_narrow(var: &Var) -> bool {
    matches!(var.dtype(), DType::F16 | DType::BF16)
}

impl LowBits {
    /// The lower halves to step a parameter on a CPU with; `None` if it has none.
    pub(crate) fn on_host(&mut self, var: &Var) -> candle_core::Result<Option<&mut CpuStorage>> {
        if !is_narrow(var) {
            return Ok(None);
        }
        if !matches!(self, Self::Host(_)) {
            let len = var.elem_count();
            *self = Self::Host(Arc::new(match var.dtype() {
                DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
                _ => CpuStorage::BF16(vec![bf16::ZERO; len]),
            }));
        }
        match self {
            Self::Host(storage) => Ok(Some(Arc::make_mut(storage))),
            _ => bail!("the low bits of a parameter were lost"),
        }
    }

    /// The parameter in the dtype of its steps.
    pub(crate) fn wide(&self, var: &Var) -> candle_core::Result<Tensor> {
        let param = var.as_detached_tensor();
        match self {
            Self::Device(rest) => param.to_dtype(DType::F32)? + rest,
            Self::Loaded(low) => joined(&param, low),
            _ => param.to_dtype(state_dtype(var)),
        }
    }

    /// Sets a parameter after a step, and keeps what it has no room for.
    pub(crate) fn set(&mut self, var: &Var, wide: &Tensor) -> candle_core::Result<()> {
        let rounded = wide.to_dtype(var.dtype())?;
        if is_narrow(var) {
            *self = Self::Device((wide - rounded.to_dtype(DType::F32)?)?);
        }
        var.set(&rounded)
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self, var: &Var) -> usize {
        let each = match self {
            Self::None => 0,
            Self::Host(_) | Self::Loaded(_) => 2,
            Self::Device(_) => 4,
        };
        each * var.elem_count()
    }

    /// Copies them later, on any thread: bit patterns in the parameter's shape and dtype.
    pub(crate) fn to_tensor_later(&self, var: &Var) -> candle_core::Result<Option<DeferredCopy>> {
        Ok(match self {
            Self::None => None,
            Self::Host(storage) => Some(DeferredCopy::of_storage(storage.clone(), var.shape(), var.dtype())),
            Self::Loaded(low) => Some(DeferredCopy::done(low.copy()?)),
            Self::Device(_) => Some(DeferredCopy::done(low_bits(&self.wide(var)?, var)?)),
        })
    }

    /// Takes those of a parameter from saved state. State of another dtype than the parameter's says nothing about it.
    pub(crate) fn load(
        state: &HashMap<String, Tensor>,
        name: &str,
        var: &Var,
    ) -> candle_core::Result<(Self, Option<String>)> {
        let key = format!("{name}.{LOW_BITS}");
        let Some(low) = state.get(&key) else { return Ok((Self::None, None)) };
        let fits = is_narrow(var) && low.dtype() == var.dtype() && low.dims() == var.dims();
        let low = match fits {
            false => Self::None,
            true => {
                let low = low.to_device(&Device::Cpu)?.force_contiguous()?;
                match on_host(var) {
                    true => Self::Host(Arc::new(numbers(&low)?)),
                    false => Self::Loaded(low),
                }
            }
        };
        Ok((low, Some(key)))
    }
}

/// The numbers of a contiguous tensor of 16 bits on a CPU.
fn numbers(tensor: &Tensor) -> candle_core::Result<CpuStorage> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F16 => CpuStorage::F16(flat.to_vec1()?),
        _ => CpuStorage::BF16(flat.to_vec1()?),
    })
}

/// A parameter of 16 bits with its lower halves, in f32.
fn joined(param: &Tensor, low: &Tensor) -> candle_core::Result<Tensor> {
    fn run<P: Split>(high: &Tensor, low: &Tensor) -> candle_core::Result<Vec<f32>> {
        let [high, low] = [high, low].map(|half| half.flatten_all()?.to_vec1::<P>());
        let (high, low) = (high?, low?);
        let mut wide = vec![0.0; high.len()];
        P::join_into(&high, &low, &mut wide);
        Ok(wide)
    }
    let high = param.to_device(&Device::Cpu)?;
    let wide = if high.dtype() == DType::F16 { run::<f16>(&high, low)? } else { run::<bf16>(&high, low)? };
    Tensor::from_vec(wide, param.shape(), param.device())
}

/// The lower halves of a parameter's numbers.
fn low_bits(wide: &Tensor, var: &Var) -> candle_core::Result<Tensor> {
    fn run<P: Split>(wide: &Tensor, high: &Tensor) -> candle_core::Result<Tensor> {
        let (wide, numbers) = (wide.flatten_all()?.to_vec1::<f32>()?, high.flatten_all()?.to_vec1::<P>()?);
        let mut low = numbers.clone();
        P::rest_into(&wide, &numbers, &mut low);
        Tensor::from_vec(low, high.shape(), &Device::Cpu)
    }
    let (wide, high) = (wide.to_device(&Device::Cpu)?, var.as_detached_tensor().to_device(&Device::Cpu)?);
    if var.dtype() == DType::F16 { run::<f16>(&wide, &high) } else { run::<bf16>(&wide, &high) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back<P: Split>(wide: &[f32]) -> Vec<f32> {
        let mut high = vec![P::zeroed(); wide.len()];
        let (mut low, mut found) = (high.clone(), vec![0.0; wide.len()]);
        P::split_into(wide, &mut high, &mut low);
        P::join_into(&high, &low, &mut found);
        found
    }

    trait Zeroed {
        fn zeroed() -> Self;
    }

    impl<P: Split> Zeroed for P {
        fn zeroed() -> Self {
            Self::of_bits(0)
        }
    }

    /// Every f32 comes back from its halves, also ties and the neighbours of powers of two.
    #[test]
    fn both_halves_are_the_number() {
        let mut bits: Vec<u32> = (0..200_000u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        for power in 0..255u32 {
            for near in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_8000] {
                bits.extend([(power << 23).wrapping_add(near), (power << 23).wrapping_sub(near)]);
            }
        }
        let all: Vec<f32> = bits.into_iter().map(f32::from_bits).filter(|x| x.is_finite()).collect();
        let of = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(of(&there_and_back::<bf16>(&all)), of(&all));
        // An f16 has a smaller range: below 2^-14 its rest is a multiple of 2^-40.
        let normal: Vec<f32> =
            all.iter().copied().filter(|x| (6.2e-5..65_000.0).contains(&x.abs())).collect();
        assert!(normal.len() > 10_000);
        assert_eq!(of(&there_and_back::<f16>(&normal)), of(&normal));
        let small: Vec<f32> = (0..1000).map(|i| i as f32 * 1.7e-8).collect();
        for (found, small) in there_and_back::<f16>(&small).iter().zip(&small) {
            assert!((found - small).abs() < 1e-12, "{found} {small}");
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        let odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        for found in [there_and_back::<bf16>(&odd), there_and_back::<f16>(&odd)] {
            assert!(found[0] == odd[0] && found[1] == odd[1] && found[2].is_nan(), "{found:?}");
        }
        assert!(there_and_back::<bf16>(&[f32::from_bits(0x7fff_ffff)])[0].is_nan());
    }
}
