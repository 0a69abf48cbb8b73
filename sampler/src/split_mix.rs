//! SplitMix64: random access to a sequence of random numbers.

/// Returns the number at `index` of a random sequence. Numbers of adjacent seeds and of adjacent indices are
/// unrelated, also in their low 32 bits. To combine several numbers into a seed, mix in each with a separate call.
///
/// # Source
/// G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
///
/// ```
/// use sampler::split_mix;
///
/// // The seed 1234567's first number.
/// assert_eq!(split_mix(1234567, 1), 6457827717110365317);
/// ```
#[inline(always)]
pub fn split_mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
