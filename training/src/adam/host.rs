//! One Adam step on a CPU: parameter, gradient and both means in one pass, in place, in parallel blocks.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, Var, bail};
use ops::kernels::{BLOCK, Real, blocks, dense, vectorized};

use super::{AdamState, Factors};
use crate::low_bits::LowBits;
use crate::narrow::step_in_f32;
use crate::state::Buffer;

pub(super) fn step(
    var: &Var,
    low: &mut LowBits,
    grad: &Tensor,
    means: &mut AdamState,
    factors: Factors,
) -> Result<()> {
    let (Buffer::Host(of_gradients), Buffer::Host(of_squares)) =
        (&mut means.of_gradients, &mut means.of_squares)
    else {
        bail!("adam: a mean was lost");
    };
    let (of_gradients, of_squares) = (Arc::make_mut(of_gradients), Arc::make_mut(of_squares));
    let state = RefCell::new((of_gradients, of_squares, low.on_host(var)?));
    // A linear layer's weight gradient often comes transposed.
    var.inplace_op2(&grad.contiguous()?, &AdamStep { factors, state })
}

struct AdamStep<'a> {
    factors: Factors,
    /// Both means, and the parameter's low bits.
    state: RefCell<(&'a mut CpuStorage, &'a mut CpuStorage, Option<&'a mut CpuStorage>)>,
}

impl InplaceOp2 for AdamStep<'_> {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> Result<()> {
        let Some((start, end)) = param_layout.contiguous_offsets() else {
            bail!("adam: the parameter is not contiguous");
        };
        let mut state = self.state.borrow_mut();
        let (of_gradients, of_squares, low) = &mut *state;
        let factors = self.factors;
        let in_f32 = |p: &mut [f32], g: &[f32], [m, v]: [&mut [f32]; 2]| factors.apply(p, g, m, v);
        match (param, &mut **of_gradients, &mut **of_squares) {
            (CpuStorage::F32(p), CpuStorage::F32(m), CpuStorage::F32(v)) => {
                self.factors.apply(&mut p[start..end], dense(grad, grad_layout)?, m, v);
            }
            (CpuStorage::F64(p), CpuStorage::F64(m), CpuStorage::F64(v)) => {
                self.factors.apply(&mut p[start..end], dense(grad, grad_layout)?, m, v);
            }
            (p @ (CpuStorage::F16(_) | CpuStorage::BF16(_)), CpuStorage::F32(m), CpuStorage::F32(v)) => {
                let (means, low) = ([&mut m[..], &mut v[..]], low.as_deref_mut());
                step_in_f32(p, param_layout, low, grad, grad_layout, means, in_f32)?;
            }
            _ => bail!("adam: parameter and means differ in dtype"),
        }
        Ok(())
    }
}

impl Factors {
    fn apply<T: Real>(&self, param: &mut [T], grad: &[T], of_gradients: &mut [T], of_squares: &mut [T]) {
        let numbers = Factors::<T>::of(self);
        let (is_scaled, is_mostly_old) = (self.scale != 1., self.beta1 > 0.5);
        blocks([param, of_gradients, of_squares], BLOCK, |at, [param, of_gradients, of_squares]| {
            let grad = &grad[at..];
            // Both are const parameters, and the slices arguments, so that each of the four loops is vectorised.
            vectorized!({
                match (is_scaled, is_mostly_old) {
                    (false, false) => numbers.step::<false, false>(param, grad, of_gradients, of_squares),
                    (false, true) => numbers.step::<false, true>(param, grad, of_gradients, of_squares),
                    (true, false) => numbers.step::<true, false>(param, grad, of_gradients, of_squares),
                    (true, true) => numbers.step::<true, true>(param, grad, of_gradients, of_squares),
                }
            });
        });
    }
}

impl<T: Real> Factors<T> {
    fn of(factors: &Factors) -> Self {
        let &Factors { scale, penalty, shrink, beta1, fresh1, beta2, fresh2, rate, root, eps } = factors;
        let [scale, penalty, shrink, beta1, fresh1, beta2, fresh2, rate, root, eps] =
            [scale, penalty, shrink, beta1, fresh1, beta2, fresh2, rate, root, eps].map(T::from_f64);
        Self { scale, penalty, shrink, beta1, fresh1, beta2, fresh2, rate, root, eps }
    }

    #[inline(always)]
    fn step<const SCALED: bool, const MOSTLY_OLD: bool>(
        self,
        param: &mut [T],
        grad: &[T],
        of_gradients: &mut [T],
        of_squares: &mut [T],
    ) {
        let Self { scale, penalty, shrink, beta1, fresh1, beta2, fresh2, rate, root, eps } = self;
        let states = of_gradients.iter_mut().zip(of_squares);
        for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(states) {
            // Adds a zero to have the same bits as `scale_grads`, which does.
            let g = if SCALED { g * scale + T::zero() } else { g };
            let g = g + penalty * *p;
            // Interpolates from the nearer end, as PyTorch's `lerp` does.
            *m = if MOSTLY_OLD { *m + fresh1 * (g - *m) } else { g - (g - *m) * beta1 };
            *v = beta2 * *v + fresh2 * g * g;
            *p = shrink * *p + rate * *m / (v.root() / root + eps);
        }
    }
}
