//! Optimizers, and the model in a single process.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap};

use super::Mlp;

pub(crate) enum AnyOptimizer {
    Sgd(SGD),
    AdamW(AdamW),
}

impl AnyOptimizer {
    pub(crate) fn new(adam: bool, vars: Vec<Var>) -> Result<Self> {
        Ok(if adam {
            Self::AdamW(AdamW::new(vars, ParamsAdamW { lr: 0.01, ..Default::default() })?)
        } else {
            Self::Sgd(SGD::new(vars, 0.1)?)
        })
    }

    pub(crate) fn step(&mut self, grads: &GradStore) -> Result<()> {
        match self {
            Self::Sgd(optimizer) => optimizer.step(grads),
            Self::AdamW(optimizer) => optimizer.step(grads),
        }
    }
}

/// Returns the model with rank 0's values and without a `Ddp`, and its variables in order of construction.
pub(crate) fn alone(dtype: DType) -> Result<(Mlp, Vec<Var>)> {
    let variables = VarMap::new();
    let model = Mlp::new(VarBuilder::from_varmap(&variables, dtype, &Device::Cpu))?;
    let start = Mlp::builder(1, dtype);
    let mut named: Vec<(String, Var)> = {
        let data = variables.data().lock().expect("no panic");
        data.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    };
    named.sort_by_key(|(name, _)| name.replace("weight", "a"));
    for (name, var) in &named {
        var.set(&start.get(var.shape(), name)?)?;
    }
    Ok((model, named.into_iter().map(|(_, var)| var).collect()))
}
