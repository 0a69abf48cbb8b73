//! The part of a model that lies between two cuts.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::PoisonError;

use candle_core::{Result, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};

use crate::Modules;

/// One stage of this rank.
pub(crate) struct Stage {
    pub(crate) number: usize,
    modules: Vec<Box<dyn ModuleT + Send>>,
    /// By name, in the order of names.
    pub(crate) vars: Vec<(String, Var)>,
}

impl Stage {
    pub(crate) fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.modules.iter().try_fold(x.clone(), |x, module| module.forward_t(&x, train))
    }
}

/// Builds the stages that are this rank's. The others' modules are built as well, one at a time, and dropped: so that random
/// initial weights are those of one process, whoever has which stage.
pub(crate) fn build(
    modules: &Modules,
    ranges: &[Range<usize>],
    own: &[bool],
    builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
) -> Result<Vec<Stage>> {
    let mut stages = Vec::new();
    for (number, range) in ranges.iter().enumerate() {
        let map = VarMap::new();
        let root = builder(&map);
        let mut built = Vec::new();
        for index in range.clone() {
            if own[number] {
                built.push(modules.build(index, &root)?);
            } else {
                modules.build(index, &builder(&VarMap::new()))?;
            }
        }
        if own[number] {
            let vars = map.data().lock().unwrap_or_else(PoisonError::into_inner);
            stages.push(Stage { number, modules: built, vars: sorted(&vars) });
        }
    }
    Ok(stages)
}

fn sorted(vars: &HashMap<String, Var>) -> Vec<(String, Var)> {
    let mut vars: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    vars
}
