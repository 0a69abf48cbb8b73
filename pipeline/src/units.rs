//! Adapter for models written with [`training::build`]: their units become modules, between which the model can be split.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use training::build::{Builder, UnitPlace, UnitSource, Units};

use crate::Modules;

impl Modules {
    /// Creates the list of a model's units, one module each. `build` is called several times; each call
    /// builds one unit at most.
    ///
    /// If two units share a parameter, each stage has a copy: list both names in
    /// [`PipelineConfig::tied`](crate::PipelineConfig).
    ///
    /// # Errors
    /// Errors of `build`; a model whose chain does not consist of its units, in the order in which they are built.
    ///
    /// ```
    /// use candle_core::{Module, Result};
    /// use pipeline::Modules;
    /// use training::build::{Builder, Division, Linear, LinearConfig, Unit, Units};
    ///
    /// struct Net(Vec<Unit<Linear>>);
    ///
    /// impl Net {
    ///     fn new(builder: &Builder) -> Result<Self> {
    ///         let layer = LinearConfig::new(4, 4, Division::Whole);
    ///         let unit = |name: &&str| builder.unit(name, |part| part.pp(name).linear(&layer));
    ///         Ok(Self(["a", "b"].iter().map(unit).collect::<Result<_>>()?))
    ///     }
    /// }
    ///
    /// impl Units for Net {
    ///     fn units(&self) -> Vec<&dyn Module> {
    ///         self.0.iter().map(|unit| unit as &dyn Module).collect()
    ///     }
    /// }
    ///
    /// assert_eq!(Modules::of_units(Net::new)?.names(), ["a", "b"]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn of_units<M: Units + Send + 'static>(
        build: impl Fn(&Builder) -> Result<M> + Send + Sync + 'static,
    ) -> Result<Self> {
        let names: Arc<Mutex<Vec<String>>> = Arc::default();
        let model = build(&Builder::of_units(Arc::new(NameRecorder(names.clone()))))?;
        let names = std::mem::take(&mut *names.lock().unwrap_or_else(PoisonError::into_inner));
        if model.units().len() != names.len() {
            bail!(
                "the model builds the units {}, and its chain has {}: `Units::units` gives each of them once, in the order of the forward pass",
                names.join(", "),
                model.units().len()
            )
        }
        let build = Arc::new(build);
        let mut modules = Self::new();
        for (index, name) in names.into_iter().enumerate() {
            let (build, only) = (build.clone(), name.clone());
            modules = modules.module(&name, move |vb| {
                let only = SingleUnitSource { name: only.clone(), vb: vb.root() };
                Ok(SingleUnit { model: build(&Builder::of_units(Arc::new(only)))?, index })
            });
        }
        Ok(modules)
    }
}

/// A model of which only one unit is built.
struct SingleUnit<M> {
    model: M,
    index: usize,
}

/// Records the names of units, and builds none.
struct NameRecorder(Arc<Mutex<Vec<String>>>);

impl UnitSource for NameRecorder {
    fn unit(&self, name: &str, _: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>) -> Result<UnitPlace> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(name.into());
        Ok(UnitPlace::OtherProcess)
    }
}

/// Builds only the unit of this name.
struct SingleUnitSource {
    name: String,
    vb: VarBuilder<'static>,
}

impl UnitSource for SingleUnitSource {
    fn unit(
        &self,
        name: &str,
        build: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>,
    ) -> Result<UnitPlace> {
        if name != self.name {
            return Ok(UnitPlace::OtherProcess);
        }
        build(self.vb.clone())?;
        Ok(UnitPlace::Here)
    }
}

impl<M: Units> Module for SingleUnit<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.model.units().get(self.index) {
            Some(unit) => unit.forward(x),
            None => bail!("the model has no unit {}", self.index),
        }
    }
}
