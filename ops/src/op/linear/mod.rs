//! Linear layer with product and bias as one operation.

mod affine;
mod composed;

use candle_core::{Module, Tensor};
use candle_nn::{Init, VarBuilder};

pub(crate) use self::affine::column_sums;

use self::affine::Affine;
use super::working_dtype;
use crate::{Error, Result, kept_result, tape};

const NAME: &str = "linear";

/// `x w' + b`: computes `candle_nn::Linear` with one operation forward and one backward instead of about twenty,
/// which dominate the time of small layers.
///
/// # Shapes
/// Input `(.., inputs)`, weight `(outputs, inputs)`, bias `(outputs)`, result `(.., outputs)`.
///
/// # Cost
/// One matrix product forward and two backward. On a CPU, f16 and bf16 are multiplied as they are, with all their digits
/// and sums in f32, rounded once.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = ops::linear(3, 2, builder.pp("fc"))?; // nn.Linear(3, 2)
/// let y = layer.forward(&Tensor::ones((4, 5, 3), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [4, 5, 2]);
/// let grads = y.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

/// Makes a [`Linear`] of the builder's `weight` and `bias`, requested with the same initialization as in
/// `candle_nn::linear`.
///
/// # Errors
/// Variables of these names that exist with another shape.
pub fn linear(inputs: usize, outputs: usize, builder: VarBuilder<'_>) -> candle_core::Result<Linear> {
    let weight =
        builder.get_with_hints((outputs, inputs), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1.0 / (inputs as f64).sqrt();
    let bias = builder.get_with_hints(outputs, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Linear { weight, bias: Some(bias) })
}

/// Makes a [`Linear`] of the builder's `weight` only: `nn.Linear(inputs, outputs, bias=False)`.
///
/// # Errors
/// A variable of this name that exists with another shape.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let builder = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = ops::linear_no_bias(3, 2, builder.pp("fc"))?;
/// let y = layer.forward(&Tensor::zeros((1, 3), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.0, 0.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_no_bias(inputs: usize, outputs: usize, builder: VarBuilder<'_>) -> candle_core::Result<Linear> {
    let weight =
        builder.get_with_hints((outputs, inputs), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Linear { weight, bias: None })
}

impl Linear {
    /// A layer with the given weight and bias, or with `None` for no bias.
    pub fn new(weight: Tensor, bias: impl Into<Option<Tensor>>) -> Self {
        Self { weight, bias: bias.into() }
    }

    /// The weight, `(outputs, inputs)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        let unfit = |tensor, expected: Vec<usize>, got: &Tensor| {
            Err(Error::ShapeMismatch { operation: NAME, tensor, expected, got: got.dims().to_vec() })
        };
        let &[outputs, inputs] = self.weight.dims() else { return unfit("weight", vec![1, 1], &self.weight) };
        if let Some(bias) = self.bias.as_ref().filter(|bias| bias.dims() != [outputs]) {
            return unfit("bias", vec![outputs], bias);
        }
        if x.dims().last() != Some(&inputs) {
            let mut expected = x.dims().to_vec();
            expected.pop();
            expected.push(inputs);
            return unfit("input", expected, x);
        }
        let parameters = [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())];
        for (tensor, parameter) in parameters.into_iter().filter_map(|(name, tensor)| Some((name, tensor?))) {
            if parameter.dtype() != x.dtype() {
                let (expected, got) = (x.dtype(), parameter.dtype());
                return Err(Error::DTypeMismatch { operation: NAME, tensor, expected, got });
            }
        }
        Ok(())
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.check(x)?;
        working_dtype(NAME, x.dtype())?;
        if x.device().is_cpu() {
            let (x, weight) = (x.contiguous()?, self.weight.contiguous()?);
            return kept_result(|known| match &self.bias {
                Some(bias) => tape::apply_op3(&x, &weight, &bias.contiguous()?, Affine::new(known)),
                None => tape::apply_op2(&x, &weight, Affine::new(known)),
            });
        }
        if x.elem_count() == 0 {
            return candle_nn::Linear::new(self.weight.clone(), self.bias.clone()).forward(x);
        }
        composed::linear(x, &self.weight, self.bias.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::super::assert_agree;
    use super::*;
    use crate::dense::with_numbers;

    /// Equals candle's layer, gradients included, for inputs of several ranks and with a storage offset.
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
            let candles = candle_nn::Linear::new(weight.as_tensor().clone(), None);
            let fused = Linear::new(weight.as_tensor().clone(), None);
            let both = [candles.forward(&middle)?, fused.forward(&middle)?];
            assert_agree(both, loss, &[&x, &weight], 1e-11, &format!("{dims:?}, without bias"))?;
        }
        Ok(())
    }

    #[test]
    fn a_frozen_layer_computes_no_gradient_of_its_own() -> candle_core::Result<()> {
        let x = Var::zeros((3, 4), DType::F32, &Device::Cpu)?;
        let (weight, bias) = (x.ones_like()?, Tensor::ones(3, DType::F32, &Device::Cpu)?);
        let mut expected = None;
        for bias in [None, Some(bias)] {
            let y = match &bias {
                Some(bias) => Linear::new(weight.clone(), bias.clone()).forward(&x)?,
                None => Linear::new(weight.clone(), None).forward(&x)?,
            };
            let grads = y.sum_all()?.backward()?;
            assert!(grads.get(&weight).is_none() && bias.is_none_or(|bias| grads.get(&bias).is_none()));
            let of_x = grads.get(&x).map(|of_x| of_x.to_vec2::<f32>()).transpose()?;
            assert_eq!(*expected.get_or_insert(of_x.clone()), of_x);
        }
        assert_eq!(expected.flatten(), Some(vec![vec![3.0; 4]; 3]));
        Ok(())
    }

    /// With any size 0, results and gradients have the number of elements that the shape implies.
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

    /// Results and gradients of 16 bits are those of f64 rounded, also where gradients of the weight are deferred.
    #[test]
    fn layers_of_sixteen_bits_equal_those_of_f64() -> candle_core::Result<()> {
        for (dtype, digits) in [(DType::BF16, 8), (DType::F16, 11)] {
            for dims in [&[3, 130][..], &[2, 40, 130]] {
                let random = |dims: &[usize]| {
                    Var::from_tensor(&Tensor::randn(0f32, 0.5, dims, &Device::Cpu)?.to_dtype(dtype)?)
                };
                let vars = [random(dims)?, random(&[70, 130])?, random(&[70])?];
                let found = |dtype: DType| {
                    let [x, weight, bias] = vars.each_ref().map(|var| var.as_tensor().to_dtype(dtype));
                    let y = Linear::new(weight?, bias?).forward(&x?)?;
                    let grads = y.to_dtype(DType::F64)?.sqr()?.sum_all()?.backward()?;
                    let of = |var: &Var| grads.get(var).cloned().expect("a gradient");
                    Ok::<_, candle_core::Error>([vec![y.detach()], vars.iter().map(of).collect()].concat())
                };
                // The gradient of y is rounded before it is multiplied, here in both.
                for (x, exact) in found(dtype)?.iter().zip(&found(DType::F64)?) {
                    let gap = (x.to_dtype(DType::F64)? - exact.to_dtype(DType::F64)?)?.abs()?.max_all()?;
                    let largest = exact.to_dtype(DType::F64)?.abs()?.max_all()?.to_scalar::<f64>()?;
                    assert_eq!((x.dtype(), x.dims()), (dtype, exact.dims()));
                    assert!(
                        gap.to_scalar::<f64>()? < 4.0 * 0.5f64.powi(digits) * largest,
                        "{dtype:?} {dims:?}"
                    );
                }
            }
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
