//! Activation checkpointing: parts of a model that keep only their input for backward, and are recomputed there.

mod current_node;
mod gradients;
mod running;

use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Storage, Tensor, Var,
    bail,
};

use crate::kept::SavedBytes;
use crate::tape::{self, scalar_with_gradient};
use crate::{Error, Precision, RowContext};

pub use current_node::recomputed_node;
pub use gradients::backward;
pub use running::{PartMember, drawn, kept_result, runs_in_part};
pub(crate) use running::{keep_results, keeps_results, known_results};

use crate::lock::lock;
use running::Record;

/// Runs `part` on `x` and keeps only `x` for backward, which runs `part` again. Losses and gradients are those of
/// `part(x)`.
///
/// Use [`backward`], or that of a strategy (`Ddp`, `Fsdp`, `Pipeline`, `TensorParallel`). candle's own
/// `loss.backward()` cannot return the gradients of variables that `part` uses, and fails with
/// [`Error::OutsideBackward`].
///
/// `part` must be deterministic: it may depend only on its input and on parameters, and must not have side effects.
/// The second run uses the random numbers of the first in [`Dropout`](crate::Dropout), also in
/// [`attention`](crate::attention), and the same precision of [`autocast`](crate::autocast); other layers must draw random numbers
/// with [`drawn`] (candle's dropout does not, and would use another mask the second time).
///
/// Tensors computed outside that `part` captures get their gradients, too, but backward then continues from them to
/// the parameters separately for each part that uses them: pass such tensors as `x`, or compute them inside.
///
/// Parts may be nested. An `x` that is not contiguous is copied first.
///
/// # Bits
/// Gradients are equal to the bit to those without recomputation, with one exception: if a variable is used three
/// times or more, several of them in one part, its gradients are added in another order.
///
/// # Cost
/// One more forward of `part`, which is a third of a step if backward takes twice as long as forward; copies of `x`
/// and of the result. While backward is in the part, all intermediate results of the part are in memory.
///
/// # Errors
/// Errors of `part`. In backward: those, [`Error::NotRepeated`] and [`Error::OutsideBackward`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ops::{activation_bytes, backward, recompute};
///
/// let x = Tensor::ones((64, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let weight = Var::from_tensor(&Tensor::ones((8, 8), candle_core::DType::F32, &Device::Cpu)?)?;
/// let layer = { let weight = weight.clone(); move |x: &Tensor| x.matmul(&weight)?.tanh()?.sqr()?.exp()? * 1e-2 };
/// let kept = (0..4).try_fold(x.clone(), |x, _| layer(&x))?.sum_all()?;
/// let again = (0..4).try_fold(x, |x, _| recompute(&x, layer.clone()))?.sum_all()?;
/// assert!(activation_bytes(&again, []) < activation_bytes(&kept, []) / 4);
/// let gradients = [backward(&kept)?, backward(&again)?];
/// let [expected, got] = gradients.map(|grads| grads.get(&weight).unwrap().to_vec2::<f32>());
/// assert_eq!(got?, expected?);
/// assert!(again.backward().unwrap_err().to_string().contains("ops::backward"));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Source
/// Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016).
pub fn recompute(
    x: &Tensor,
    part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    segment(x, part, false)
}

/// As [`recompute`], but keeps the results of matrix products and of attention, and recomputes only the cheap
/// operations: norms, activations, rotary embeddings, sums. The gradients are the same, to the bit.
///
/// It keeps products of [`Linear`](crate::Linear), [`attention`](crate::attention) and the layers of tensor
/// parallelism; other layers use [`kept_result`]. On a CPU, products of [`Linear`](crate::Linear) in f16 and bf16 are
/// recomputed; on other devices, all products except those of tensor parallelism are.
///
/// # Cost
/// The cheap operations once more; copies of `x` and of the result, and of each kept result while backward is in the
/// part.
///
/// # Errors
/// Errors of [`recompute`].
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use ops::{activation_bytes, backward, linear_no_bias, recompute, recompute_cheap};
///
/// let vars = VarMap::new();
/// let layer = linear_no_bias(8, 8, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let part = move |x: &Tensor| layer.forward(&x.tanh()?)?.sqr()?.exp()?.recip();
/// let x = Tensor::ones((64, 8), DType::F32, &Device::Cpu)?;
/// let [all, cheap, none] = [part(&x)?, recompute_cheap(&x, part.clone())?, recompute(&x, part)?].map(|y| {
///     let bytes = activation_bytes(&y, []);
///     (bytes, backward(&y.sum_all().unwrap()).unwrap().get(&vars.all_vars()[0]).unwrap().to_vec2::<f32>().unwrap())
/// });
/// assert!(all.0 > cheap.0 && cheap.0 > none.0);
/// assert!(all.1 == cheap.1 && cheap.1 == none.1);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Source
/// Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 5.
pub fn recompute_cheap(
    x: &Tensor,
    part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    segment(x, part, true)
}

