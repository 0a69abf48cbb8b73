//! Gradient accumulation over micro-batches, without a new tensor for each sum.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, TensorId, Var, bail};

/// Sums of the gradients of some variables over several backward passes. Gradients of f16 and bf16 are summed in f32,
/// and rounded once.
///
/// ```
/// use candle_core::{Device, Var};
/// use training::internal::GradSums;
///
/// let weight = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let mut sums = GradSums::new([weight.clone()]);
/// for factor in [1.0, 10.0] {
///     let loss = (weight.as_tensor() * factor)?.sum_all()?;
///     sums.take(&mut loss.backward()?)?;
/// }
/// let grads = sums.finish()?;
/// assert_eq!(grads.get(&weight).unwrap().to_vec1::<f32>()?, [11.0, 11.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct GradSums {
    vars: Vec<Var>,
    places: HashMap<TensorId, usize>,
    sums: Vec<Option<Tensor>>,
}

impl GradSums {
    /// Creates empty sums for these variables.
    pub fn new(vars: impl IntoIterator<Item = Var>) -> Self {
        let vars: Vec<Var> = vars.into_iter().collect();
        let places = vars.iter().enumerate().map(|(place, var)| (var.id(), place)).collect();
        Self { sums: vec![None; vars.len()], vars, places }
    }

    /// Removes the variables' gradients from the result of a backward pass, and adds them.
    ///
    /// # Errors
    /// candle's.
    pub fn take(&mut self, grads: &mut GradStore) -> Result<()> {
        for place in 0..self.vars.len() {
            if let Some(gradient) = grads.remove(&self.vars[place]) {
                self.add(self.vars[place].id(), gradient)?;
            }
        }
        Ok(())
    }

    /// Adds a deferred gradient ([`defer_weights`](ops::defer_weights)), whose storage may be shared with other
    /// weights or the layer itself; the first one is therefore copied.
    ///
    /// # Errors
    /// candle's.
    pub fn add_shared(&mut self, id: TensorId, gradient: &Tensor) -> Result<()> {
        let first = self.places.contains_key(&id) && self.of_id(id).is_none();
        self.add(id, if first { gradient.force_contiguous()? } else { gradient.clone() })
    }

    /// Adds a gradient whose storage is not shared.
    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        let Some(&place) = self.places.get(&id) else { return Ok(()) };
        let gradient = gradient.to_dtype(wide(&self.vars[place]))?;
        match &self.sums[place] {
            None => self.sums[place] = Some(gradient.contiguous()?),
            Some(sum) if sum.device().is_cpu() && matches!(sum.dtype(), DType::F32 | DType::F64) => {
                sum.inplace_op2(&gradient.contiguous()?, &AddAssign)?;
            }
            Some(sum) => self.sums[place] = Some((sum + gradient)?),
        }
        Ok(())
    }

    /// A sum of zeros for a variable, to be [`set`](Self::set).
    ///
    /// # Errors
    /// candle's.
    pub fn zeros(var: &Var) -> Result<Tensor> {
        Tensor::zeros(var.shape(), wide(var), var.device())
    }

    /// The variable's sum so far, in f32 for f16 and bf16; `None` if there was no gradient.
    pub fn of(&self, var: &Var) -> Option<&Tensor> {
        self.of_id(var.id())
    }

    /// The sum so far of the variable with this tensor id.
    pub(crate) fn of_id(&self, id: TensorId) -> Option<&Tensor> {
        self.sums[*self.places.get(&id)?].as_ref()
    }

    /// Replaces the variable's sum by one of the same dtype.
    pub fn set(&mut self, var: &Var, sum: Tensor) {
        if let Some(&place) = self.places.get(&var.id()) {
            self.sums[place] = Some(sum);
        }
    }

    /// Removes the variable's sum, so that it has no gradient.
    pub fn unset(&mut self, var: &Var) {
        if let Some(&place) = self.places.get(&var.id()) {
            self.sums[place] = None;
        }
    }

    /// Returns all sums as gradients in their variables' dtypes.
    ///
    /// # Errors
    /// candle's.
    pub fn finish(self) -> Result<GradStore> {
        let mut store = ops::tape::empty()?;
        for (var, sum) in self.vars.iter().zip(self.sums) {
            let Some(sum) = sum else { continue };
            store.insert(var, sum.to_dtype(var.dtype())?);
        }
        Ok(store)
    }
}

/// The dtype in which a variable's gradients are summed.
fn wide(var: &Var) -> DType {
    ops::wide_dtype(var.dtype())
}

/// Adds the second tensor to the first, in place.
struct AddAssign;

impl InplaceOp2 for AddAssign {
    fn name(&self) -> &'static str {
        "add-assign"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        sum_layout: &Layout,
        more: &CpuStorage,
        more_layout: &Layout,
    ) -> Result<()> {
        let (Some((a, b)), Some((c, d))) =
            (sum_layout.contiguous_offsets(), more_layout.contiguous_offsets())
        else {
            bail!("add-assign: a gradient is not contiguous")
        };
        match (sum, more) {
            (CpuStorage::F32(sum), CpuStorage::F32(more)) => {
                sum[a..b].iter_mut().zip(&more[c..d]).for_each(|(sum, more)| *sum += more);
            }
            (CpuStorage::F64(sum), CpuStorage::F64(more)) => {
                sum[a..b].iter_mut().zip(&more[c..d]).for_each(|(sum, more)| *sum += more);
            }
            _ => bail!("add-assign: neither f32 nor f64"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// In 16 bits each small gradient would be lost when added to the large one.
    #[test]
    fn sums_of_16_bits_are_rounded_once() -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            let var = Var::from_tensor(&Tensor::new(&[0f32], &Device::Cpu)?.to_dtype(dtype)?)?;
            let mut sums = GradSums::new([var.clone()]);
            for step in 0..=1024 {
                let slope = if step == 0 { 1.0 } else { 1.0 / 4096.0 };
                sums.take(&mut (var.as_tensor() * slope)?.sum_all()?.backward()?)?;
            }
            assert_eq!(sums.of(&var).unwrap().dtype(), DType::F32);
            let grads = sums.finish()?;
            let got = grads.get(&var).unwrap();
            assert_eq!((got.dtype(), got.to_dtype(DType::F32)?.to_vec1::<f32>()?), (dtype, vec![1.25]));
        }
        Ok(())
    }
}
