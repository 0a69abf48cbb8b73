//! 2D convolution as matrix products, forward and backward.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp3, Layout, Module, Shape, Tensor, WithDType, bail};
use candle_nn::Conv2d;

use super::cast::cast;
use super::working_dtype;
use crate::dense::{dense, with_numbers};
use crate::{Error, Result, tape};

const NAME: &str = "conv2d";

/// Computes `layer.forward(x)`, with a backward pass as fast as the forward pass instead of ten times slower.
///
/// candle's own gradient of the weight is a convolution with kernels as large as the picture. On a CPU this unfolds
/// each picture's windows into the columns of a matrix (im2col), so that result and gradients are products with it.
/// On other devices, and for layers with groups or dilation, it calls candle's convolution.
///
/// # Shapes
/// `(batch, in_channels, height, width)` to `(batch, out_channels, height', width')`; a dimension of `n` becomes
/// `(n + 2 padding - kernel) / stride + 1`.
///
/// # Cost
/// Memory for the windows of one picture at a time: `in_channels * kernel^2 * height' * width'` numbers, unfolded
/// again in backward. Inputs that need no gradient add no cost in backward.
///
/// # Errors
/// Pictures with another number of channels, or smaller than the kernel; a dtype that is none of f16, bf16, f32 and
/// f64, or differs from the weight's.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Conv2d, Conv2dConfig};
///
/// let edge = Tensor::new(&[[[[-1f32, 1.]]]], &Device::Cpu)?;
/// let layer = Conv2d::new(edge, None, Conv2dConfig::default());
/// let picture = Tensor::new(&[[[[0f32, 0., 5., 5.]]]], &Device::Cpu)?;
/// assert_eq!(ops::conv2d(&picture, &layer)?.flatten_all()?.to_vec1::<f32>()?, [0., 5., 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn conv2d(x: &Tensor, layer: &Conv2d) -> candle_core::Result<Tensor> {
    let config = layer.config();
    if !x.device().is_cpu() || config.groups != 1 || config.dilation != 1 {
        return layer.forward(x);
    }
    let dtype = working_dtype(NAME, x.dtype())?;
    let weight = layer.weight();
    if weight.dtype() != x.dtype() {
        let (expected, got) = (x.dtype(), weight.dtype());
        return Err(Error::DTypeMismatch { operation: NAME, tensor: "weight", expected, got }.into());
    }
    let windows = Windows::new(x, weight, config.stride, config.padding)?;
    let outputs = weight.dim(0)?;
    let bias = match layer.bias() {
        Some(bias) if bias.dims() != [outputs] => {
            let (expected, got) = (vec![outputs], bias.dims().to_vec());
            return Err(Error::ShapeMismatch { operation: NAME, tensor: "bias", expected, got }.into());
        }
        Some(bias) => cast(bias, dtype)?.contiguous()?,
        None => Tensor::zeros(outputs, dtype, x.device())?,
    };
    let (wide, weight) = (cast(x, dtype)?.contiguous()?, cast(weight, dtype)?.contiguous()?);
    tape::apply_op3(&wide, &weight, &bias, windows)?.to_dtype(x.dtype())
}

/// Geometry of the windows of a picture that a kernel is applied to.
#[derive(Debug, Clone, Copy)]
struct Windows {
    channels: usize,
    picture: (usize, usize),
    kernel: (usize, usize),
    /// Rows and columns of the output, one window each.
    out: (usize, usize),
    stride: usize,
    padding: usize,
}

impl Windows {
    fn new(x: &Tensor, weight: &Tensor, stride: usize, padding: usize) -> Result<Self> {
        let &[_, channels, kernel_height, kernel_width] = weight.dims() else {
            let (expected, got) = (vec![1; 4], weight.dims().to_vec());
            return Err(Error::ShapeMismatch { operation: NAME, tensor: "weight", expected, got });
        };
        let unfit = |least: [usize; 4]| Error::ShapeMismatch {
            operation: NAME,
            tensor: "the input",
            expected: least.to_vec(),
            got: x.dims().to_vec(),
        };
        let least = |kernel: usize| kernel.saturating_sub(2 * padding).max(1);
        let smallest = [1, channels, least(kernel_height), least(kernel_width)];
        let &[_, of_picture, height, width] = x.dims() else { return Err(unfit(smallest)) };
        if of_picture != channels || stride == 0 {
            return Err(unfit(smallest));
        }
        let count =
            |size: usize, kernel| (size + 2 * padding).checked_sub(kernel).map(|left| left / stride + 1);
        let (Some(rows), Some(columns)) = (count(height, kernel_height), count(width, kernel_width)) else {
            return Err(unfit(smallest));
        };
        let (picture, kernel) = ((height, width), (kernel_height, kernel_width));
        Ok(Self { channels, picture, kernel, out: (rows, columns), stride, padding })
    }

