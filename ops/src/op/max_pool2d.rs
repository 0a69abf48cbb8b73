//! 2D max pooling.

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor, WithDType, bail};

use super::cast::cast;
use super::working_dtype;
use crate::dense::{dense, with_numbers};
use crate::{Error, Result, tape};

const NAME: &str = "max_pool2d";

/// The maximum of each window; windows are adjacent (stride equals kernel), as in `nn.MaxPool2d(kernel)`.
///
/// The whole gradient goes to the maximum, among equal ones to the first, as in PyTorch. (That of candle's own
/// `max_pool2d` is divided by the size of the window.) A window with a NaN is NaN. Rows and columns at the end that
/// do not fill a window are ignored.
///
/// # Shapes
/// `(.., height, width)` to `(.., height / kernel.0, width / kernel.1)`.
///
/// # Cost
/// On a CPU one pass forward and one backward, which searches the maxima again.
///
/// # Errors
/// A kernel of size 0, or larger than the picture; a dtype that is none of f16, bf16, f32 and f64.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let x = Var::new(&[[1f32, 2., 3.], [4., 4., 5.]], &Device::Cpu)?;
/// let y = ops::max_pool2d(&x, (2, 2))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[4.0]]);
/// let gradient = y.sum_all()?.backward()?.get(&x).map(|g| g.to_vec2::<f32>()).transpose()?;
/// assert_eq!(gradient, Some(vec![vec![0., 0., 0.], vec![1., 0., 0.]]));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn max_pool2d(x: &Tensor, kernel: (usize, usize)) -> candle_core::Result<Tensor> {
    let wide = cast(x, working_dtype(NAME, x.dtype())?)?;
    let pool = MaxPool::new(x, kernel)?;
    let result = match x.device().is_cpu() {
        true => tape::apply_op1(&wide.contiguous()?, pool)?,
        false => pool.composed(&wide)?,
    };
    cast(&result, x.dtype())
}

#[derive(Debug, Clone, Copy)]
struct MaxPool {
    kernel: (usize, usize),
    picture: (usize, usize),
    out: (usize, usize),
}

impl MaxPool {
    fn new(x: &Tensor, kernel: (usize, usize)) -> Result<Self> {
        let fit = match x.dims() {
            [.., height, width] if kernel.0 > 0 && kernel.1 > 0 => {
                Some(((*height, *width), (height / kernel.0, width / kernel.1)))
            }
            _ => None,
        };
        match fit.filter(|(_, out)| out.0 > 0 && out.1 > 0) {
            Some((picture, out)) => Ok(Self { kernel, picture, out }),
            None => {
                let (expected, got) = (vec![kernel.0.max(1), kernel.1.max(1)], x.dims().to_vec());
                Err(Error::ShapeMismatch { operation: NAME, tensor: "the input", expected, got })
            }
        }
    }

    fn shape(&self, dims: &[usize]) -> Shape {
        let rest = &dims[..dims.len() - 2];
        Shape::from([rest, &[self.out.0, self.out.1]].concat())
    }

    /// Calls `each` with the index of each window's maximum in `x`, window by window.
    fn for_each_argmax<T: WithDType>(&self, x: &[T], mut each: impl FnMut(usize)) {
        let (height, width) = self.picture;
        for picture in 0..x.len() / (height * width) {
            for row in 0..self.out.0 {
                let line = (picture * height + row * self.kernel.0) * width;
                for column in 0..self.out.1 {
                    let corner = line + column * self.kernel.1;
                    let mut best = corner;
                    for y in 0..self.kernel.0 {
                        let start = corner + y * width;
                        for (place, value) in (start..).zip(&x[start..start + self.kernel.1]) {
                            let is_higher = match value.partial_cmp(&x[best]) {
                                Some(order) => order.is_gt(),
                                None => value.to_f64().is_nan(),
                            };
                            if is_higher {
                                best = place;
                            }
                        }
                    }
                    each(best);
                }
            }
        }
    }

    fn forward<T: WithDType>(&self, x: &[T]) -> Vec<T> {
        let mut result = Vec::with_capacity(x.len() / (self.kernel.0 * self.kernel.1));
        self.for_each_argmax(x, |place| result.push(x[place]));
        result
    }

    fn backward<T: WithDType>(&self, x: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let gradient = gradient.contiguous()?;
        let of_x = with_numbers::<T, _>(x, |x| {
            with_numbers::<T, _>(&gradient, |gradient| {
                let mut of_x = vec![T::zero(); x.len()];
                let mut gradients = gradient.iter();
                self.for_each_argmax(x, |place| {
                    if let Some(gradient) = gradients.next() {
                        of_x[place] = *gradient;
                    }
                });
                Ok(of_x)
            })
        })?;
        Tensor::from_vec(of_x, x.shape(), x.device())
    }

    /// The same, composed of candle's operations.
    fn composed(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let ((rows, columns), (high, wide)) = (self.out, self.kernel);
        let windows = x
            .narrow(D::Minus2, 0, rows * high)?
            .narrow(D::Minus1, 0, columns * wide)?
            .contiguous()?
            .reshape(vec![x.elem_count() / (self.picture.0 * self.picture.1), rows, high, columns, wide])?
            .transpose(2, 3)?
            .contiguous()?
            .reshape(((), high * wide))?;
        let places = windows.detach().argmax_keepdim(D::Minus1)?;
        windows.gather(&places, D::Minus1)?.reshape(self.shape(x.dims()))
    }
}

impl CustomOp1 for MaxPool {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let result = match storage {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(dense(storage, layout)?)),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(dense(storage, layout)?)),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((result, self.shape(layout.dims())))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match x.dtype() {
            DType::F32 => self.backward::<f32>(x, gradient).map(Some),
            _ => self.backward::<f64>(x, gradient).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The fused operation equals the composed one, gradient included.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        for (shape, kernel) in [(&[2, 3, 7, 9][..], (2, 2)), (&[5, 6], (3, 2)), (&[3, 4, 4], (1, 4))] {
            // Rounded to have many equal numbers.
            let x = Var::from_tensor(&Tensor::randn(0f64, 1., shape, &Device::Cpu)?.round()?)?;
            let pool = MaxPool::new(&x, kernel)?;
            let both = [pool.composed(&x)?, max_pool2d(&x, kernel)?];
            let loss = |y: &Tensor| y.sqr()?.sum_all();
            assert_agree(both, loss, &[&x], 0.0, &format!("{shape:?} {kernel:?}"))?;
        }
        Ok(())
    }
}
