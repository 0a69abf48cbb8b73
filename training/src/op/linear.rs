//! A linear layer whose product and bias are one operation.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Module, Shape, Storage, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::real::Real;
use super::{dense, with_numbers, working_dtype};
use crate::defer::defer;
use crate::{Error, Result};

const NAME: &str = "linear";

/// `x w' + b`: what `candle_nn::Linear` computes, in one operation forward and one backward in place of some twenty.
/// For small layers that is most of the time.
///
/// # Shapes
/// Input `(.., inputs)`, weight `(outputs, inputs)`, bias `(outputs)`, result `(.., outputs)`.
///
/// # Cost
/// One matrix product forward and two backward.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = training::linear(3, 2, builder.pp("fc"))?; // nn.Linear(3, 2)
/// let y = layer.forward(&Tensor::ones((4, 5, 3), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [4, 5, 2]);
/// let grads = y.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Tensor,
}

/// A [`Linear`] of the builder's `weight` and `bias`, which it asks for as `candle_nn::linear` does.
///
/// # Errors
/// Variables of these names that exist and are of another shape.
pub fn linear(inputs: usize, outputs: usize, builder: VarBuilder<'_>) -> candle_core::Result<Linear> {
    let weight =
        builder.get_with_hints((outputs, inputs), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1.0 / (inputs as f64).sqrt();
    let bias = builder.get_with_hints(outputs, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Linear { weight, bias })
}

impl Linear {
    /// A layer with the given weight and bias.
    pub fn new(weight: Tensor, bias: Tensor) -> Self {
        Self { weight, bias }
    }

    /// What the input is multiplied with.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What is added.
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        let unfit = |tensor, expected: Vec<usize>, got: &Tensor| {
            Err(Error::Unfit { operation: NAME, tensor, expected, got: got.dims().to_vec() })
        };
        let &[outputs, inputs] = self.weight.dims() else { return unfit("weight", vec![1, 1], &self.weight) };
        if self.bias.dims() != [outputs] {
            return unfit("bias", vec![outputs], &self.bias);
        }
        if x.dims().last() != Some(&inputs) {
            let mut expected = x.dims().to_vec();
            expected.pop();
            expected.push(inputs);
            return unfit("input", expected, x);
        }
        for (tensor, parameter) in [("weight", &self.weight), ("bias", &self.bias)] {
            if parameter.dtype() != x.dtype() {
                let (expected, got) = (x.dtype(), parameter.dtype());
                return Err(Error::OtherDType { operation: NAME, tensor, expected, got });
            }
        }
        Ok(())
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.check(x)?;
        working_dtype(NAME, x.dtype())?;
        if x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64) {
            return x.contiguous()?.apply_op3(&self.weight.contiguous()?, &self.bias.contiguous()?, Affine);
        }
        candle_nn::Linear::new(self.weight.clone(), Some(self.bias.clone())).forward(x)
    }
}

struct Affine;

/// Rows, inputs and outputs of a product.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl Sizes {
    fn of(x: &Shape, weight: &Shape) -> candle_core::Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        // Not the elements by the inputs: a row without inputs is a row all the same.
        let rows = x.dims().iter().rev().skip(1).try_fold(1usize, |rows, &dim| rows.checked_mul(dim));
        // Numbers of 8 bytes, at most.
        let has_room = |rows: &usize| isize::try_from(rows.saturating_mul(outputs).saturating_mul(8)).is_ok();
        match rows.filter(has_room) {
            Some(rows) => Ok(Self { rows, inputs, outputs }),
            None => bail!("{NAME}: too many rows for {outputs} outputs: {x:?}"),
        }
    }
}

/// A dense matrix that begins where the layout's tensor does.
fn matrix(layout: &Layout, rows: usize, columns: usize) -> Layout {
    Layout::contiguous_with_offset((rows, columns), layout.start_offset())
}

