//! Gated linear units: an activation of one tensor times another, in one pass.

use candle_core::{DType, Tensor, Var};

use super::cast::cast;
use super::working_dtype;
use crate::blocks::{BLOCK, blocks};
use crate::dense::with_numbers;
use crate::real::Real;
use crate::simd::vectorized;
use crate::{Error, Result, cuda, tape};

/// Activation function of a gated linear unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gate {
    /// `x sigmoid(x)`: "silu", also called swish.
    #[default]
    Silu,
    /// `x Φ(x)`: "gelu".
    Gelu,
    /// GELU's approximation by the hyperbolic tangent: "gelu_pytorch_tanh", "gelu_new".
    GeluTanh,
}

impl Gate {
    /// Computes `activation(gate) * up`, with fused gradients.
    ///
    /// # Shapes
    /// Any, the same for both; the result has it too.
    ///
    /// # Cost
    /// On a CPU one pass forward and one backward, in parallel; only the inputs are kept. The bits do not depend on
    /// the number of threads.
    ///
    /// # Errors
    /// Shapes or dtypes that differ; tensors that are not of f16, bf16, f32 or f64.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::Gate;
    ///
    /// let (gate, up) = (Tensor::new(&[2f64], &Device::Cpu)?, Tensor::new(&[3f64], &Device::Cpu)?);
    /// let y = Gate::Silu.apply(&gate, &up)?.to_vec1::<f64>()?;
    /// assert!((y[0] - 6.0 / (1.0 + (-2f64).exp())).abs() < 1e-12);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn apply(self, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
        self.check(gate, up)?;
        let dtype = working_dtype(self.operation(), gate.dtype())?;
        let is_cuda = cuda::knows(gate);
        if !is_cuda && !gate.device().is_cpu() {
            return self.composed(&gate.to_dtype(dtype)?, &up.to_dtype(dtype)?)?.to_dtype(gate.dtype());
        }
        let (gate, up) = (gate.contiguous()?, up.contiguous()?);
        let y = match is_cuda {
            true => cuda::gated(self.kind(), &gate.detach(), &up.detach())?,
            // Of 16 bits, nothing wider is kept.
            false => {
                cast(&self.fused(&cast(&gate.detach(), dtype)?, &cast(&up.detach(), dtype)?)?, gate.dtype())?
            }
        };
        tape::explicit_op2(self.operation(), [&gate, &up], y, move |[gate, up], gradient| {
            Ok(self.gradients(gate, up, gradient)?.map(Some))
        })
    }

    /// Returns the gradients of gate and up, without a graph.
    pub(super) fn gradients(
        self,
        gate: &Tensor,
        up: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<[Tensor; 2]> {
        let [gate, up, gradient] = [gate, up, gradient].map(Tensor::detach);
        if cuda::knows(&gate) {
            return cuda::gated_backward(self.kind(), &gate, &up, &gradient.contiguous()?);
        }
        let dtype = working_dtype(self.operation(), gate.dtype())?;
        let wide = |x: &Tensor| cast(x, dtype)?.contiguous();
        let (wide_gate, up, gradient) = (wide(&gate)?, wide(&up)?, wide(&gradient)?);
        let [of_gate, of_up] = match (gate.device().is_cpu(), dtype) {
            (true, DType::F32) => self.fused_gradients::<f32>(&wide_gate, &up, &gradient)?,
            (true, _) => self.fused_gradients::<f64>(&wide_gate, &up, &gradient)?,
            (false, _) => {
                let (wide_gate, up) = (Var::from_tensor(&wide_gate)?, Var::from_tensor(&up)?);
                let y = tape::scalar_with_gradient(&self.composed(&wide_gate, &up)?, gradient)?;
                let mut grads = y.backward()?;
                let mut of = |var: &Var| grads.remove(var).map_or_else(|| var.zeros_like(), Ok);
                [of(&wide_gate)?, of(&up)?]
            }
        };
        Ok([cast(&of_gate, gate.dtype())?, cast(&of_up, gate.dtype())?])
    }

    /// Its number in the kernels of [`cuda`].
    pub(super) fn kind(self) -> u32 {
        match self {
            Self::Silu => 0,
            Self::Gelu => 1,
            Self::GeluTanh => 2,
        }
    }

    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
            Self::Gelu => "geglu",
            Self::GeluTanh => "geglu_tanh",
        }
    }

    fn check(self, gate: &Tensor, up: &Tensor) -> Result<()> {
        let (operation, tensor) = (self.operation(), "up");
        if up.dims() != gate.dims() {
            let (expected, got) = (gate.dims().to_vec(), up.dims().to_vec());
            return Err(Error::ShapeMismatch { operation, tensor, expected, got });
        }
        if up.dtype() != gate.dtype() {
            let (expected, got) = (gate.dtype(), up.dtype());
            return Err(Error::DTypeMismatch { operation, tensor, expected, got });
        }
        Ok(())
    }

    fn composed(self, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
        let active = match self {
            Self::Silu => gate.silu()?,
            Self::Gelu => gate.gelu_erf()?,
            Self::GeluTanh => gate.gelu()?,
        };
        active * up
    }
}

