//! Autograd hook: an identity operation between a parameter's variable and the model, which receives the gradient as soon as
//! it is complete.

use std::sync::{Arc, Mutex, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Shape, Tensor};

use crate::lock;
use crate::reducer::Reducer;

/// Reference from a hook to the reducer, which is created after the model and replaced when the group changes. It is weak: a
/// loss may outlive its [`crate::Ddp`].
pub(crate) type ReducerRef = Arc<Mutex<Weak<Reducer>>>;

/// Forward: copies. Backward: passes the gradient to the reducer, and returns none to candle.
pub(crate) struct Hook {
    pub(crate) index: usize,
    pub(crate) link: ReducerRef,
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
            // The `Ddp` has been dropped, or is not complete yet: behaves like an ordinary copy.
            None => Ok(Some(grad.clone())),
        }
    }
}
