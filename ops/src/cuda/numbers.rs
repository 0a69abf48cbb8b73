//! Operations on each number by itself: activations, rotation, Adam.

use candle_core::{Result, Tensor, Var};

use super::{
    DeviceMask, Number, alloc, by_dtype, by_number, device, in_place, launch, named, numbers_of, storage,
    tensor,
};

/// The activation of each number, of this kind in `kernels.cu`.
pub(crate) fn activation(kind: u32, x: &Tensor) -> Result<Tensor> {
    fn run<T: Number>(kind: u32, x: &Tensor) -> Result<Tensor> {
        let (device, count) = (device(x)?, x.elem_count());
        let (x_storage, layout) = x.storage_and_layout();
        let mut y = alloc::<T>(device, count)?;
        launch!(
            device,
            named::<T>("activation"),
            by_number(count),
            [numbers_of::<T>(storage(&x_storage)?, layout)?],
            [&mut y],
            [count as u64, kind]
        );
        Ok(tensor(y, device, x.shape()))
    }
    by_dtype!(x.dtype(), run(kind, x))
}

/// Returns the gradient of an activation's input.
pub(crate) fn activation_backward(kind: u32, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    by_dtype!(x.dtype(), of_two("activation_backward", kind, x, gradient))
}

/// The activation of `x` times `up`.
pub(crate) fn gated(kind: u32, x: &Tensor, up: &Tensor) -> Result<Tensor> {
    by_dtype!(x.dtype(), of_two("gated", kind, x, up))
}

/// Runs a kernel that makes a tensor of two of the same shape.
fn of_two<T: Number>(kernel: &str, kind: u32, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (device, count) = (device(a)?, a.elem_count());
    let ((a_storage, l), (b_storage, m)) = (a.storage_and_layout(), b.storage_and_layout());
    let mut y = alloc::<T>(device, count)?;
    launch!(
        device,
        named::<T>(kernel),
        by_number(count),
        [numbers_of::<T>(storage(&a_storage)?, l)?, numbers_of::<T>(storage(&b_storage)?, m)?],
        [&mut y],
        [count as u64, kind]
    );
    Ok(tensor(y, device, a.shape()))
}

/// Returns the gradients of both inputs of [`gated`].
pub(crate) fn gated_backward(kind: u32, x: &Tensor, up: &Tensor, gradient: &Tensor) -> Result<[Tensor; 2]> {
    fn run<T: Number>(kind: u32, x: &Tensor, up: &Tensor, gradient: &Tensor) -> Result<[Tensor; 2]> {
        let (device, count) = (device(x)?, x.elem_count());
        let ((x_storage, l), (up_storage, m)) = (x.storage_and_layout(), up.storage_and_layout());
        let (g_storage, n) = gradient.storage_and_layout();
        let (mut of_x, mut of_up) = (alloc::<T>(device, count)?, alloc::<T>(device, count)?);
        launch!(
            device,
            named::<T>("gated_backward"),
            by_number(count),
            [
                numbers_of::<T>(storage(&x_storage)?, l)?,
                numbers_of::<T>(storage(&up_storage)?, m)?,
                numbers_of::<T>(storage(&g_storage)?, n)?
            ],
            [&mut of_x, &mut of_up],
            [count as u64, kind]
        );
        Ok([tensor(of_x, device, x.shape()), tensor(of_up, device, x.shape())])
    }
    by_dtype!(x.dtype(), run(kind, x, up, gradient))
}

/// Rotates the pairs of each head of `x`, (.., positions, heads x head's width), by angles whose cosines and sines are f32 of
/// (positions, half the head's width): forward, or back.
pub(crate) fn rotary(
    x: &Tensor,
    [cosines, sines]: [&Tensor; 2],
    heads: usize,
    interleaved: bool,
    back: bool,
) -> Result<Tensor> {
    fn run<T: Number>(
        x: &Tensor,
        [cosines, sines]: [&Tensor; 2],
        heads: usize,
        (interleaved, direction): (u32, f32),
    ) -> Result<Tensor> {
        let (device, (positions, half)) = (device(x)?, cosines.dims2()?);
        let ((c_storage, l), (s_storage, m)) = (cosines.storage_and_layout(), sines.storage_and_layout());
        let (x_storage, n) = x.storage_and_layout();
        let mut y = alloc::<T>(device, x.elem_count())?;
        let pairs = x.elem_count() / 2;
        launch!(
            device,
            named::<T>("rotary"),
            by_number(pairs),
            [
                numbers_of::<T>(storage(&x_storage)?, n)?,
                numbers_of::<f32>(storage(&c_storage)?, l)?,
                numbers_of::<f32>(storage(&s_storage)?, m)?
            ],
            [&mut y],
            [pairs as u64, positions as u32, heads as u32, half as u32, interleaved, direction]
        );
        Ok(tensor(y, device, x.shape()))
    }
    let how = (u32::from(interleaved), if back { -1.0 } else { 1.0 });
    by_dtype!(x.dtype(), run(x, [cosines, sines], heads, how))
}

