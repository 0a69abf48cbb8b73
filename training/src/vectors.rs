//! Plain loops, as code for the widest vectors that the processor has.

/// Runs a block, compiled for AVX-512, for AVX2 and for the least that a processor has, whichever is there; as far as it is
/// inlined, so functions that it calls must be `#[inline(always)]`. On 64-bit ARM the least is NEON. The compiler neither fuses nor
/// reorders operations on real numbers: the bits are the same on all.
macro_rules! vectorized {
    ($block:block) => {
        $crate::vectors::run(
            #[inline(always)]
            || $block,
        )
    };
}

pub(crate) use vectorized;

#[inline(always)]
pub(crate) fn run<R>(block: impl FnOnce() -> R) -> R {
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
    use crate::op::Real;

    #[test]
    fn all_processors_give_the_same_bits() {
        let numbers: Vec<f32> = (0..10_007).map(|i| -(i as f32) * 8.7e-3).collect();
        let mut wide = numbers.clone();
        vectorized!({
            for x in &mut wide {
                *x = x.exp_down() * 0.3 + Real::erfc(-*x);
            }
        });
        // One by one, the least that any processor has.
        let plain = numbers.iter().map(|x| std::hint::black_box(x.exp_down() * 0.3 + Real::erfc(-*x)));
        assert!(wide.iter().zip(plain).all(|(wide, plain)| wide.to_bits() == plain.to_bits()));
    }
}
