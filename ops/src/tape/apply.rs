//! Application of custom operations so that [`backward`](crate::tape::backward) knows them.

use std::sync::Arc;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor,
};

use crate::tape::guard::run_checks;
use crate::tape::table::{Box1, Box2, Box3, Call, TableEntry};

/// `x.apply_op1(op)`, known to [`backward`](crate::tape::backward).
///
/// # Cost
/// An entry in a table for as long as the result exists.
///
/// # Errors
/// Errors of the operation.
pub fn apply_op1(x: &Tensor, op: impl CustomOp1 + Send + Sync + 'static) -> Result<Tensor> {
    let place = Arc::<TableEntry>::default();
    let op: Arc<Box1> = Arc::new(Box::new(Applied { op, _place: place.clone() }));
    let result = x.apply_op1_arc(op.clone())?;
    if result.track_op() {
        place.insert(&result, &Call::One([x.clone()], op));
    }
    Ok(result)
}

/// `x.apply_op2(y, op)`, known to [`backward`](crate::tape::backward).
///
/// # Cost
/// An entry in a table for as long as the result exists.
///
/// # Errors
/// Errors of the operation.
pub fn apply_op2(x: &Tensor, y: &Tensor, op: impl CustomOp2 + Send + Sync + 'static) -> Result<Tensor> {
    let place = Arc::<TableEntry>::default();
    let op: Arc<Box2> = Arc::new(Box::new(Applied { op, _place: place.clone() }));
    let result = x.apply_op2_arc(y, op.clone())?;
    if result.track_op() {
        place.insert(&result, &Call::Two([x.clone(), y.clone()], op));
    }
    Ok(result)
}

/// `x.apply_op3(y, z, op)`, known to [`backward`](crate::tape::backward).
///
/// # Cost
/// An entry in a table for as long as the result exists.
///
/// # Errors
/// Errors of the operation.
pub fn apply_op3(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    op: impl CustomOp3 + Send + Sync + 'static,
) -> Result<Tensor> {
    let place = Arc::<TableEntry>::default();
    let op: Arc<Box3> = Arc::new(Box::new(Applied { op, _place: place.clone() }));
    let result = x.apply_op3_arc(y, z, op.clone())?;
    if result.track_op() {
        place.insert(&result, &Call::Three([x.clone(), y.clone(), z.clone()], op));
    }
    Ok(result)
}

/// An operation and its entry in the table.
struct Applied<O> {
    op: O,
    _place: Arc<TableEntry>,
}

/// Implements one of candle's traits for [`Applied`], given its name, the inputs and layouts of a call, and the
/// gradients' type.
macro_rules! impl_custom_op {
    ($op:ident($($x:ident $layout:ident),+) -> $gradients:ty) => {
        impl<O: $op> $op for Applied<O> {
            fn name(&self) -> &'static str {
                self.op.name()
            }

            fn cpu_fwd(&self, $($x: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
                self.op.cpu_fwd($($x, $layout),+)
            }

            fn cuda_fwd(&self, $($x: &CudaStorage, $layout: &Layout),+) -> Result<(CudaStorage, Shape)> {
                self.op.cuda_fwd($($x, $layout),+)
            }

            fn metal_fwd(&self, $($x: &MetalStorage, $layout: &Layout),+) -> Result<(MetalStorage, Shape)> {
                self.op.metal_fwd($($x, $layout),+)
            }

            fn bwd(&self, $($x: &Tensor,)+ result: &Tensor, gradient: &Tensor) -> Result<$gradients> {
                run_checks(&[$($x),+])?;
                self.op.bwd($($x,)+ result, gradient)
            }
        }
    };
}

impl_custom_op!(CustomOp1(x l) -> Option<Tensor>);
impl_custom_op!(CustomOp2(x l, y m) -> (Option<Tensor>, Option<Tensor>));
impl_custom_op!(CustomOp3(x l, y m, z n) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>));