/// `silu(gate) * up`: the SwiGLU of Llama and related models, in one operation ([`Gate::apply`]).
///
/// # Errors
/// As [`Gate::apply`].
///
/// # Source
/// Shazeer, "GLU Variants Improve Transformer" (2020).
///
/// ```
/// use candle_core::{Device, Var};
///
/// let (gate, up) = (Var::new(&[0f32, 1.], &Device::Cpu)?, Var::new(&[5f32, 0.], &Device::Cpu)?);
/// let y = ops::swiglu(&gate, &up)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0.0, 0.0]);
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&gate).map(|grad| grad.to_vec1::<f32>()).transpose()?, Some(vec![2.5, 0.0]));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn swiglu(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    Gate::Silu.apply(gate, up)
}

/// `gelu(gate) * up`: GeGLU, exact, in one operation ([`Gate::apply`]).
///
/// # Errors
/// As [`Gate::apply`].
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let (gate, up) = (Tensor::new(&[1f64], &Device::Cpu)?, Tensor::new(&[2f64], &Device::Cpu)?);
/// assert!((ops::geglu(&gate, &up)?.to_vec1::<f64>()?[0] - 2.0 * 0.8413447460685429).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn geglu(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    Gate::Gelu.apply(gate, up)
}

/// `gelu(gate) * up` with GELU's approximation by the hyperbolic tangent, as in Gemma, in one operation
/// ([`Gate::apply`]).
///
/// # Errors
/// As [`Gate::apply`].
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let (gate, up) = (Tensor::new(&[1f64], &Device::Cpu)?, Tensor::new(&[2f64], &Device::Cpu)?);
/// assert!((ops::geglu_tanh(&gate, &up)?.to_vec1::<f64>()?[0] - 2.0 * 0.841192).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn geglu_tanh(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    Gate::GeluTanh.apply(gate, up)
}

/// A closure that is always inlined although it is passed as an argument. The function's name would pass a pointer to
/// code compiled without wide vector instructions.
macro_rules! inlined {
    ($function:ident) => {
        #[inline(always)]
        |x: T| $function(x)
    };
}

/// 1 / (1 + exp(-x)), without overflow.
#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    let is_negative = x < T::zero();
    let small = (if is_negative { x } else { -x }).exp_nonpositive();
    (if is_negative { small } else { T::one() }) / (T::one() + small)
}

/// Argument of the logistic function that equals `(1 + tanh) / 2`, and its derivative.
#[inline(always)]
fn cubic<T: Real>(x: T) -> (T, T) {
    /// Beyond this the logistic function is 0 or 1; the square of a much larger number would overflow.
    const FAR: f64 = 50.0;
    let (low, high) = (T::from_f64(-FAR), T::from_f64(FAR));
    let x = if x < low { low } else { x };
    let x = if x > high { high } else { x };
    let two = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let (linear, cubed) = (T::from_f64(two), T::from_f64(two * 0.044715));
    let square = x * x;
    (x * (linear + cubed * square), linear + T::from_f64(3.0) * cubed * square)
}

/// Returns the activation of a number and its derivative.
#[inline(always)]
pub(super) fn silu<T: Real>(x: T) -> (T, T) {
    let share = sigmoid(x);
    (x * share, share + x * share * (T::one() - share))
}

/// Derivative of GELU.
#[inline(always)]
fn gelu_derivative<T: Real>(x: T) -> T {
    let (half, density) = (T::from_f64(-0.5), T::from_f64((0.5 / std::f64::consts::PI).sqrt()));
    normal_cdf(x) + x * density * (x * x * half).exp_nonpositive()
}

