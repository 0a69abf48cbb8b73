//! Elements of tensors, as bytes: access ([`storage`]) in place ([`host`]) or in a copy of a device's elements on
//! the host ([`staging`]), and arithmetic ([`element`]).

pub(crate) mod element;
mod host;
/// Tested on any system, with CPU tensors.
#[cfg(test)]
#[allow(dead_code, reason = "used where the feature `metal` is on")]
#[path = "staging/metal.rs"]
mod metal;
#[cfg_attr(all(feature = "metal", not(feature = "cuda")), path = "staging/metal.rs")]
#[cfg_attr(not(any(feature = "cuda", feature = "metal")), path = "staging/nothing.rs")]
pub(crate) mod staging;
pub(crate) mod storage;