    /// Number of elements in a picture.
    fn picture_len(&self) -> usize {
        self.channels * self.picture.0 * self.picture.1
    }

    /// Range of the elements of picture `index`.
    fn picture_at(&self, index: usize) -> Range<usize> {
        index * self.picture_len()..(index + 1) * self.picture_len()
    }

    /// Number of elements in a window.
    fn window_len(&self) -> usize {
        self.channels * self.kernel.0 * self.kernel.1
    }

    fn count(&self) -> usize {
        self.out.0 * self.out.1
    }

    /// Calls `run(at, from, len)` for each run of the window matrix (a row for each element of a window, a column for
    /// each window) that lies inside the picture: `len` elements of the matrix from `at` on, which come from the
    /// picture from `from` on at intervals of `stride`.
    fn runs(&self, mut run: impl FnMut(usize, usize, usize)) {
        let (height, width) = self.picture;
        let mut at = 0;
        for channel in 0..self.channels {
            for kernel_y in 0..self.kernel.0 {
                for kernel_x in 0..self.kernel.1 {
                    // Range of windows whose column `kernel_x` is inside the picture.
                    let first = self.padding.saturating_sub(kernel_x).div_ceil(self.stride);
                    let end = (width + self.padding).saturating_sub(kernel_x).div_ceil(self.stride);
                    let (first, end) = (first.min(self.out.1), end.min(self.out.1));
                    for row in 0..self.out.0 {
                        let y = (row * self.stride + kernel_y).checked_sub(self.padding);
                        if let Some(y) = y.filter(|y| *y < height && first < end) {
                            let x = first * self.stride + kernel_x - self.padding;
                            run(at + first, (channel * height + y) * width + x, end - first);
                        }
                        at += self.out.1;
                    }
                }
            }
        }
    }

    /// Unfolds a picture into its window matrix (im2col), with 0 outside of the picture.
    fn unfold<T: WithDType>(&self, picture: &[T]) -> candle_core::Result<Tensor> {
        let mut matrix = vec![T::zero(); self.window_len() * self.count()];
        self.runs(|at, from, len| {
            let to = &mut matrix[at..at + len];
            match self.stride {
                1 => to.copy_from_slice(&picture[from..from + len]),
                stride => {
                    to.iter_mut().zip(picture[from..].iter().step_by(stride)).for_each(|(to, x)| *to = *x)
                }
            }
        });
        Tensor::from_vec(matrix, (self.window_len(), self.count()), &candle_core::Device::Cpu)
    }

    /// Adds a window matrix to the picture at the windows' positions (col2im).
    fn fold<T: WithDType>(&self, matrix: &[T], picture: &mut [T]) {
        self.runs(|at, from, len| {
            let to = picture[from..].iter_mut().step_by(self.stride);
            to.zip(&matrix[at..at + len]).for_each(|(to, x)| *to += *x);
        });
    }

    fn forward<T: WithDType>(
        &self,
        x: &[T],
        batch: usize,
        weight: &[T],
        bias: &[T],
    ) -> candle_core::Result<Vec<T>> {
        let weight = Tensor::from_slice(weight, (bias.len(), self.window_len()), &candle_core::Device::Cpu)?;
        let numbers = batch.saturating_mul(bias.len()).saturating_mul(self.count());
        if isize::try_from(numbers.saturating_mul(size_of::<T>())).is_err() {
            bail!("{NAME}: too many windows of {batch} pictures");
        }
        let mut result = Vec::with_capacity(numbers);
        // An empty picture has windows too if it is padded.
        for picture in (0..batch).map(|index| &x[self.picture_at(index)]) {
            let product = weight.matmul(&self.unfold(picture)?)?;
            with_numbers::<T, _>(&product, |product| {
                for (row, bias) in product.chunks_exact(self.count().max(1)).zip(bias) {
                    result.extend(row.iter().map(|x| *x + *bias));
                }
                Ok(())
            })?;
        }
        Ok(result)
    }

