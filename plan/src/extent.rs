//! Size limits of a plan, checked in floats, which do not overflow, before anything is counted in integers.

use crate::error::{Error, Result};
use crate::model::TransformerSizes;

/// Maximum number of parameters.
const MOST_PARAMETERS: f64 = (1u64 << 46) as f64;
/// Maximum number of elements sent between two ranks at once, in a step. Their bytes are exact in an f64.
const MOST_SENT: f64 = (1u64 << 50) as f64;
/// Maximum number of operations on a sample, and of elements kept for it.
const MOST_OF_SAMPLE: f64 = (1u64 << 62) as f64;

/// Upper bounds of the largest numbers of a plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SizeBounds {
    parameters: f64,
    /// Operations and kept elements of one sample.
    of_sample: f64,
    /// Elements sent between ranks for one sample, at most.
    sent: f64,
}

impl SizeBounds {
    /// Returns the bounds of an MLP with layers of these sizes.
    pub(crate) fn of_layers(sizes: &[u64]) -> Self {
        let product = |pair: &[u64]| pair.iter().map(|size| *size as f64).product::<f64>();
        let widths: f64 = sizes.iter().map(|size| *size as f64).sum();
        let parameters = sizes.windows(2).map(product).sum::<f64>() + widths;
        Self { parameters, of_sample: 2.0 * parameters + 8.0 * widths, sent: 2.0 * widths }
    }

    /// Returns the bounds of a transformer.
    pub(crate) fn of_transformer(sizes: &TransformerSizes) -> Self {
        let &TransformerSizes { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, length, .. } =
            sizes;
        let [vocabulary, d, heads, ff, layers, positions, length] =
            [vocab_size, d_model, num_heads, d_ff, num_layers, max_len, length].map(|size| size as f64);
        let layer = 4.0 * d * d + 2.0 * d * ff + 9.0 * d + ff;
        let parameters = layers * layer + (2.0 * vocabulary + positions + 2.0) * d + vocabulary;
        let flops = 2.0 * length * (parameters + 2.0 * layers * length * d);
        let kept =
            layers * length * (24.0 * d + 2.0 * heads + 4.0 * ff) + length * (8.0 * d + 5.0 * vocabulary);
        Self { parameters, of_sample: flops + kept, sent: 2.0 * length * (d + vocabulary) }
    }

    /// Refuses sizes that cannot be counted, and that no machine has.
    ///
    /// # Errors
    /// Too many parameters, operations or samples.
    pub(crate) fn check(self, batch_size: usize) -> Result<()> {
        let Self { parameters, of_sample, sent } = self;
        if parameters > MOST_PARAMETERS {
            return Err(Error::TooManyParameters { parameters });
        }
        if of_sample > MOST_OF_SAMPLE {
            return Err(Error::TooManyOperations { operations: of_sample });
        }
        if sent * batch_size as f64 > MOST_SENT {
            return Err(Error::TooManySamples { numbers: sent });
        }
        Ok(())
    }
}