fn segment(
    x: &Tensor,
    part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    keeps: bool,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (output, met) = running::recorded(keeps, || part(&x.detach()))?;
    if !output.dtype().is_float() || !(x.track_op() || output.track_op()) {
        return Ok(output.detach());
    }
    // A variable, so that backward reaches this operation even if `x` depends on none.
    let anchor = Var::zeros((), DType::F32, x.device())?;
    let (bytes, members, kept) = (met.bytes(), met.members.clone(), SavedBytes::default());
    let output = Mutex::new(Some(output.detach()));
    let (precision, rows) = (Precision::current(), RowContext::current());
    let segment = Segment { part, met, precision, rows, output, _kept: kept.clone() };
    let result = tape::apply_op2(&x, &anchor, segment)?;
    members.iter().for_each(|member| member.is_in(result.id()));
    kept.by(&result, bytes);
    Ok(result)
}

impl Record {
    /// Bytes kept for the second run.
    fn bytes(&self) -> usize {
        let of = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let results = self.results.iter().flatten().flatten().map(of).sum::<usize>();
        size_of_val(&*self.draws) + results
    }
}

/// Returns a copy of an operation's recorded result.
pub(crate) fn copied(known: &Tensor) -> Result<(CpuStorage, Shape)> {
    let (storage, layout) = known.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok((storage.to_dtype(layout, storage.dtype())?, layout.shape().clone())),
        _ => device_error(),
    }
}

/// A part of a model that has run once.
struct Segment<F> {
    part: F,
    met: Record,
    precision: Precision,
    rows: RowContext,
    /// Its result, until that is copied into the graph.
    output: Mutex<Option<Tensor>>,
    _kept: SavedBytes,
}

impl<F> Segment<F> {
    /// Calls `copy` with the part's result, then drops the result.
    fn take_output<T>(&self, copy: impl FnOnce(&Storage, &Layout) -> Result<T>) -> Result<(T, Shape)> {
        let output = lock(&self.output).take();
        let Some(output) = output else { bail!("recompute: a result is given once") };
        // Metal converts no dtype to itself.
        let output = if output.device().is_metal() { output.force_contiguous()? } else { output };
        let (storage, layout) = output.storage_and_layout();
        Ok((copy(&storage, layout)?, layout.shape().clone()))
    }
}

fn device_error<T>() -> Result<T> {
    bail!("recompute: a part's input and its result must be on one device")
}

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync> CustomOp2 for Segment<F> {
    fn name(&self) -> &'static str {
        "recompute"
    }

    // Conversion to its own dtype copies the elements of the layout, in its order.

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take_output(|output, layout| match output {
            Storage::Cpu(output) => output.to_dtype(layout, output.dtype()),
            _ => device_error(),
        })
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take_output(|output, layout| match output {
            Storage::Cuda(output) => output.to_dtype(layout, output.dtype()),
            _ => device_error(),
        })
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.take_output(|output, layout| match output {
            Storage::Metal(output) => output.try_clone(layout),
            _ => device_error(),
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        _: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _place = current_node::enter(result.id());
        let has_gradient = x.dtype().is_float() && x.track_op();
        let input = if has_gradient { Some(Var::from_tensor(&x.detach())?) } else { None };
        let x = input.as_ref().map_or_else(|| x.detach(), |input| input.as_tensor().clone());
        let again = || self.rows.scope(|| (self.part)(&x));
        let output = running::replayed(&self.met, || self.precision.scope(again))?;
        if (output.shape(), output.dtype()) != (result.shape(), result.dtype()) {
            let of = |tensor: &Tensor| format!("{:?} of shape {:?}", tensor.dtype(), tensor.dims());
            let (first, again) = (of(result), of(&output));
            return Err(Error::NotRepeated { what: "it gave", first, again }.into());
        }
        let root = scalar_with_gradient(&output, gradient.clone())?;
        drop(output);
        let mut gradients = gradients::part_gradients(&root)?;
        drop(root);
        let own = match &input {
            Some(input) => Some(gradients.remove(&input.id()).map_or_else(|| input.zeros_like(), Ok)?),
            None => None,
        };
        gradients::add_to_enclosing(gradients)?;
        Ok((own, None))
    }
}
