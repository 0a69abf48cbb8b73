//! Numbers that are found without those before them.

/// The number at `index` of a sequence of random numbers: neighbouring seeds, and neighbouring indices, give unrelated numbers, also in
/// the low 32 bits. For a seed made of several numbers, each is mixed in by a call of its own.
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
