//! Autograd hooks: an operation under each parameter, and one on each unit's outputs.

use std::sync::{Arc, OnceLock, Weak};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Result, Shape, Tensor, Var, bail,
};

use crate::built::ParamIndex;
use crate::core::{Core, Run};
use crate::storage;

/// Reference to the `Core`, which is created after the model. It is weak: a loss may outlive its [`crate::Fsdp`].
pub(crate) type CoreRef = Arc<OnceLock<Weak<Core>>>;

/// Creates a parameter's tensor, in the released state. It is the output of an operation on a one-element variable, so that
/// backward reaches it.
pub(crate) fn parameter(
    anchor: &Var,
    param: ParamIndex,
    shape: &Shape,
    dtype: DType,
    link: CoreRef,
) -> Result<Tensor> {
    let hook = Hook { param, shape: shape.clone(), dtype, link };
    let tensor = ops::tape::apply_op1(anchor, hook)?;
    storage::take_storage(&tensor)?;
    Ok(tensor)
}

/// Forward: allocates a parameter. Backward: passes the gradient to the `Core`, and returns none to candle.
struct Hook {
    param: ParamIndex,
    shape: Shape,
    dtype: DType,
    link: CoreRef,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "fsdp-parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage::zeros(self.dtype, self.shape.elem_count())?, self.shape.clone()))
    }

    fn cuda_fwd(&self, anchor: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((anchor.device().zeros_impl(&self.shape, self.dtype)?, self.shape.clone()))
    }

    fn metal_fwd(&self, anchor: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        Ok((anchor.device().zeros_impl(&self.shape, self.dtype)?, self.shape.clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match self.link.get().and_then(Weak::upgrade) {
            Some(core) => core.receive(self.param, grad).map(|()| None).map_err(Into::into),
            // The `Fsdp` has been dropped, and the shards with it.
            None => Ok(None),
        }
    }
}

/// Marks an output of a unit's run: when backward reaches it, the unit is gathered.
pub(crate) fn boundary(output: &Tensor, run: Arc<Run>, link: CoreRef) -> Result<Tensor> {
    // Integers have no gradient.
    if !storage::is_supported(output.device()) || !storage::is_trainable(output.dtype()) {
        return Ok(output.clone());
    }
    let mut output = output.contiguous()?;
    if !output.device().is_cpu() && output.layout().start_offset() > 0 {
        // Copies it, so that it starts at offset 0 of its storage.
        output = output.affine(1.0, 0.0)?;
    }
    ops::tape::apply_op1(&output, Boundary { run, link })
}

/// Forward: a copy. Backward: the same gradient.
struct Boundary {
    run: Arc<Run>,
    link: CoreRef,
}

impl CustomOp1 for Boundary {
    fn name(&self) -> &'static str {
        "fsdp-unit"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("fsdp: an output is not contiguous")
        };
        Ok((storage::copy(storage, start, end - start)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn metal_fwd(&self, storage: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if let Some(core) = self.link.get().and_then(Weak::upgrade) {
            core.enter_backward(&self.run, output)?;
        }
        Ok(Some(grad.clone()))
    }
}