impl Affine {
    fn forward<T: Real>(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: &[T],
    ) -> candle_core::Result<CpuStorage> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x_layout.shape(), weight_layout.shape())?;
        let weight_layout = matrix(weight_layout, outputs, inputs).transpose(0, 1)?;
        let sizes = (rows, outputs, inputs);
        let mut out = product::<T>((x, matrix(x_layout, rows, inputs)), (weight, weight_layout), sizes)?;
        for row in out.chunks_exact_mut(outputs.max(1)) {
            row.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
        }
        Ok(T::to_cpu_storage_owned(out))
    }

    /// The gradient of the input.
    fn of_input<T: Real>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x.shape(), weight.shape())?;
        let of_weight = matrix(weight.layout(), outputs, inputs);
        let of_y = matrix(gradient.layout(), rows, outputs);
        let to_x = product_of::<T>((gradient, of_y), (weight, of_weight), (rows, inputs, outputs))?;
        Tensor::from_vec(to_x, x.shape(), x.device())
    }

    /// The gradients of weight and bias.
    fn of_weights<T: Real>(
        &self,
        x: &Tensor,
        weight: &Shape,
        gradient: &Tensor,
    ) -> candle_core::Result<Vec<Tensor>> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x.shape(), weight)?;
        let (of_y, of_x) = (matrix(gradient.layout(), rows, outputs), matrix(x.layout(), rows, inputs));
        let sizes = (outputs, inputs, rows);
        let to_weight = product_of::<T>((gradient, of_y.transpose(0, 1)?), (x, of_x), sizes)?;
        let to_bias = with_numbers(gradient, |gradient| Ok(column_sums::<T>(gradient, outputs)))?;
        Ok(vec![
            Tensor::from_vec(to_weight, weight, x.device())?,
            Tensor::from_vec(to_bias, outputs, x.device())?,
        ])
    }

    /// The gradients of input, weight and bias; the last two later where somebody wants it so.
    fn gradients<T: Real>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        // Data have no gradient.
        let of_x = x.track_op().then(|| self.of_input::<T>(x, weight, gradient)).transpose()?;
        // Without their history, which would keep the whole graph alive.
        let (input, shape, late) = (x.detach(), weight.shape().clone(), gradient.detach());
        if defer(&[weight, bias], move || Affine.of_weights::<T>(&input, &shape, &late)) {
            return Ok([of_x, None, None]);
        }
        let mut of_weights = self.of_weights::<T>(x, weight.shape(), gradient)?.into_iter();
        Ok([of_x, of_weights.next(), of_weights.next()])
    }
}

/// `a b` for matrices of m rows, n columns and k in common.
fn product<T: Real>(
    (a, a_layout): (&CpuStorage, Layout),
    (b, b_layout): (&CpuStorage, Layout),
    (m, n, k): (usize, usize, usize),
) -> candle_core::Result<Vec<T>> {
    if m == 0 || n == 0 || k == 0 {
        // Sums of nothing.
        return Ok(vec![T::zero(); m * n]);
    }
    T::cpu_storage_data(a.matmul(b, (1, m, n, k), &a_layout, &b_layout)?)
}

/// The same of tensors.
fn product_of<T: Real>(
    (a, a_layout): (&Tensor, Layout),
    (b, b_layout): (&Tensor, Layout),
    sizes: (usize, usize, usize),
) -> candle_core::Result<Vec<T>> {
    let (a, b) = (a.storage_and_layout().0, b.storage_and_layout().0);
    match (&*a, &*b) {
        (Storage::Cpu(a), Storage::Cpu(b)) => product((a, a_layout), (b, b_layout), sizes),
        _ => bail!("a fused operation on the CPU was given a tensor of another device"),
    }
}

/// Rows that are summed before they go to the total: the error of a sum grows with its length.
const BLOCK: usize = 64;

fn column_sums<T: Real>(numbers: &[T], columns: usize) -> Vec<T> {
    let mut totals = vec![T::zero(); columns];
    let mut sums = totals.clone();
    for block in numbers.chunks(BLOCK * columns.max(1)) {
        sums.fill(T::zero());
        for row in block.chunks_exact(columns.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x);
        }
        totals.iter_mut().zip(&sums).for_each(|(total, &sum)| *total += sum);
    }
    totals
}

