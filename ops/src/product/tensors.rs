//! Matrix products of candle's tensors and storages.

use candle_core::backend::BackendStorage;
use candle_core::utils::{has_accelerate, has_mkl};
use candle_core::{CpuStorage, DType, Layout, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};

use super::{Element, Matrix, ProductConfig};
use crate::Precision;

/// Returns the product of two matrices, given as storages with layouts; those of 16 bits are multiplied with all their digits,
/// whatever the precision.
///
/// # Errors
/// Errors of candle; layouts that do not have two dimensions.
pub(crate) fn product<T: Element>(
    [(a, a_layout), (b, b_layout)]: [(&CpuStorage, &Layout); 2],
    precision: Precision,
) -> candle_core::Result<Vec<T::Sum>> {
    let ((m, k), (_, n)) = (a_layout.shape().dims2()?, b_layout.shape().dims2()?);
    if m == 0 || n == 0 || k == 0 {
        // Empty sums are 0.
        return Ok(vec![T::Sum::from_f64(0.0); m * n]);
    }
    let is_exact = T::DTYPE == DType::F64 || (T::DTYPE == DType::F32 && precision == Precision::F32);
    // MKL or Accelerate, if candle was built with it.
    if is_exact && (has_mkl() || has_accelerate()) {
        return T::Sum::cpu_storage_data(a.matmul(b, (1, m, n, k), a_layout, b_layout)?);
    }
    let (a, b) = (matrix::<T>(a, a_layout)?, matrix::<T>(b, b_layout)?);
    T::product((a, b), ProductConfig { precision, in_parallel: false }.in_parallel())
}

/// The same for tensors, with layouts over their storages.
///
/// # Errors
/// As [`product`]; tensors that are not on a CPU.
pub(crate) fn product_of<T: Element>(
    [(a, a_layout), (b, b_layout)]: [(&Tensor, Layout); 2],
    precision: Precision,
) -> candle_core::Result<Vec<T::Sum>> {
    let (a, b) = (a.storage_and_layout().0, b.storage_and_layout().0);
    match (&*a, &*b) {
        (Storage::Cpu(a), Storage::Cpu(b)) => product::<T>([(a, &a_layout), (b, &b_layout)], precision),
        _ => bail!("a fused operation on the CPU was given a tensor of another device"),
    }
}

fn matrix<'a, T: Element>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<Matrix<'a, T>> {
    let ((rows, columns), strides) = (layout.shape().dims2()?, layout.stride());
    let data = T::cpu_storage_as_slice(storage)?.get(layout.start_offset()..).unwrap_or_default();
    Ok(Matrix { data, rows, columns, row_stride: strides[0], column_stride: strides[1] })
}

impl Precision {
    /// Multiplies two matrices without recording a gradient: for operations with their own backward. f32 tensors on a
    /// CPU are multiplied in this precision; f16 and bf16 there with all their digits and sums in f32, rounded once; all
    /// others by candle. In f32 the bits are candle's; unlike candle's product this does not fill the result with zeros
    /// first.
    ///
    /// # Shapes
    /// `(m, k)` and `(k, n)`, which may be transposed views; the result is `(m, n)`.
    ///
    /// # Errors
    /// Errors of candle: shapes, dtypes or devices that do not fit.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::Precision;
    ///
    /// let x = Tensor::new(&[[1.001f32], [2.]], &Device::Cpu)?;
    /// let product = Precision::Bf16.matmul(&x.t()?, &x)?;
    /// assert_eq!(product.to_vec2::<f32>()?, [[5.0]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn matmul(self, a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
        // Broadcast dimensions, with a stride of 0, are copied, and views without adjacent elements.
        let dense = |tensor: &Tensor| match tensor.stride().contains(&0) || !tensor.stride().contains(&1) {
            true => tensor.force_contiguous(),
            false => Ok(tensor.clone()),
        };
        let (a, b) = (dense(&a.detach())?, dense(&b.detach())?);
        let is_ours = |tensor: &Tensor| tensor.device().is_cpu() && tensor.rank() == 2;
        if !is_ours(&a) || !is_ours(&b) || a.dtype() != b.dtype() || a.dim(1)? != b.dim(0)? {
            return a.matmul(&b);
        }
        match a.dtype() {
            DType::F32 => self.matmul_of::<f32>(&a, &b),
            DType::F16 => self.matmul_of::<f16>(&a, &b),
            DType::BF16 => self.matmul_of::<bf16>(&a, &b),
            _ => a.matmul(&b),
        }
    }

    fn matmul_of<T: Element>(self, a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
        let sums = product_of::<T>([(a, a.layout().clone()), (b, b.layout().clone())], self)?;
        Tensor::from_vec(T::narrow(sums), (a.dim(0)?, b.dim(1)?), a.device())
    }
}
