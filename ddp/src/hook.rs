//! The operation between a parameter's variable and the model, which sees the gradient as soon as it is complete.

use std::sync::{Arc, Mutex, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Shape, Tensor};

use crate::lock;
use crate::reducer::Reducer;

/// Leads from a hook to the reducer, which comes into being after the model, and is another one in another group. It keeps
/// nothing alive: a loss may outlive its [`crate::Ddp`].
pub(crate) type Link = Arc<Mutex<Weak<Reducer>>>;

/// Forward: a copy. Backward: gives the gradient to the reducer and nothing to candle.
pub(crate) struct Hook {
    pub(crate) index: usize,
    pub(crate) link: Link,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "ddp-hook"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn metal_fwd(
        &self,
        storage: &MetalStorage,
        layout: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(
        &self,
        _variable: &Tensor,
        _hooked: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let reducer = lock(&self.link).upgrade();
        match reducer {
            Some(reducer) => reducer.receive(self.index, grad).map(|()| None).map_err(Into::into),
            // The Ddp is gone, or not there yet: an ordinary copy has an ordinary gradient.
            None => Ok(Some(grad.clone())),
        }
    }
}
