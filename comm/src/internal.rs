//! What the other crates of Girandole share of this one, and a program that exchanges tensors does not need: comparison of what ranks
//! have ([`line_difference`], [`odd_one`], [`Digest`]), values as bytes ([`to_bytes`], [`to_value`]), the machine that this process
//! runs on ([`host_name`], [`total_memory`], ..), copies to a device ([`upload_pinned`]), errors within those of candle
//! ([`carried_as`]).

pub use crate::api::communicator::group::all_gather_words;
pub use crate::api::difference::{LineDifference, line_difference, odd_one};
pub use crate::api::objects::{to_bytes, to_value};
pub use crate::api::upload::upload_pinned;
pub use crate::base::digest::Digest;
pub use crate::base::error::carried_as;
pub use crate::platform::{
    UsableMemory, available_memory, host_name, peak_rss_bytes, reset_peak_rss, total_memory,
};