    /// Returns the gradients of x (if it needs one), weight and bias.
    fn backward<T: WithDType>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<Gradients> {
        let (batch, channels) = (x.dim(0)?, weight.dim(0)?);
        let gradient = gradient.contiguous()?.reshape((batch, channels, self.count()))?;
        let flat = weight.reshape((channels, self.window_len()))?;
        let mut of_weight = flat.zeros_like()?;
        let mut of_x = x.track_op().then(|| vec![T::zero(); x.elem_count()]);
        with_numbers::<T, _>(x, |pictures| {
            for index in 0..batch {
                let (gradient, place) = (gradient.get(index)?, self.picture_at(index));
                let windows = self.unfold(&pictures[place.clone()])?;
                of_weight = (&of_weight + gradient.matmul(&windows.t()?)?)?;
                if let Some(of_x) = of_x.as_mut().and_then(|of_x| of_x.get_mut(place)) {
                    let windows = flat.t()?.matmul(&gradient)?;
                    with_numbers::<T, _>(&windows, |windows| {
                        self.fold(windows, of_x);
                        Ok(())
                    })?;
                }
            }
            Ok(())
        })?;
        let of_x = of_x.map(|of_x| Tensor::from_vec(of_x, x.shape(), x.device())).transpose()?;
        Ok((of_x, Some(of_weight.reshape(weight.shape())?), Some(gradient.sum((0, 2))?)))
    }
}

type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

impl CustomOp3 for Windows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let shape = (x_layout.dims()[0], weight_layout.dims()[0], self.out.0, self.out.1);
        macro_rules! forward {
            ($variant:ident) => {
                CpuStorage::$variant(self.forward(
                    dense(x, x_layout)?,
                    shape.0,
                    dense(weight, weight_layout)?,
                    dense(bias, bias_layout)?,
                )?)
            };
        }
        let result = match x {
            CpuStorage::F32(_) => forward!(F32),
            CpuStorage::F64(_) => forward!(F64),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((result, shape.into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<Gradients> {
        // Detached: the products here must not be recorded in a graph.
        let values = weight.detach();
        match x.dtype() {
            candle_core::DType::F32 => self.backward::<f32>(x, &values, gradient),
            _ => self.backward::<f64>(x, &values, gradient),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use candle_nn::Conv2dConfig;

    use super::*;

    fn zeros(dims: &[usize]) -> Tensor {
        Tensor::zeros(dims, DType::F64, &Device::Cpu).unwrap()
    }

    /// Empty pictures have the windows that their padding makes, each of which yields the bias.
    #[test]
    fn pictures_of_nothing_are_whole() -> candle_core::Result<()> {
        for (picture, kernels, padding, out) in [
            (&[2, 0, 4, 4][..], &[5, 0, 3, 3][..], 1, &[2, 5, 4, 4][..]),
            (&[2, 3, 0, 4], &[5, 3, 2, 3], 1, &[2, 5, 1, 4]),
            (&[2, 3, 4, 0], &[5, 3, 1, 1], 2, &[2, 5, 8, 4]),
            (&[0, 3, 4, 4], &[5, 3, 3, 3], 0, &[0, 5, 2, 2]),
        ] {
            let what = format!("{picture:?}");
            let bias = Var::new(&[1f64, 2., 3., 4., 5.], &Device::Cpu)?;
            let (x, weight) = (Var::from_tensor(&zeros(picture))?, Var::from_tensor(&zeros(kernels))?);
            let config = Conv2dConfig { padding, ..Conv2dConfig::default() };
            let layer = Conv2d::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), config);
            let y = conv2d(&x, &layer)?;
            let numbers = with_numbers(&y, |numbers: &[f64]| Ok(numbers.to_vec()))?;
            let count = out[2] * out[3];
            let row = |bias: f64| vec![bias; count];
            let one = [1., 2., 3., 4., 5.].map(row).concat();
            assert_eq!((y.dims(), numbers), (out, one.repeat(out[0])), "{what}");
            let grads = y.sum_all()?.backward()?;
            for var in [&x, &weight, &bias] {
                assert_eq!(grads.get(var).map(Tensor::dims), Some(var.dims()), "{what}");
            }
            let of_bias = grads.get(&bias).map(Tensor::to_vec1::<f64>).transpose()?;
            assert_eq!(of_bias, Some(vec![(out[0] * count) as f64; 5]), "{what}");
        }
        Ok(())
    }

    #[test]
    fn a_bias_of_other_channels_is_named() {
        let layer = Conv2d::new(zeros(&[5, 0, 3, 3]), Some(zeros(&[4])), Conv2dConfig::default());
        let line = conv2d(&zeros(&[2, 0, 4, 4]), &layer).unwrap_err().to_string();
        assert_eq!(line, "conv2d: bias must be of shape [5], got [4]");
    }
}
