//! SIMD dispatch: compiles plain loops for the widest vectors of the processor.

/// Runs a block with the best available of three versions: AVX-512, AVX2, and the target's baseline (NEON on 64-bit
/// ARM). This affects only inlined code, so functions that the block calls must be `#[inline(always)]`. The compiler
/// neither fuses nor reorders floating-point operations: all versions have the same bits.
#[doc(hidden)]
#[macro_export]
macro_rules! vectorized {
    ($block:block) => {
        $crate::kernels::run(
            #[inline(always)]
            || $block,
        )
    };
}

pub(crate) use vectorized;

/// Calls a block with the widest vectors of the processor: what [`vectorized`](crate::vectorized) becomes.
#[inline(always)]
pub fn run<R>(block: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V4::try_new() {
            return simd.vectorize(block);
        }
        if let Some(simd) = pulp::x86::V3::try_new() {
            return simd.vectorize(block);
        }
    }
    block()
}

#[cfg(test)]
mod tests {
    use crate::real::Real;

    #[test]
    fn all_processors_give_the_same_bits() {
        let numbers: Vec<f32> = (0..10_007).map(|i| -(i as f32) * 8.7e-3).collect();
        let mut wide = numbers.clone();
        vectorized!({
            for x in &mut wide {
                *x = x.exp_nonpositive() * 0.3 + Real::erfc(-*x);
            }
        });
        // Element by element, with the target's baseline.
        let plain = numbers.iter().map(|x| std::hint::black_box(x.exp_nonpositive() * 0.3 + Real::erfc(-*x)));
        assert!(wide.iter().zip(plain).all(|(wide, plain)| wide.to_bits() == plain.to_bits()));
    }
}
