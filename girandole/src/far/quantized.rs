//! Numbers of a few bits, in blocks that have a scale each.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation};
use half::f16;
use serde::{Deserialize, Serialize};

use crate::Result;

/// Elements with one scale.
pub(super) const BLOCK: usize = 128;

/// What is sent of each number. What is not sent is added to the next change (error feedback).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FarPrecision {
    /// All of it, also of f64.
    #[default]
    F32,
    /// 16 bits (f16).
    F16,
    /// 8 bits, in blocks of 128 with a scale each.
    Int8,
    /// 4 bits, in blocks of 128 with a scale each.
    Int4,
}

impl FarPrecision {
    pub(super) fn bits(self) -> Option<u32> {
        match self {
            Self::F32 => None,
            Self::F16 => Some(16),
            Self::Int8 => Some(8),
            Self::Int4 => Some(4),
        }
    }
}

/// A tensor in few bits: each number is a whole multiple of its block's scale, or in 16 bits an f16.
pub(super) struct Quantized {
    bits: u32,
    like: Tensor,
    /// None in 16 bits.
    scales: Vec<f32>,
    /// Two numbers of 4 bits in each, the first in the lower half.
    codes: Vec<u8>,
}

impl Quantized {
    /// Rounds a tensor of one dimension, a multiple of [`BLOCK`].
    pub(super) fn new(tensor: &Tensor, bits: u32) -> Result<Self> {
        let numbers = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        if bits == 16 {
            let codes = numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
            return Ok(Self { bits, like: tensor.clone(), scales: Vec::new(), codes });
        }
        let most = (1i32 << (bits - 1)) - 1;
        let mut scales = Vec::with_capacity(numbers.len() / BLOCK);
        let mut codes = Vec::with_capacity(numbers.len() * bits as usize / 8);
        for block in numbers.chunks(BLOCK) {
            // A block with a number that is not finite is not finite as a whole. Of one of zeros, or of numbers that are too small for a
            // scale, nothing is sent.
            let scale = match block.iter().fold(0f32, |most, x| most.max(x.abs())) / most as f32 {
                _ if !block.iter().all(|x| x.is_finite()) => f32::NAN,
                scale if scale.is_normal() => scale,
                _ => 0.0,
            };
            let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let code = |x: f32| (x * factor).round().clamp(-(most as f32), most as f32) as i8;
            scales.push(scale);
            match bits {
                4 => codes.extend(block.chunks(2).map(|pair| {
                    let [low, high] = [0, 1].map(|at| pair.get(at).map_or(0, |x| code(*x)) as u8 & 0xf);
                    low | high << 4
                })),
                _ => codes.extend(block.iter().map(|x| code(*x) as u8)),
            }
        }
        Ok(Self { bits, like: tensor.clone(), scales, codes })
    }

    /// The numbers as they are received.
    pub(super) fn values(&self) -> Result<Tensor> {
        Ok(self.tensor(self.numbers(&self.scales, &self.codes))?)
    }

    /// A range of the numbers, which begins and ends with a block.
    pub(super) fn blocks(&self, range: Range<usize>) -> Result<Self> {
        let bytes = |element: usize| element * self.bits as usize / 8;
        Ok(Self {
            bits: self.bits,
            like: self.like.narrow(0, range.start, range.len())?,
            scales: match self.bits {
                16 => Vec::new(),
                _ => self.scales[range.start / BLOCK..range.end / BLOCK].to_vec(),
            },
            codes: self.codes[bytes(range.start)..bytes(range.end)].to_vec(),
        })
    }

