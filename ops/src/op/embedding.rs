//! Embedding: look-up of rows of a table.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, bail};

use crate::dense::{dense, with_numbers};
use crate::real::Real;
use crate::{Error, tape};

const NAME: &str = "embedding";

/// Looks up the rows of `table` with these `ids`: PyTorch's `nn.functional.embedding`, as one operation.
///
/// # Shapes
/// Table `(rows, size)`, ids `(..)` of u8, u32 or i64; the result is `(.., size)`.
///
/// # Cost
/// On a CPU a copy forward, and a zeroed table and a pass over the gradient backward.
///
/// # Errors
/// An id that is not a row of the table; ids that are not integers.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let table = Var::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let rows = ops::embedding(&table, &Tensor::new(&[[1u32, 0, 1]], &Device::Cpu)?)?;
/// assert_eq!(rows.to_vec3::<f32>()?, [[[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn embedding(table: &Tensor, ids: &Tensor) -> candle_core::Result<Tensor> {
    let (rows, size) = table.dims2()?;
    if !ids.dtype().is_int() {
        return Err(Error::NotIds { operation: NAME, got: ids.dtype() }.into());
    }
    let flat = ids.flatten_all()?;
    let numbers = flat.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    if let Some(&id) = numbers.iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= rows)) {
        return Err(Error::NoSuchRow { operation: NAME, id, rows }.into());
    }
    let mut dims = ids.dims().to_vec();
    dims.push(size);
    match table.device().is_cpu() && matches!(table.dtype(), DType::F32 | DType::F64) {
        true => {
            let ids = numbers.into_iter().map(|id| id as usize).collect();
            tape::apply_op1(&table.contiguous()?, Rows { ids, dims })
        }
        false if table.device().is_cpu() || flat.elem_count() == 0 => table.embedding(&flat)?.reshape(dims),
        false => {
            let rows = table.detach().contiguous()?.index_select(&flat, 0)?.reshape(dims)?;
            tape::explicit_op1(NAME, [table], rows, move |[table], gradient| {
                let gradient = gradient.detach().contiguous()?.reshape((flat.elem_count(), size))?;
                Ok([Some(table.zeros_like()?.index_add(&flat, &gradient, 0)?)])
            })
        }
    }
}

struct Rows {
    ids: Vec<usize>,
    /// Dimensions of the result.
    dims: Vec<usize>,
}

impl Rows {
    fn forward<T: Real>(&self, table: &[T], size: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(self.ids.len() * size);
        self.ids.iter().for_each(|id| out.extend_from_slice(&table[id * size..][..size]));
        out
    }

    fn backward<T: Real>(&self, table: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let size = table.dim(1)?;
        let mut out = vec![T::zero(); table.elem_count()];
        with_numbers(gradient, |gradient: &[T]| {
            for (id, gradient) in self.ids.iter().zip(gradient.chunks_exact(size.max(1))) {
                out[id * size..][..size].iter_mut().zip(gradient).for_each(|(sum, &g)| *sum += g);
            }
            Ok(())
        })?;
        Tensor::from_vec(out, table.shape(), table.device())
    }
}

impl CustomOp1 for Rows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let size = layout.shape().dims2()?.1;
        let out = match table {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(dense(table, layout)?, size)),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(dense(table, layout)?, size)),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((out, Shape::from(self.dims.clone())))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        match table.dtype() {
            DType::F32 => self.backward::<f32>(table, &gradient).map(Some),
            _ => self.backward::<f64>(table, &gradient).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    #[test]
    fn rows_and_gradients_equal_candles() -> candle_core::Result<()> {
        let table = Var::from_tensor(&Tensor::randn(0f64, 1.0, (5, 3), &Device::Cpu)?)?;
        for dims in [&[7][..], &[2, 3], &[0], &[2, 0]] {
            let count = dims.iter().product::<usize>();
            let ids: Vec<u32> = (0..count as u32).map(|i| (i * 3 + 1) % 4).collect();
            let ids = Tensor::from_vec(ids, dims, &Device::Cpu)?;
            let candles = table.embedding(&ids.flatten_all()?)?.reshape([dims, &[3]].concat())?;
            let both = [embedding(&table, &ids)?, candles];
            assert_eq!(both[0].dims(), both[1].dims());
            if count > 0 {
                assert_agree(both, |y| y.sqr()?.sum_all(), &[&table], 0.0, NAME)?;
            }
        }
        Ok(())
    }

    #[test]
    fn rows_that_there_are_not_are_named() -> candle_core::Result<()> {
        let table = Tensor::zeros((5, 3), DType::F32, &Device::Cpu)?;
        let line = |ids: Tensor| embedding(&table, &ids).unwrap_err().to_string();
        let line_of = |id: i64| line(Tensor::new(&[0, id], &Device::Cpu).unwrap());
        assert!(
            line_of(5).contains("embedding: no row (token) 5: the table has 5, from 0 on"),
            "{}",
            line_of(5)
        );
        assert!(line_of(-1).contains("no row (token) -1"));
        assert!(line(Tensor::zeros(2, DType::F32, &Device::Cpu)?).contains("F32"));
        Ok(())
    }
}
