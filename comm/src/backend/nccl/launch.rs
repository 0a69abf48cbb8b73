//! Launching NCCL calls with the device addresses of tensors.

#![allow(unsafe_code, reason = "NCCL takes memory by its address")]

use candle_core::DType;

use crate::Result;

use super::calls::NcclCall;
use super::handle::{Addresses, NcclHandle};

/// Starts calls whose addresses belong to tensors that the carrier keeps, or leaks, until the device has finished with
/// them; see [`super::carrier`].
pub(super) fn start(handle: &mut NcclHandle, calls: &[(NcclCall, DType, Addresses)]) -> Result<()> {
    // SAFETY: the carrier takes each address from a contiguous tensor of its own device and of the call's dtype, the
    // number of elements is checked when an operation is submitted, and the tensors outlive the calls.
    unsafe { handle.start(calls) }
}