/// The tensor, (count, a, b, width), as (count, b, a, width).
pub(crate) fn swapped(x: &Tensor, [a, b, width]: [usize; 3]) -> Result<Tensor> {
    fn run<T: Number>(x: &Tensor, [a, b, width]: [usize; 3]) -> Result<Tensor> {
        let (device, count) = (device(x)?, x.elem_count());
        let (x_storage, layout) = x.storage_and_layout();
        let mut y = alloc::<T>(device, count)?;
        launch!(
            device,
            named::<T>("swapped"),
            by_number(count),
            [numbers_of::<T>(storage(&x_storage)?, layout)?],
            [&mut y],
            [count as u64, a as u32, b as u32, width as u32]
        );
        Ok(tensor(y, device, &(count / (a * b * width), b, a, width).into()))
    }
    by_dtype!(x.dtype(), run(x, [a, b, width]))
}

/// The tensor, some elements zeroed and the others scaled.
pub(crate) fn dropped(x: &Tensor, mask: &DeviceMask) -> Result<Tensor> {
    fn run<T: Number>(x: &Tensor, mask: &DeviceMask) -> Result<Tensor> {
        let (device, count) = (device(x)?, x.elem_count());
        let ((x_storage, l), (k_storage, m)) = (x.storage_and_layout(), mask.keys.storage_and_layout());
        let mut y = alloc::<T>(device, count)?;
        let &DeviceMask { lines, width, before, first, whole, threshold, scale, .. } = mask;
        let sizes = [count, lines, width, before, first, whole].map(|size| size as u64);
        launch!(
            device,
            named::<T>("dropped"),
            by_number(count),
            [numbers_of::<i64>(storage(&k_storage)?, m)?, numbers_of::<T>(storage(&x_storage)?, l)?],
            [&mut y],
            [sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], threshold, scale as f32]
        );
        Ok(tensor(y, device, x.shape()))
    }
    by_dtype!(x.dtype(), run(x, mask))
}

/// One step of an f32 parameter and its means, in place. `numbers` are the kernel's, in its order.
///
/// # Errors
/// candle's, from the device.
pub fn adam(var: &Var, gradient: &Tensor, means: [&Tensor; 2], numbers: [f32; 9]) -> Result<()> {
    fn run<G: Number>(
        gradient: &Tensor,
        var: &Var,
        [of_gradients, of_squares]: [&Tensor; 2],
        numbers: [f32; 9],
    ) -> Result<()> {
        let (device, count) = (device(var)?, var.elem_count());
        let (g_storage, l) = gradient.storage_and_layout();
        in_place(var, |var, at| {
            let Some((start, end)) = at.contiguous_offsets() else {
                candle_core::bail!("adam: the parameter is not contiguous")
            };
            let mut var = var.as_cuda_slice_mut::<f32>()?.slice_mut(start..end);
            in_place(of_gradients, |of_gradients, _| {
                in_place(of_squares, |of_squares, _| {
                    launch!(
                        device,
                        named::<G>("adam"),
                        by_number(count),
                        [numbers_of::<G>(storage(&g_storage)?, l)?],
                        [
                            &mut var,
                            of_gradients.as_cuda_slice_mut::<f32>()?,
                            of_squares.as_cuda_slice_mut::<f32>()?
                        ],
                        [
                            count as u64, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4],
                            numbers[5], numbers[6], numbers[7], numbers[8]
                        ]
                    );
                    Ok(())
                })
            })
        })
    }
    by_dtype!(gradient.dtype(), run(gradient, var, means, numbers))
}
