//! The elements of tensors, as bytes: where they lie ([`storage`]), how those of a device come to the host ([`staging`]), and arithmetic on
//! them ([`element`]).

pub(crate) mod element;
/// Tested on any system, with tensors of the CPU.
#[cfg(test)]
#[allow(dead_code, reason = "used where the feature `metal` is on")]
#[path = "staging/metal.rs"]
mod metal;
#[cfg_attr(all(feature = "metal", not(feature = "cuda")), path = "staging/metal.rs")]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), path = "staging/nothing.rs")]
pub(crate) mod staging;
pub(crate) mod storage;