/// Standard normal distribution function.
#[inline(always)]
fn normal_cdf<T: Real>(x: T) -> T {
    let size = if x < T::zero() { -x } else { x };
    let beyond = T::from_f64(0.5) * (size * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erfc();
    if x < T::zero() { beyond } else { T::one() - beyond }
}

#[inline(always)]
pub(super) fn gelu<T: Real>(x: T) -> (T, T) {
    (x * normal_cdf(x), gelu_derivative(x))
}

#[inline(always)]
pub(super) fn gelu_tanh<T: Real>(x: T) -> (T, T) {
    let (argument, inner) = cubic(x);
    let share = sigmoid(argument);
    (x * share, share + x * share * (T::one() - share) * inner)
}

impl Gate {
    /// Computes f32 or f64 on a CPU.
    fn fused(self, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
        match gate.dtype() {
            DType::F32 => self.fused_result::<f32>(gate, up),
            _ => self.fused_result::<f64>(gate, up),
        }
    }

    fn fused_result<T: Real>(self, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
        let y = with_numbers(gate, |gate| with_numbers(up, |up| Ok(self.forward::<T>(gate, up))))?;
        Tensor::from_vec(y, gate.shape(), gate.device())
    }

    fn forward<T: Real>(self, gate: &[T], up: &[T]) -> Vec<T> {
        match self {
            Gate::Silu => forward(gate, up, inlined!(silu)),
            Gate::Gelu => forward(gate, up, inlined!(gelu)),
            Gate::GeluTanh => forward(gate, up, inlined!(gelu_tanh)),
        }
    }

    fn backward<T: Real>(self, gate: &[T], up: &[T], gradient: &[T]) -> [Vec<T>; 2] {
        match self {
            Gate::Silu => backward(gate, up, gradient, inlined!(silu)),
            Gate::Gelu => backward(gate, up, gradient, inlined!(gelu)),
            Gate::GeluTanh => backward(gate, up, gradient, inlined!(gelu_tanh)),
        }
    }

    fn fused_gradients<T: Real>(
        self,
        gate: &Tensor,
        up: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<[Tensor; 2]> {
        let [of_gate, of_up] = with_numbers(gate, |gate| {
            with_numbers(up, |up| with_numbers(gradient, |g| Ok(self.backward::<T>(gate, up, g))))
        })?;
        let tensor = |numbers: Vec<T>| Tensor::from_vec(numbers, gate.shape(), gate.device());
        Ok([tensor(of_gate)?, tensor(of_up)?])
    }
}

#[inline(always)]
fn forward<T: Real>(gate: &[T], up: &[T], activation: impl Fn(T) -> (T, T) + Sync) -> Vec<T> {
    let mut out = vec![T::zero(); gate.len()];
    blocks([&mut out], BLOCK, |at, [out]| {
        vectorized!({
            for ((out, &gate), &up) in out.iter_mut().zip(&gate[at..]).zip(&up[at..]) {
                *out = activation(gate).0 * up;
            }
        });
    });
    out
}

/// Returns the gradients of gate and up.
#[inline(always)]
fn backward<T: Real>(
    gate: &[T],
    up: &[T],
    gradient: &[T],
    activation: impl Fn(T) -> (T, T) + Sync,
) -> [Vec<T>; 2] {
    let (mut of_gate, mut of_up) = (vec![T::zero(); gate.len()], vec![T::zero(); gate.len()]);
    blocks([&mut of_gate, &mut of_up], BLOCK, |at, [of_gate, of_up]| {
        vectorized!({
            let inputs = gate[at..].iter().zip(&up[at..]).zip(&gradient[at..]);
            for ((of_gate, of_up), ((&gate, &up), &g)) in of_gate.iter_mut().zip(of_up).zip(inputs) {
                let (active, slope) = activation(gate);
                (*of_gate, *of_up) = (g * up * slope, g * active);
            }
        });
    });
    [of_gate, of_up]
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The fused operation equals the composed one, gradients included (the constants in candle's GELUs have only six
    /// digits).
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        for (gate, most) in [(Gate::Silu, 1e-13), (Gate::Gelu, 1e-5), (Gate::GeluTanh, 1e-5)] {
            let random = || Var::from_tensor(&Tensor::randn(0f64, 3., (3, 70), &Device::Cpu)?);
            let (x, up) = (random()?, random()?);
            let both = [gate.composed(&x, &up)?, gate.apply(&x, &up)?];
            let outer = Tensor::randn(0f64, 1., (3, 70), &Device::Cpu)?;
            assert_agree(both, |y| (y * &outer)?.sum_all(), &[&x, &up], most, gate.operation())?;
        }
        Ok(())
    }

    #[test]
    fn extreme_gates_are_no_nan() -> candle_core::Result<()> {
        for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
            let x = Var::new(&[-1e30f32, -200., -1e-40, 0., 200., 1e10], &Device::Cpu)?;
            let y = gate.apply(&x, &x.ones_like()?)?;
            let slopes = y.sum_all()?.backward()?;
            let (y, slopes) = (y.to_vec1::<f32>()?, slopes.get(&x).unwrap().to_vec1::<f32>()?);
            assert!(y.iter().chain(&slopes).all(|x| x.is_finite()), "{gate:?}: {y:?} {slopes:?}");
            assert_eq!((y[4], y[5], slopes[0], slopes[5]), (200., 1e10, 0., 1.), "{gate:?}");
        }
        Ok(())
    }
}
