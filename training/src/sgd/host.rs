//! One step on a CPU: parameter, gradient and direction in one pass, in place.

use std::cell::RefCell;
use std::ops::{Add, Mul};

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, Var, bail};

use super::SgdConfig;
use crate::state::Buffer;

pub(super) fn step(
    var: &Var,
    grad: &Tensor,
    direction: &mut Option<Buffer>,
    config: &SgdConfig,
) -> Result<()> {
    if config.momentum == 0. {
        return run(var, grad, &Step { config, first: false, direction: RefCell::new(None) });
    }
    let first = direction.is_none();
    if !matches!(direction, Some(Buffer::Host(_))) {
        *direction = Some(Buffer::zeros(var)?);
    }
    let Some(Buffer::Host(storage)) = direction else { bail!("sgd: a direction was lost") };
    run(var, grad, &Step { config, first, direction: RefCell::new(Some(storage)) })
}

fn run(var: &Var, grad: &Tensor, step: &Step<'_>) -> Result<()> {
    if grad.is_contiguous() {
        var.inplace_op2(grad, step)
    } else {
        // A linear layer's weight gradient often comes transposed.
        var.inplace_op2(&grad.contiguous()?, step)
    }
}

struct Step<'a> {
    config: &'a SgdConfig,
    /// True at a parameter's first step with momentum: dampening does not count yet.
    first: bool,
    direction: RefCell<Option<&'a mut CpuStorage>>,
}

impl InplaceOp2 for Step<'_> {
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
        let mut direction = self.direction.borrow_mut();
        match (param, grad, direction.as_deref_mut()) {
            (CpuStorage::F32(p), CpuStorage::F32(g), None) => {
                self.plain(dense_mut(p, param_layout)?, dense(g, grad_layout)?, |x| x as f32);
            }
            (CpuStorage::F64(p), CpuStorage::F64(g), None) => {
                self.plain(dense_mut(p, param_layout)?, dense(g, grad_layout)?, |x| x);
            }
            (CpuStorage::F32(p), CpuStorage::F32(g), Some(CpuStorage::F32(b))) => {
                self.momentum(dense_mut(p, param_layout)?, dense(g, grad_layout)?, b, |x| x as f32);
            }
            (CpuStorage::F64(p), CpuStorage::F64(g), Some(CpuStorage::F64(b))) => {
                self.momentum(dense_mut(p, param_layout)?, dense(g, grad_layout)?, b, |x| x);
            }
            _ => bail!("sgd: parameter, gradient and direction differ in dtype"),
        }
        Ok(())
    }
}

impl Step<'_> {
    fn plain<T: Element>(&self, param: &mut [T], grad: &[T], cast: impl Fn(f64) -> T) {
        let rate = cast(-self.config.learning_rate);
        if self.config.weight_decay == 0. {
            for (p, &g) in param.iter_mut().zip(grad) {
                *p = *p + rate * g;
            }
        } else {
            let decay = cast(self.config.weight_decay);
            for (p, &g) in param.iter_mut().zip(grad) {
                *p = *p + rate * (g + decay * *p);
            }
        }
    }

    fn momentum<T: Element>(
        &self,
        param: &mut [T],
        grad: &[T],
        direction: &mut [T],
        cast: impl Fn(f64) -> T,
    ) {
        let fresh = if self.first { 1. } else { 1. - self.config.dampening };
        let factors = Factors {
            rate: cast(-self.config.learning_rate),
            decay: cast(self.config.weight_decay),
            keep: cast(self.config.momentum),
            fresh: cast(fresh),
        };
        // The two choices are the compiler's to know, so that each of the four loops is vectorised.
        match (self.config.weight_decay != 0., self.config.nesterov) {
            (false, false) => factors.apply::<false, false>(param, grad, direction),
            (false, true) => factors.apply::<false, true>(param, grad, direction),
            (true, false) => factors.apply::<true, false>(param, grad, direction),
            (true, true) => factors.apply::<true, true>(param, grad, direction),
        }
    }
}

trait Element: Copy + Add<Output = Self> + Mul<Output = Self> {}
impl Element for f32 {}
impl Element for f64 {}

struct Factors<T> {
    rate: T,
    decay: T,
    keep: T,
    fresh: T,
}

impl<T: Element> Factors<T> {
    fn apply<const DECAY: bool, const NESTEROV: bool>(
        &self,
        param: &mut [T],
        grad: &[T],
        direction: &mut [T],
    ) {
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(direction) {
            let g = if DECAY { g + self.decay * *p } else { g };
            *b = self.keep * *b + self.fresh * g;
            let d = if NESTEROV { g + self.keep * *b } else { *b };
            *p = *p + self.rate * d;
        }
    }
}

fn dense<'a, T>(data: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets().and_then(|(start, end)| data.get(start..end)) {
        Some(part) => Ok(part),
        None => bail!("sgd: the gradient is not contiguous"),
    }
}

fn dense_mut<'a, T>(data: &'a mut [T], layout: &Layout) -> Result<&'a mut [T]> {
    match layout.contiguous_offsets().and_then(|(start, end)| data.get_mut(start..end)) {
        Some(part) => Ok(part),
        None => bail!("sgd: the parameter is not contiguous"),
    }
}