impl CustomOp3 for Affine {
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
        let (left, right) = ((x, x_layout), (weight, weight_layout));
        let out = match x {
            CpuStorage::F32(_) => self.forward::<f32>(left, right, dense(bias, bias_layout)?)?,
            CpuStorage::F64(_) => self.forward::<f64>(left, right, dense(bias, bias_layout)?)?,
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        let mut dims = x_layout.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = bias_layout.shape().elem_count();
        }
        Ok((out, Shape::from(dims)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let [of_x, of_weight, of_bias] = match x.dtype() {
            DType::F32 => self.gradients::<f32>(x, weight, bias, &gradient)?,
            _ => self.gradients::<f64>(x, weight, bias, &gradient)?,
        };
        Ok((of_x, of_weight, of_bias))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The same as candle's layer, gradients included, for inputs of several ranks and from the middle of a tensor.
    #[test]
    fn a_fused_layer_equals_candles() -> candle_core::Result<()> {
        for dims in [&[5, 4][..], &[2, 3, 4], &[2, 1, 3, 4], &[130, 4], &[1, 4]] {
            let random = |dims: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 2., dims, &Device::Cpu)?);
            let mut larger = dims.to_vec();
            larger[0] += 1;
            let (x, weight, bias) = (random(&larger)?, random(&[6, 4])?, random(&[6])?);
            let middle = x.narrow(0, 1, dims[0])?;
            let candles = candle_nn::Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
            let fused = Linear::new(weight.as_tensor().clone(), bias.as_tensor().clone());
            let both = [candles.forward(&middle)?, fused.forward(&middle)?];
            let loss = |y: &Tensor| y.sqr()?.sum_all();
            assert_agree(both, loss, &[&x, &weight, &bias], 1e-11, &format!("{dims:?}"))?;
        }
        Ok(())
    }

    /// A size of 0 anywhere: as many numbers as the shape says, forward and backward.
    #[test]
    fn sizes_of_nothing_are_whole() -> candle_core::Result<()> {
        for (rows, inputs, outputs) in
            [(&[4][..], 0, 3), (&[2, 3], 0, 1), (&[0], 0, 3), (&[0, 2], 4, 3), (&[5], 2, 0)]
        {
            let random = |dims: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 2., dims, &Device::Cpu)?);
            let (x, weight) = (random(&[rows, &[inputs]].concat())?, random(&[outputs, inputs])?);
            let bias = random(&[outputs])?;
            let y = Linear::new(weight.as_tensor().clone(), bias.as_tensor().clone()).forward(&x)?;
            let what = format!("{rows:?}, {inputs} to {outputs}");
            let numbers = with_numbers(&y, |numbers: &[f64]| Ok(numbers.to_vec()))?;
            let count: usize = rows.iter().product();
            assert_eq!(y.dims(), [rows, &[outputs]].concat(), "{what}");
            assert_eq!(numbers.len(), count * outputs, "{what}");
            if inputs == 0 {
                assert_eq!(numbers, bias.to_vec1::<f64>()?.repeat(count), "{what}");
            }
            let grads = y.sum_all()?.backward()?;
            for var in [&x, &weight, &bias] {
                assert_eq!(grads.get(var).map(Tensor::dims), Some(var.dims()), "{what}");
            }
            let of_bias = grads.get(&bias).map(Tensor::to_vec1::<f64>).transpose()?;
            assert_eq!(of_bias, Some(vec![count as f64; outputs]), "{what}");
        }
        Ok(())
    }

    #[test]
    fn half_types_and_empty_batches_work_and_misfits_are_named() {
        let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
        let layer = |dtype| Linear::new(zeros(&[3, 2], dtype), zeros(&[3], dtype));
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            assert_eq!(layer(dtype).forward(&zeros(&[4, 2], dtype)).unwrap().dims(), [4, 3]);
        }
        assert_eq!(layer(DType::F32).forward(&zeros(&[0, 2], DType::F32)).unwrap().dims(), [0, 3]);
        let line = |x: Tensor| layer(DType::F32).forward(&x).unwrap_err().to_string();
        assert_eq!(line(zeros(&[4, 3], DType::F32)), "linear: input must be of shape [4, 2], got [4, 3]");
        assert!(line(zeros(&[4, 2], DType::F64)).contains("weight is F32, the input F64"));
    }
}
