//! Fallible allocation: for sizes that a caller chooses, running out of memory is an error, not an abort.

use crate::SamplerError;

/// Returns an empty vector with capacity for `len` elements of `what`.
pub(crate) fn reserved<T>(len: usize, what: &'static str) -> Result<Vec<T>, SamplerError> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(len).map_err(|_| SamplerError::OutOfMemory { what, len })?;
    Ok(elements)
}

/// Returns a vector of `len` zeros.
pub(crate) fn zeros(len: usize, what: &'static str) -> Result<Vec<f32>, SamplerError> {
    let mut elements = reserved(len, what)?;
    elements.resize(len, 0.0);
    Ok(elements)
}
