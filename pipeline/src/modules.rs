//! A model as a list of named modules, which can be split between any two of them; a model written with [`training::build`] is the
//! list of its units.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use candle_core::{DType, Device, Module, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, ModuleT, VarBuilder};
use training::build::{Builder, UnitPlace, UnitSource, Units, counting};
use training::internal::is_buffer;
use training::internal::lock;

type Build = Box<dyn Fn(VarBuilder<'static>) -> Result<Box<dyn ModuleT + Send>>>;

/// The modules of a model, in the order in which data flow through them. The input of each is the output of the previous one.
///
/// A module is given as a function that builds it from variables whose names start with its name, so that a rank keeps only
/// those of its own stages.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{Activation, linear};
/// use pipeline::Modules;
///
/// let modules = Modules::new()
///     .module("fc1", |vb| linear(4, 8, vb))
///     .module("relu", |_| Ok(Activation::Relu))
///     .module("fc2", |vb| linear(8, 2, vb));
/// assert_eq!(modules.names(), ["fc1", "relu", "fc2"]);
/// assert_eq!(modules.parameters(DType::F32, &Device::Cpu)?, [40, 0, 18]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Default)]
pub struct Modules {
    list: Vec<(String, Build)>,
    pub(crate) buffers: Vec<String>,
}

impl Modules {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a module. `build` gets a builder for variables whose names start with `name` and a dot, and may be called
    /// several times. Names must be unique.
    #[must_use]
    pub fn module<M: ModuleT + Send + 'static>(
        mut self,
        name: &str,
        build: impl Fn(VarBuilder<'static>) -> Result<M> + 'static,
    ) -> Self {
        let build =
            move |builder: VarBuilder<'static>| Ok(Box::new(build(builder)?) as Box<dyn ModuleT + Send>);
        self.list.push((name.into(), Box::new(build)));
        self
    }

    /// Declares variables that are not parameters, by the last component of their names (`pe`, `running_mean`).
    #[must_use]
    pub fn buffers(mut self, names: &[&str]) -> Self {
        self.buffers.extend(names.iter().map(ToString::to_string));
        self
    }

    /// Returns the names, in order.
    pub fn names(&self) -> Vec<&str> {
        self.list.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Returns a name that two modules have.
    pub(crate) fn ambiguous(&self) -> Option<&str> {
        let mut seen = HashSet::new();
        self.names().into_iter().find(|name| !seen.insert(*name))
    }

    /// Returns the number of modules.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the number of parameter elements of each module, of all ranks that experts are divided over. Each module is built once
    /// with zeros, and dropped before the next.
    ///
    /// # Errors
    /// Errors of a module.
    pub fn parameters(&self, dtype: DType, device: &Device) -> Result<Vec<usize>> {
        (0..self.len()).map(|index| Ok(self.count(index, dtype, device)?.1)).collect()
    }

    /// Returns the seconds that each module's forward takes on `input`, the fastest of `repeats` runs. Each is built once
    /// with zeros, and dropped before the next.
    ///
    /// # Errors
    /// Errors of a module.
    pub(crate) fn forward_seconds(
        &self,
        input: &Tensor,
        dtype: DType,
        device: &Device,
        repeats: usize,
    ) -> Result<Vec<f64>> {
        let (mut x, mut all) = (input.clone(), Vec::with_capacity(self.len()));
        for index in 0..self.len() {
            let module = self.count(index, dtype, device)?.0;
            // A warm-up run, which is not measured.
            let mut y = module.forward_t(&x, false)?;
            let mut quickest = f64::INFINITY;
            for _ in 0..repeats.max(1) {
                let began = Instant::now();
                y = module.forward_t(&x, false)?;
                quickest = quickest.min(began.elapsed().as_secs_f64());
            }
            all.push(quickest);
            x = y.detach();
        }
        Ok(all)
    }

    pub(crate) fn build(&self, index: usize, root: &VarBuilder<'static>) -> Result<Box<dyn ModuleT + Send>> {
        let (name, build) = &self.list[index];
        build(root.pp(name))
    }

    fn count(&self, index: usize, dtype: DType, device: &Device) -> Result<(Box<dyn ModuleT + Send>, usize)> {
        let elements = Arc::new(AtomicUsize::new(0));
        let backend = Zeros { elements: elements.clone(), buffers: self.buffers.clone() };
        let builder = VarBuilder::from_backend(Box::new(backend), dtype, device.clone());
        let module = counting(|| self.build(index, &builder))?;
        Ok((module, elements.load(Ordering::Relaxed)))
    }
}

impl fmt::Debug for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// `VarBuilder` backend that returns zeros, and counts the elements of parameters.
struct Zeros {
    elements: Arc<AtomicUsize>,
    buffers: Vec<String>,
}

impl SimpleBackend for Zeros {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if !is_buffer(&self.buffers, name) {
            self.elements.fetch_add(shape.elem_count(), Ordering::Relaxed);
        }
        Tensor::zeros(shape, dtype, device)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

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
        let names = std::mem::take(&mut *lock(&names));
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
        lock(&self.0).push(name.into());
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
