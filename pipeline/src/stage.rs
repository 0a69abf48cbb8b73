//! Stage: the part of a model between two split points.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};

use crate::{Error, Modules, Result};
use training::internal::lock;

/// One stage of this rank.
pub(crate) struct Stage {
    pub(crate) number: usize,
    modules: Vec<Box<dyn ModuleT + Send>>,
    /// Sorted by name.
    pub(crate) vars: Vec<(String, Var)>,
    /// The same variables, in the order of the modules.
    pub(crate) by_module: Vec<(String, Var)>,
}

impl Stage {
    pub(crate) fn forward(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.modules.iter().try_fold(x.clone(), |x, module| module.forward_t(&x, train))
    }
}

/// Builds this rank's stages. The modules of other ranks are built as well, one at a time, and dropped, so that random
/// initial weights are those of a single process, whichever rank has which stage, and every rank knows the names of all
/// variables.
pub(crate) fn build(
    modules: &Modules,
    ranges: &[Range<usize>],
    own: &[bool],
    builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
) -> Result<Vec<Stage>> {
    let (mut stages, mut modules_of) = (Vec::new(), HashMap::new());
    for (number, range) in ranges.iter().enumerate() {
        let mut stage = Stage { number, modules: Vec::new(), vars: Vec::new(), by_module: Vec::new() };
        for index in range.clone() {
            // A separate map per module: in a shared one, two variables with the same name would become one.
            let map = VarMap::new();
            let module = modules.build(index, &builder(&map)).map_err(Error::during("building the model"))?;
            let vars = sorted(&lock(map.data()));
            for (name, _) in &vars {
                if let Some(other) = modules_of.insert(name.clone(), index) {
                    let names = modules.names();
                    return Err(same_name(name, names[other], names[index]));
                }
            }
            if own[number] {
                stage.modules.push(module);
                stage.by_module.extend(vars.iter().cloned());
                stage.vars.extend(vars);
            }
        }
        if own[number] {
            stage.vars.sort_by(|a, b| a.0.cmp(&b.0));
            stages.push(stage);
        }
    }
    Ok(stages)
}

fn sorted(vars: &HashMap<String, Var>) -> Vec<(String, Var)> {
    let mut vars: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    vars
}

fn same_name(variable: &str, first: &str, second: &str) -> Error {
    Error::InvalidArgument {
        what: "the variables of a pipeline".into(),
        got: format!("{variable} in module {first} and in module {second}"),
        help: "name one of them otherwise; variables that shall be one go into `PipelineConfig::tied`".into(),
    }
}
