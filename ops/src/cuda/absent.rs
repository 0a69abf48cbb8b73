//! In place of the operations on CUDA devices where the feature `cuda` is off: there are no such devices.

mod masks;

use candle_core::{Result, Tensor, Var, bail};

pub(crate) use masks::{DeviceMask, Seen};

/// Whether the kernels take the tensor.
pub fn knows(_: &Tensor) -> bool {
    false
}

/// None have been found to be on such a device.
///
/// # Errors
/// None.
pub fn squares(_: &[Tensor]) -> Result<Vec<f64>> {
    Ok(vec![])
}

macro_rules! absent {
    ($($(#[$doc:meta])* $of:vis fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $($(#[$doc])* $of fn $name($(_: $argument),*) -> Result<$result> {
            bail!("this was built without the feature `cuda`")
        })*
    };
}

absent! {
    pub(crate) fn rms_norm(&Tensor, &Tensor, f64) -> Tensor;
    pub(crate) fn rms_norm_backward(&Tensor, &Tensor, &Tensor, f64) -> [Tensor; 2];
    pub(crate) fn layer_norm(&Tensor, &Tensor, &Tensor, f64) -> Tensor;
    pub(crate) fn layer_norm_backward(&Tensor, &Tensor, &Tensor, f64) -> [Tensor; 3];
    pub(crate) fn attention_weights(&Tensor, Option<&Tensor>, Option<&Tensor>, Seen) -> ();
    pub(crate) fn attention_weights_backward(&Tensor, &Tensor, Seen) -> ();
    pub(crate) fn cross_entropy(&Tensor, &Tensor, f64, f64) -> Tensor;
    pub(crate) fn activation(u32, &Tensor) -> Tensor;
    pub(crate) fn activation_backward(u32, &Tensor, &Tensor) -> Tensor;
    pub(crate) fn gated(u32, &Tensor, &Tensor) -> Tensor;
    pub(crate) fn gated_backward(u32, &Tensor, &Tensor, &Tensor) -> [Tensor; 2];
    pub(crate) fn rotary(&Tensor, [&Tensor; 2], usize, bool, bool) -> Tensor;
    pub(crate) fn swapped(&Tensor, [usize; 3]) -> Tensor;
    pub(crate) fn dropped(&Tensor, &DeviceMask) -> Tensor;
    /// One step of Adam in place.
    ///
    /// # Errors
    /// Always.
    pub fn adam(&Var, &Tensor, [&Tensor; 2], [f32; 9]) -> ();
}
