//! Frozen parameters: used, but not trained.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

/// Wraps a builder so that none of its parameters gets a gradient.
pub fn frozen(vb: &VarBuilder<'static>) -> VarBuilder<'static> {
    let backend = Frozen { inner: vb.root() };
    let prefix = vb.prefix();
    let root = VarBuilder::from_backend(Box::new(backend), vb.dtype(), vb.device().clone());
    if prefix.is_empty() { root } else { root.pp(prefix) }
}

struct Frozen {
    inner: VarBuilder<'static>,
}

impl SimpleBackend for Frozen {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        Ok(self.inner.get_with_hints_dtype(shape, name, init, dtype)?.detach())
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        Ok(self.inner.get_unchecked_dtype(name, dtype)?.detach())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}
