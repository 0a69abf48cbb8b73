//! Where addresses of tensors are given to NCCL.

#![allow(unsafe_code, reason = "NCCL takes memory by its address")]

use candle_core::DType;

use crate::Result;

use super::calls::Call;
use super::handle::{Addresses, Handle};

/// Begins calls whose addresses were taken from tensors that the carrier keeps until the device is past them, or that it
/// leaks; see [`super::carrier`].
pub(super) fn start(handle: &mut Handle, calls: &[(Call, DType, Addresses)]) -> Result<()> {
    // SAFETY: the carrier takes each address from a contiguous tensor of its own device and of the call's dtype, operations
    // are checked for as many elements when they are submitted, and the tensors outlive the calls.
    unsafe { handle.start(calls) }
}
