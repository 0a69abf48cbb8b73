//! In place of the operations on CUDA devices where the feature `cuda` is off: there are no such devices.

mod masks;

use candle_core::{Result, Tensor, Var, bail};

pub(crate) use masks::{DeviceMask, Seen};

pub(crate) fn knows(_: &Tensor) -> bool {
    false
}

/// None have been found to be on such a device.
pub(crate) fn squares(_: &[Tensor]) -> Result<Vec<f64>> {
    Ok(vec![])
}

macro_rules! absent {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(pub(crate) fn $name($(_: $argument),*) -> Result<$result> {
            bail!("this was built without the feature `cuda`")
        })*
    };
}

absent! {
    rms_norm(&Tensor, &Tensor, f64) -> Tensor;
    rms_norm_backward(&Tensor, &Tensor, &Tensor, f64) -> [Tensor; 2];
    layer_norm(&Tensor, &Tensor, &Tensor, f64) -> Tensor;
    layer_norm_backward(&Tensor, &Tensor, &Tensor, f64) -> [Tensor; 3];
    attention_weights(&Tensor, Option<&Tensor>, Option<&Tensor>, Seen) -> ();
    attention_weights_backward(&Tensor, &Tensor, Seen) -> ();
    cross_entropy(&Tensor, &Tensor, f64, f64) -> Tensor;
    activation(u32, &Tensor) -> Tensor;
    activation_backward(u32, &Tensor, &Tensor) -> Tensor;
    gated(u32, &Tensor, &Tensor) -> Tensor;
    gated_backward(u32, &Tensor, &Tensor, &Tensor) -> [Tensor; 2];
    rotary(&Tensor, [&Tensor; 2], usize, bool, bool) -> Tensor;
    swapped(&Tensor, [usize; 3]) -> Tensor;
    dropped(&Tensor, &DeviceMask) -> Tensor;
    adam(&Var, &Tensor, [&Tensor; 2], [f32; 9]) -> ();
}
