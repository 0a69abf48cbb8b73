//! The elements of tensors, as bytes: where they lie ([`storage`]), how those of a device come to the host ([`staging`]), and arithmetic on
//! them ([`element`]).

pub(crate) mod element;
#[cfg_attr(not(feature = "cuda"), path = "staging/nothing.rs")]
pub(crate) mod staging;
pub(crate) mod storage;
