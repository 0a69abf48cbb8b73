//! One SGD step on a CPU: parameter, gradient and direction in one pass, in place, in parallel blocks.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, Var, bail};
use ops::kernels::{BLOCK, Real, blocks, dense, vectorized};

use super::SgdConfig;
use crate::low_bits::LowBits;
use crate::narrow::step_in_f32;
use crate::state::Buffer;

pub(super) fn step(
    var: &Var,
    low: &mut LowBits,
    grad: &Tensor,
    direction: &mut Option<Buffer>,
    config: &SgdConfig,
    scale: f64,
) -> Result<()> {
    let low = low.on_host(var)?;
    if config.momentum == 0. {
        let rule = Rule { config, scale, first: false };
        return run(var, grad, &SgdStep { rule, state: RefCell::new((None, low)) });
    }
    let first = direction.is_none();
    if !matches!(direction, Some(Buffer::Host(_))) {
        *direction = Some(Buffer::zeros(var)?);
    }
    let Some(Buffer::Host(storage)) = direction else { bail!("sgd: a direction was lost") };
    let state = RefCell::new((Some(Arc::make_mut(storage)), low));
    run(var, grad, &SgdStep { rule: Rule { config, scale, first }, state })
}

fn run(var: &Var, grad: &Tensor, step: &SgdStep<'_>) -> Result<()> {
    if grad.is_contiguous() {
        var.inplace_op2(grad, step)
    } else {
        // A linear layer's weight gradient often comes transposed.
        var.inplace_op2(&grad.contiguous()?, step)
    }
}

struct SgdStep<'a> {
    rule: Rule<'a>,
    /// The direction, and the parameter's low bits.
    state: RefCell<(Option<&'a mut CpuStorage>, Option<&'a mut CpuStorage>)>,
}

/// How a parameter changes.
#[derive(Clone, Copy)]
struct Rule<'a> {
    config: &'a SgdConfig,
    /// Multiplies the gradient first.
    scale: f64,
    /// True at a parameter's first step with momentum: dampening does not apply yet.
    first: bool,
}

impl InplaceOp2 for SgdStep<'_> {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> Result<()> {
        let (rule, mut state) = (self.rule, self.state.borrow_mut());
        let (direction, low) = &mut *state;
        let plain = |p: &mut [f32], g: &[f32], []: [&mut [f32]; 0]| rule.plain(p, g);
        let momentum = |p: &mut [f32], g: &[f32], [b]: [&mut [f32]; 1]| rule.momentum(p, g, b);
        let low = low.as_deref_mut();
        match (param, direction.as_deref_mut()) {
            (CpuStorage::F32(p), None) => rule.plain(dense_mut(p, param_layout)?, dense(grad, grad_layout)?),
            (CpuStorage::F64(p), None) => rule.plain(dense_mut(p, param_layout)?, dense(grad, grad_layout)?),
            (CpuStorage::F32(p), Some(CpuStorage::F32(b))) => {
                rule.momentum(dense_mut(p, param_layout)?, dense(grad, grad_layout)?, b);
            }
            (CpuStorage::F64(p), Some(CpuStorage::F64(b))) => {
                rule.momentum(dense_mut(p, param_layout)?, dense(grad, grad_layout)?, b);
            }
            (p @ (CpuStorage::F16(_) | CpuStorage::BF16(_)), None) => {
                step_in_f32(p, param_layout, low, grad, grad_layout, [], plain)?;
            }
            (p @ (CpuStorage::F16(_) | CpuStorage::BF16(_)), Some(CpuStorage::F32(b))) => {
                step_in_f32(p, param_layout, low, grad, grad_layout, [&mut b[..]], momentum)?;
            }
            _ => bail!("sgd: parameter and direction differ in dtype"),
        }
        Ok(())
    }
}