    /// Returns the sum over the ranks of a group, in their order, so that it is the same to the bit on each.
    pub(super) fn sum_over(self, comm: &dyn Communicator) -> Result<Tensor> {
        let own = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).chain(self.codes.iter().copied());
        let own: Vec<u8> = own.collect();
        let len = own.len();
        let all = Tensor::zeros(len * comm.world_size(), DType::U8, &Device::Cpu)?;
        let input = Tensor::from_vec(own, len, &Device::Cpu)?;
        comm.run(Operation::AllGather { output: all.clone(), input, counts: None })?;
        let all = all.to_vec1::<u8>()?;
        let mut sum = vec![0f32; self.like.elem_count()];
        for of_rank in all.chunks_exact(len.max(1)) {
            let (scales, codes) = of_rank.split_at(4 * self.scales.len());
            let scales: Vec<f32> = scales
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
                .collect();
            sum.iter_mut().zip(self.numbers(&scales, codes)).for_each(|(sum, x)| *sum += x);
        }
        Ok(self.tensor(sum)?)
    }

    fn numbers(&self, scales: &[f32], codes: &[u8]) -> Vec<f32> {
        if self.bits == 16 {
            return codes
                .chunks_exact(2)
                .map(|code| f16::from_le_bytes([code[0], code[1]]).to_f32())
                .collect();
        }
        let of_block = |(scale, codes): (&f32, &[u8])| -> Vec<f32> {
            match self.bits {
                // The sign is the highest of 4 bits.
                4 => codes
                    .iter()
                    .flat_map(|pair| [(*pair << 4) as i8 >> 4, *pair as i8 >> 4])
                    .map(|code| f32::from(code) * scale)
                    .collect(),
                _ => codes.iter().map(|code| f32::from(*code as i8) * scale).collect(),
            }
        };
        scales.iter().zip(codes.chunks(BLOCK * self.bits as usize / 8)).flat_map(of_block).collect()
    }

    fn tensor(&self, numbers: Vec<f32>) -> candle_core::Result<Tensor> {
        let tensor = Tensor::from_vec(numbers, self.like.elem_count(), &Device::Cpu)?;
        tensor.to_dtype(self.like.dtype())?.to_device(self.like.device())
    }
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    fn numbers(seed: u32, len: usize) -> Tensor {
        let number = |i: usize| {
            ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) % 2001) as f32 / 1000.0 - 1.0
        };
        Tensor::from_iter((0..len).map(number), &Device::Cpu).unwrap()
    }

    #[test]
    fn numbers_are_off_by_half_a_step_at_most() {
        for (bits, most) in [(8, 127.0), (4, 7.0)] {
            let x = numbers(1, 3 * BLOCK);
            let apart = (&x - Quantized::new(&x, bits).unwrap().values().unwrap()).unwrap();
            let apart = apart.abs().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            assert!(apart > 0.1 / most && apart <= 0.5001 / most, "{bits} bits: {apart}");
        }
        let x = numbers(1, 3 * BLOCK);
        let apart = (&x - Quantized::new(&x, 16).unwrap().values().unwrap()).unwrap();
        let apart = apart.abs().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(apart > 1e-4 && apart <= 1.0 / 4096.0, "{apart}");
        let odd = Tensor::new(&[f32::NAN; BLOCK], &Device::Cpu).unwrap();
        let odd = Quantized::new(&odd, 8).unwrap().values().unwrap().to_vec1::<f32>().unwrap();
        assert!(odd.iter().all(|x| x.is_nan()));
        let zeros = Tensor::zeros(BLOCK, DType::F32, &Device::Cpu).unwrap();
        let zeros = Quantized::new(&zeros, 4).unwrap().values().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(zeros, [0.0; BLOCK]);
    }

    #[test]
    fn a_sum_is_that_of_what_each_rank_sends() {
        for bits in [16, 8, 4] {
            let sums = Local::run_shared(3, |comm| {
                let own =
                    Quantized::new(&numbers(comm.rank() as u32, 4 * BLOCK), bits).map_err(comm::carry)?;
                let part = own.blocks(BLOCK..3 * BLOCK).map_err(comm::carry)?;
                let sum = part.sum_over(&*comm).map_err(comm::carry)?.to_vec1::<f32>()?;
                Ok((sum, own.values().map_err(comm::carry)?.to_vec1::<f32>()?))
            });
            let sums = sums.unwrap();
            for (sum, _) in &sums {
                assert_eq!(*sum, sums[0].0);
                let expected =
                    (BLOCK..3 * BLOCK).map(|at| sums.iter().fold(0.0, |sum, (_, own)| sum + own[at]));
                assert_eq!(*sum, expected.collect::<Vec<_>>());
            }
        }
    }
}
