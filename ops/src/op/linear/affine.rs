//! The linear layer's CPU operation: product and bias together.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Tensor, bail};
use half::{bf16, f16};

use super::NAME;
use crate::Precision;
use crate::defer::defer;
use crate::dense::{dense, with_numbers};
use crate::product::{Element, product, product_of};
use crate::real::Real;
use crate::recompute::copied;

/// `x w' + b`, or `x w'` without a bias.
pub(super) struct Affine {
    precision: Precision,
    /// The result of an earlier run, where the operation is recomputed.
    known: Option<Tensor>,
}

/// Number of rows, inputs and outputs of a product.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl Sizes {
    fn of(x: &Shape, weight: &Shape) -> candle_core::Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        // Not elements divided by inputs, since rows may have 0 inputs.
        let rows = x.dims().iter().rev().skip(1).try_fold(1usize, |rows, &dim| rows.checked_mul(dim));
        // At most 8 bytes for each element.
        let has_room = |rows: &usize| isize::try_from(rows.saturating_mul(outputs).saturating_mul(8)).is_ok();
        match rows.filter(has_room) {
            Some(rows) => Ok(Self { rows, inputs, outputs }),
            None => bail!("{NAME}: too many rows for {outputs} outputs: {x:?}"),
        }
    }
}

/// Layout of a contiguous matrix at the start offset of `layout`.
fn matrix(layout: &Layout, rows: usize, columns: usize) -> Layout {
    Layout::contiguous_with_offset((rows, columns), layout.start_offset())
}

impl Affine {
    /// Takes the current precision of this thread.
    pub(super) fn new(known: Option<Tensor>) -> Self {
        Self { precision: Precision::current(), known }
    }

    fn forward<T: Element>(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: &[T::Sum],
    ) -> candle_core::Result<CpuStorage> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x_layout.shape(), weight_layout.shape())?;
        let weight_layout = matrix(weight_layout, outputs, inputs).transpose(0, 1)?;
        let x_layout = matrix(x_layout, rows, inputs);
        let mut out = product::<T>([(x, &x_layout), (weight, &weight_layout)], self.precision)?;
        for row in out.chunks_exact_mut(outputs.max(1)) {
            row.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
        }
        Ok(T::to_cpu_storage_owned(T::narrow(out)))
    }

    /// Returns the gradient of the input.
    fn of_input<T: Element>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x.shape(), weight.shape())?;
        let of_weight = matrix(weight.layout(), outputs, inputs);
        let of_y = matrix(gradient.layout(), rows, outputs);
        let to_x = product_of::<T>([(gradient, of_y), (weight, of_weight)], self.precision)?;
        Tensor::from_vec(T::narrow(to_x), x.shape(), x.device())
    }

    /// Returns the gradients of the weight and, if there is one, the bias.
    fn of_weights<T: Element>(
        &self,
        x: &Tensor,
        weight: &Shape,
        has_bias: bool,
        gradient: &Tensor,
    ) -> candle_core::Result<Vec<Tensor>> {
        let Sizes { rows, inputs, outputs } = Sizes::of(x.shape(), weight)?;
        let (of_y, of_x) = (matrix(gradient.layout(), rows, outputs), matrix(x.layout(), rows, inputs));
        let to_weight = product_of::<T>([(gradient, of_y.transpose(0, 1)?), (x, of_x)], self.precision)?;
        let mut found = vec![Tensor::from_vec(T::narrow(to_weight), weight, x.device())?];
        if has_bias {
            let to_bias =
                with_numbers(gradient, |gradient| Ok(T::narrow(column_sums(&T::widen(gradient), outputs))))?;
            found.push(Tensor::from_vec(to_bias, outputs, x.device())?);
        }
        Ok(found)
    }

    /// Returns the gradients of input, weight and bias. The last two are `None` if they are deferred, or if both are
    /// frozen.
    fn gradients<T: Element>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        // Input data needs no gradient.
        let of_x = x.track_op().then(|| self.of_input::<T>(x, weight, gradient)).transpose()?;
        if !weight.track_op() && bias.is_none_or(|bias| !bias.track_op()) {
            return Ok([of_x, None, None]);
        }
        // Detached: their history would keep the whole graph alive.
        let (input, shape, late) = (x.detach(), weight.shape().clone(), gradient.detach());
        let (weights, has_bias) = ([Some(weight), bias].into_iter().flatten(), bias.is_some());
        let precision = self.precision;
        let later =
            move || Affine { precision, known: None }.of_weights::<T>(&input, &shape, has_bias, &late);
        if defer(&weights.collect::<Vec<_>>(), later) {
            return Ok([of_x, None, None]);
        }
        let mut of_weights = self.of_weights::<T>(x, weight.shape(), has_bias, gradient)?.into_iter();
        Ok([of_x, of_weights.next(), of_weights.next()])
    }

    /// Returns the layer's output and its shape.
    fn cpu<T: Element>(
        &self,
        left: (&CpuStorage, &Layout),
        right: (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let bias = bias.map_or(Ok(&[][..]), |(bias, layout)| dense::<T>(bias, layout))?;
        let mut dims = left.1.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = right.1.shape().dims2()?.0;
        }
        match &self.known {
            Some(known) if known.dims() == dims => copied(known),
            _ => Ok((self.forward::<T>(left, right, &T::widen(bias))?, Shape::from(dims))),
        }
    }

    fn bwd_with(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let gradient = gradient.contiguous()?;
        match x.dtype() {
            DType::F32 => self.gradients::<f32>(x, weight, bias, &gradient),
            DType::F16 => self.gradients::<f16>(x, weight, bias, &gradient),
            DType::BF16 => self.gradients::<bf16>(x, weight, bias, &gradient),
            _ => self.gradients::<f64>(x, weight, bias, &gradient),
        }
    }
}

/// Rows that are summed before they are added to the total: the rounding error of a sum grows with its length.
const BLOCK: usize = 64;

pub(crate) fn column_sums<T: Real>(numbers: &[T], columns: usize) -> Vec<T> {
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
        let (left, right, bias) = ((x, x_layout), (weight, weight_layout), Some((bias, bias_layout)));
        match x {
            CpuStorage::F32(_) => self.cpu::<f32>(left, right, bias),
            CpuStorage::F64(_) => self.cpu::<f64>(left, right, bias),
            CpuStorage::F16(_) => self.cpu::<f16>(left, right, bias),
            CpuStorage::BF16(_) => self.cpu::<bf16>(left, right, bias),
            _ => bail!("{NAME}: not a float dtype"),
        }
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_weight, of_bias] = self.bwd_with(x, weight, Some(bias), gradient)?;
        Ok((of_x, of_weight, of_bias))
    }
}

impl CustomOp2 for Affine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (left, right) = ((x, x_layout), (weight, weight_layout));
        match x {
            CpuStorage::F32(_) => self.cpu::<f32>(left, right, None),
            CpuStorage::F64(_) => self.cpu::<f64>(left, right, None),
            CpuStorage::F16(_) => self.cpu::<f16>(left, right, None),
            CpuStorage::BF16(_) => self.cpu::<bf16>(left, right, None),
            _ => bail!("{NAME}: not a float dtype"),
        }
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_weight, _] = self.bwd_with(x, weight, None, gradient)?;
        Ok((of_x, of_weight))
    }
}
