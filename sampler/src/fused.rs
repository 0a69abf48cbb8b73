//! Loops of fused multiply-adds, with the processor's instructions where it has them. Elsewhere each is a call of a function
//! with the same bits.

/// Runs a block as AVX2 and FMA compile it, if the processor has both. This affects only inlined code, so functions that the
/// block calls must be `#[inline(always)]`.
#[inline(always)]
pub(crate) fn fused<R>(block: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V3::try_new() {
        return simd.vectorize(block);
    }
    block()
}
