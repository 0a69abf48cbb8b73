//! Matrix products of candle's tensors and storages.

use candle_core::backend::BackendStorage;
use candle_core::utils::{has_accelerate, has_mkl};
use candle_core::{CpuStorage, DType, Layout, Storage, Tensor, bail};

use super::{Matrix, ProductConfig, product_of_matrices};
use crate::Precision;
use crate::op::Real;

/// Returns the product of two matrices, given as storages with layouts.
///
/// # Errors
/// Errors of candle; layouts that do not have two dimensions.
pub(crate) fn product<T: Real>(
    [(a, a_layout), (b, b_layout)]: [(&CpuStorage, &Layout); 2],
    precision: Precision,
) -> candle_core::Result<Vec<T>> {
    let ((m, k), (_, n)) = (a_layout.shape().dims2()?, b_layout.shape().dims2()?);
    if m == 0 || n == 0 || k == 0 {
        // Empty sums are 0.
        return Ok(vec![T::zero(); m * n]);
    }
    let is_rounded = precision != Precision::F32 && T::DTYPE == DType::F32;
    // MKL or Accelerate, if candle was built with it.
    if !is_rounded && (has_mkl() || has_accelerate()) {
        return T::cpu_storage_data(a.matmul(b, (1, m, n, k), a_layout, b_layout)?);
    }
    let (a, b) = (matrix::<T>(a, a_layout)?, matrix::<T>(b, b_layout)?);
    product_of_matrices((a, b), ProductConfig { precision, in_parallel: false }.in_parallel())
}

/// The same for tensors, with layouts over their storages.
///
/// # Errors
/// As [`product`]; tensors that are not on a CPU.
pub(crate) fn product_of<T: Real>(
    [(a, a_layout), (b, b_layout)]: [(&Tensor, Layout); 2],
    precision: Precision,
) -> candle_core::Result<Vec<T>> {
    let (a, b) = (a.storage_and_layout().0, b.storage_and_layout().0);
    match (&*a, &*b) {
        (Storage::Cpu(a), Storage::Cpu(b)) => product([(a, &a_layout), (b, &b_layout)], precision),
        _ => bail!("a fused operation on the CPU was given a tensor of another device"),
    }
}

fn matrix<'a, T: Real>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<Matrix<'a, T>> {
    let ((rows, columns), strides) = (layout.shape().dims2()?, layout.stride());
    let data = T::cpu_storage_as_slice(storage)?.get(layout.start_offset()..).unwrap_or_default();
    Ok(Matrix { data, rows, columns, row_stride: strides[0], column_stride: strides[1] })
}

impl Precision {
    /// Multiplies two matrices without recording a gradient: for operations with their own backward. f32 tensors on a
    /// CPU are multiplied in this precision, all others by candle. In f32 the bits are candle's; unlike candle's product
    /// this does not fill the result with zeros first.
    ///
    /// # Shapes
    /// `(m, k)` and `(k, n)`, which may be transposed views; the result is `(m, n)`.
    ///
    /// # Errors
    /// Errors of candle: shapes, dtypes or devices that do not fit.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use training::Precision;
    ///
    /// let x = Tensor::new(&[[1.001f32], [2.]], &Device::Cpu)?;
    /// let product = Precision::Bf16.matmul(&x.t()?, &x)?;
    /// assert_eq!(product.to_vec2::<f32>()?, [[5.0]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn matmul(self, a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
        // Broadcast dimensions, with a stride of 0, are copied.
        let dense = |tensor: &Tensor| match tensor.stride().contains(&0) {
            true => tensor.force_contiguous(),
            false => Ok(tensor.clone()),
        };
        let (a, b) = (dense(&a.detach())?, dense(&b.detach())?);
        let is_ours =
            |tensor: &Tensor| tensor.dtype() == DType::F32 && tensor.device().is_cpu() && tensor.rank() == 2;
        if !is_ours(&a) || !is_ours(&b) || a.dim(1)? != b.dim(0)? {
            return a.matmul(&b);
        }
        let (m, n) = (a.dim(0)?, b.dim(1)?);
        let (a_layout, b_layout) = (a.layout().clone(), b.layout().clone());
        let numbers = product_of::<f32>([(&a, a_layout), (&b, b_layout)], self)?;
        Tensor::from_vec(numbers, (m, n), a.device())
    }
}
