//! Gradients of a step, added up over micro-batches.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, TensorId, Var, bail};

/// The sums of the gradients of a rank's variables.
#[derive(Default)]
pub(crate) struct Gradients {
    vars: Vec<Var>,
    places: HashMap<TensorId, usize>,
    sums: Vec<Option<Tensor>>,
}

impl Gradients {
    pub(crate) fn new(vars: impl IntoIterator<Item = Var>) -> Self {
        let vars: Vec<Var> = vars.into_iter().collect();
        let places = vars.iter().enumerate().map(|(place, var)| (var.id(), place)).collect();
        Self { sums: vec![None; vars.len()], vars, places }
    }

    /// Takes the gradients of these variables out of a backward pass.
    pub(crate) fn take(&mut self, grads: &mut GradStore, vars: &[(String, Var)]) -> Result<()> {
        for (_, var) in vars {
            if let Some(gradient) = grads.remove(var) {
                self.add(var.id(), gradient)?;
            }
        }
        Ok(())
    }

    /// Adds a gradient that was put off, whose values others may use as well: several weights, or the layer itself.
    pub(crate) fn add_shared(&mut self, id: TensorId, gradient: &Tensor) -> Result<()> {
        let first = self.places.contains_key(&id) && self.of_id(id).is_none();
        self.add(id, if first { gradient.force_contiguous()? } else { gradient.clone() })
    }

    /// Adds a gradient, which nobody else uses.
    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        let Some(&place) = self.places.get(&id) else { return Ok(()) };
        match &self.sums[place] {
            None => self.sums[place] = Some(gradient.contiguous()?),
            Some(sum) if sum.device().is_cpu() && matches!(sum.dtype(), DType::F32 | DType::F64) => {
                sum.inplace_op2(&gradient.contiguous()?, &AddAssign)?;
            }
            Some(sum) => self.sums[place] = Some((sum + gradient)?),
        }
        Ok(())
    }

    pub(crate) fn of(&self, var: &Var) -> Option<&Tensor> {
        self.of_id(var.id())
    }

    pub(crate) fn of_id(&self, id: TensorId) -> Option<&Tensor> {
        self.sums[*self.places.get(&id)?].as_ref()
    }

    pub(crate) fn set(&mut self, var: &Var, sum: Tensor) {
        if let Some(&place) = self.places.get(&var.id()) {
            self.sums[place] = Some(sum);
        }
    }

    pub(crate) fn unset(&mut self, var: &Var) {
        if let Some(&place) = self.places.get(&var.id()) {
            self.sums[place] = None;
        }
    }

    /// All sums, by variable.
    pub(crate) fn finish(self) -> Result<GradStore> {
        // Candle has no other way to an empty store.
        let mut store = Tensor::zeros((), DType::U8, &Device::Cpu)?.backward()?;
        for (var, sum) in self.vars.iter().zip(self.sums) {
            sum.and_then(|sum| store.insert(var, sum));
        }
        Ok(store)
    }
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