impl Rule<'_> {
    fn plain<T: Real>(&self, param: &mut [T], grad: &[T]) {
        let rate = T::from_f64(-self.config.learning_rate);
        let decay = (self.config.weight_decay != 0.).then(|| T::from_f64(self.config.weight_decay));
        let scale = self.scale();
        blocks([param], BLOCK, |at, [param]| {
            let grad = &grad[at..];
            vectorized!({
                match scale {
                    None => plain(param, grad, rate, decay, |g| g),
                    Some(scale) => plain(param, grad, rate, decay, scaled_by(scale)),
                }
            });
        });
    }

    /// Returns the factor of the gradients, if it is not 1.
    fn scale<T: Real>(&self) -> Option<T> {
        (self.scale != 1.).then(|| T::from_f64(self.scale))
    }

    fn momentum<T: Real>(&self, param: &mut [T], grad: &[T], direction: &mut [T]) {
        let fresh = if self.first { 1. } else { 1. - self.config.dampening };
        let factors = Factors {
            rate: T::from_f64(-self.config.learning_rate),
            decay: T::from_f64(self.config.weight_decay),
            keep: T::from_f64(self.config.momentum),
            fresh: T::from_f64(fresh),
        };
        let (scale, is_decayed, is_nesterov) =
            (self.scale(), self.config.weight_decay != 0., self.config.nesterov);
        blocks([param, direction], BLOCK, |at, [param, direction]| {
            let grad = &grad[at..];
            vectorized!({
                let options = (is_decayed, is_nesterov);
                match scale {
                    None => factors.step(param, grad, direction, options, |g| g),
                    Some(scale) => factors.step(param, grad, direction, options, scaled_by(scale)),
                }
            });
        });
    }
}

/// Returns a function that scales a gradient, with a zero added to have the same bits as `scale_grads`.
#[inline(always)]
fn scaled_by<T: Real>(scale: T) -> impl Fn(T) -> T {
    #[inline(always)]
    move |g| g * scale + T::zero()
}

/// A loop for each option, so that it is vectorised.
#[inline(always)]
fn plain<T: Real>(param: &mut [T], grad: &[T], rate: T, decay: Option<T>, scaled: impl Fn(T) -> T) {
    let pairs = param.iter_mut().zip(grad);
    match decay {
        None => {
            for (p, &g) in pairs {
                *p += rate * scaled(g);
            }
        }
        Some(decay) => {
            for (p, &g) in pairs {
                *p += rate * (scaled(g) + decay * *p);
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Factors<T> {
    rate: T,
    decay: T,
    keep: T,
    fresh: T,
}

impl<T: Real> Factors<T> {
    /// The options (weight decay, Nesterov) become const parameters, so that each of the four loops is vectorised.
    #[inline(always)]
    fn step(
        self,
        param: &mut [T],
        grad: &[T],
        direction: &mut [T],
        options: (bool, bool),
        scaled: impl Fn(T) -> T,
    ) {
        match options {
            (false, false) => self.apply::<false, false>(param, grad, direction, scaled),
            (false, true) => self.apply::<false, true>(param, grad, direction, scaled),
            (true, false) => self.apply::<true, false>(param, grad, direction, scaled),
            (true, true) => self.apply::<true, true>(param, grad, direction, scaled),
        }
    }

    #[inline(always)]
    fn apply<const DECAY: bool, const NESTEROV: bool>(
        self,
        param: &mut [T],
        grad: &[T],
        direction: &mut [T],
        scaled: impl Fn(T) -> T,
    ) {
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(direction) {
            let g = scaled(g);
            let g = if DECAY { g + self.decay * *p } else { g };
            *b = self.keep * *b + self.fresh * g;
            let d = if NESTEROV { g + self.keep * *b } else { *b };
            *p += self.rate * d;
        }
    }
}

fn dense_mut<'a, T>(data: &'a mut [T], layout: &Layout) -> Result<&'a mut [T]> {
    match layout.contiguous_offsets().and_then(|(start, end)| data.get_mut(start..end)) {
        Some(part) => Ok(part),
        None => bail!("sgd: the parameter is not contiguous"),
    }
}
