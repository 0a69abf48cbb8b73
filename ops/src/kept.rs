//! Memory that operations store themselves for backward.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use crate::lock::lock;
use candle_core::{Tensor, TensorId};

/// Stored bytes, by id of the operation's output tensor.
static KEPT: LazyLock<Mutex<HashMap<TensorId, usize>>> = LazyLock::new(Mutex::default);

/// Reports to [`activation_bytes`](crate::activation_bytes) the bytes that an operation stores for backward, which
/// candle's graph does not show. The operation holds the `SavedBytes` as long as it holds the bytes; clones share one
/// entry.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::{SavedBytes, activation_bytes};
///
/// let x = Var::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
/// let output = x.sqr()?; // of an operation that keeps, say, 100 bytes
/// let kept = SavedBytes::default();
/// kept.by(&output, 100);
/// assert_eq!(activation_bytes(&output, []), 4 * 3 + 100);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct SavedBytes(Arc<Entry>);

#[derive(Debug, Default)]
struct Entry(OnceLock<TensorId>);

impl SavedBytes {
    /// Records that the operation with this output stores `bytes`. Only the first call counts.
    pub fn by(&self, output: &Tensor, bytes: usize) {
        if bytes > 0 && self.0.0.set(output.id()).is_ok() {
            all().insert(output.id(), bytes);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(output) = self.0.get() {
            all().remove(output);
        }
    }
}

/// Bytes stored by the operation with this output.
pub(crate) fn kept_by(output: &Tensor) -> usize {
    all().get(&output.id()).copied().unwrap_or_default()
}

fn all() -> MutexGuard<'static, HashMap<TensorId, usize>> {
    lock(&KEPT)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::{AttentionConfig, AttentionMask, activation_bytes, attention, cross_entropy};

    #[test]
    fn what_is_kept_goes_with_the_operation() {
        let output = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let kept = SavedBytes::default();
        kept.by(&output, 7);
        kept.by(&output, 9);
        let other = kept.clone();
        drop(kept);
        assert_eq!(kept_by(&output), 7);
        drop(other);
        assert_eq!(kept_by(&output), 0);
    }

    #[test]
    fn fused_operations_tell_what_they_keep() {
        let (batch, length, width, heads) = (2, 5, 8, 4);
        let x = Var::zeros((batch, length, width), DType::F32, &Device::Cpu).unwrap();
        let config = AttentionConfig::new(heads, AttentionMask::Causal);
        let mixed = attention(&x, &x, &x, &config).unwrap();
        let (sums, numbers) = (batch * heads * length, batch * length * width);
        assert_eq!(activation_bytes(&mixed, []), 4 * (numbers + sums));
        let targets = Tensor::zeros((batch, length), DType::U32, &Device::Cpu).unwrap();
        let loss = cross_entropy(&mixed, &targets, None).unwrap();
        let rows = size_of::<Option<usize>>() * batch * length;
        assert_eq!(activation_bytes(&loss, []), 4 * (2 * numbers + sums + 1) + rows);
        // Nothing is stored where there is no backward.
        let alone = mixed.detach();
        assert_eq!(kept_by(&attention(&alone, &alone, &alone, &config).unwrap()), 0);
    }
}
