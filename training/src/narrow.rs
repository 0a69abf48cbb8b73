//! Optimizer steps of parameters of 16 bits on a CPU: block by block in f32, so that no copy of a whole parameter is made.

use candle_core::{CpuStorage, Layout, Result, bail};
use ops::kernels::{BLOCK, dense, has_one_thread};
use rayon::prelude::*;

use crate::low_bits::Split;

/// Calls `step` with blocks of the parameter and of its gradient (of 16 bits, or f32), both in f32, and of the optimizer's
/// state. `low` are the parameter's [`LowBits`](crate::low_bits::LowBits).
pub(crate) fn step_in_f32<const N: usize>(
    param: &mut CpuStorage,
    layout: &Layout,
    low: Option<&mut CpuStorage>,
    grad: &CpuStorage,
    grad_layout: &Layout,
    states: [&mut [f32]; N],
    step: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("the parameter is not contiguous") };
    match (param, low) {
        (CpuStorage::F16(p), Some(CpuStorage::F16(low))) => {
            run(&mut p[start..end], low, grad, grad_layout, states, step)
        }
        (CpuStorage::BF16(p), Some(CpuStorage::BF16(low))) => {
            run(&mut p[start..end], low, grad, grad_layout, states, step)
        }
        _ => bail!("parameter and optimizer state differ in dtype"),
    }
}

/// A block of parameters of 16 bits, with the lower halves.
type Halves<'a, P> = (&'a mut [P], &'a mut [P]);

fn run<P: Split, const N: usize>(
    param: &mut [P],
    low: &mut [P],
    grad: &CpuStorage,
    layout: &Layout,
    states: [&mut [f32]; N],
    step: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let (wide, narrow): (&[f32], &[P]) = match grad {
        CpuStorage::F32(_) => (dense(grad, layout)?, &[]),
        _ => (&[], dense(grad, layout)?),
    };
    let mut states = states.map(|state| state.chunks_mut(BLOCK));
    let part = |halves| (halves, states.each_mut().map(|state| state.next().unwrap_or_default()));
    let halves = param.chunks_mut(BLOCK).zip(low.chunks_mut(BLOCK));
    let parts: Vec<_> = halves.map(part).collect();
    let one = |(index, ((high, low), states)): (usize, (Halves<'_, P>, [&mut [f32]; N]))| {
        let place = index * BLOCK..index * BLOCK + high.len();
        let mut param = vec![0.0; place.len()];
        P::join_into(high, low, &mut param);
        match narrow.get(place.clone()) {
            Some(narrow) if !narrow.is_empty() => {
                let mut grad = vec![0.0; place.len()];
                P::widen_into(narrow, &mut grad);
                step(&mut param, &grad, states);
            }
            _ => step(&mut param, &wide[place], states),
        }
        P::split_into(&param, high, low);
    };
    match has_one_thread() {
        true => parts.into_iter().enumerate().for_each(one),
        false => parts.into_par_iter().enumerate().for_each(one),
    }
    Ok(())
}
