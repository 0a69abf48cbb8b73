//! Optimizer steps of parameters of 16 bits on a CPU: block by block in f32, so that no copy of a whole parameter is made.

use candle_core::{CpuStorage, Layout, Result};
use rayon::prelude::*;

use crate::blocks::{BLOCK, has_one_thread};
use crate::dense::dense;
use crate::product::Narrow;

/// Calls `step` with blocks of the parameter and of its gradient (of 16 bits, or f32), both in f32, and of the optimizer's
/// state. The parameter is rounded once.
pub(crate) fn step_in_f32<P: Narrow, const N: usize>(
    param: &mut [P],
    (grad, layout): (&CpuStorage, &Layout),
    states: [&mut [f32]; N],
    step: impl Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let (wide, narrow): (&[f32], &[P]) = match grad {
        CpuStorage::F32(_) => (dense(grad, layout)?, &[]),
        _ => (&[], dense(grad, layout)?),
    };
    let mut states = states.map(|state| state.chunks_mut(BLOCK));
    let part = |param| (param, states.each_mut().map(|state| state.next().unwrap_or_default()));
    let parts: Vec<(&mut [P], [&mut [f32]; N])> = param.chunks_mut(BLOCK).map(part).collect();
    let one = |(index, (narrow_param, states)): (usize, (&mut [P], [&mut [f32]; N]))| {
        let place = index * BLOCK..index * BLOCK + narrow_param.len();
        let mut param = vec![0.0; place.len()];
        P::widen_into(narrow_param, &mut param);
        match narrow.get(place.clone()) {
            Some(narrow) if !narrow.is_empty() => {
                let mut grad = vec![0.0; place.len()];
                P::widen_into(narrow, &mut grad);
                step(&mut param, &grad, states);
            }
            _ => step(&mut param, &wide[place], states),
        }
        P::narrow_into(&param, narrow_param);
    };
    match has_one_thread() {
        true => parts.into_iter().enumerate().for_each(one),
        false => parts.into_par_iter().enumerate().for_each(one),
    }
    Ok(())
}
