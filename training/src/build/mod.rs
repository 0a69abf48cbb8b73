//! Model builder: one way to obtain parameters in every layout, whether they are whole, gathered from shards, slices
//! of divided layers, or those of one pipeline stage.
//!
//! A model is written once against a [`Builder`]. It is a chain of *units* (the embedding, each block, the head).
//! Sharding gathers and releases whole units, and a pipeline cuts the model between units:
//!
//! ```
//! use candle_core::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use training::build::{Builder, Division, Linear, LinearConfig, Unit, Units};
//!
//! struct Mlp {
//!     up: Unit<Linear>,
//!     down: Unit<Linear>,
//! }
//!
//! impl Mlp {
//!     fn new(builder: &Builder) -> Result<Self> {
//!         Ok(Self {
//!             up: builder.unit("up", |part| part.pp("up").linear(&LinearConfig::new(4, 8, Division::Outputs)))?,
//!             down: builder.unit("down", |part| part.pp("down").linear(&LinearConfig::new(8, 2, Division::Inputs)))?,
//!         })
//!     }
//! }
//!
//! impl Units for Mlp {
//!     fn units(&self) -> Vec<&dyn Module> {
//!         vec![&self.up, &self.down]
//!     }
//! }
//!
//! let vars = VarMap::new();
//! let model = Mlp::new(&Builder::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)))?;
//! let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
//! let y = model.units().iter().try_fold(x, |x, unit| unit.forward(&x))?;
//! assert_eq!(y.dims(), [3, 2]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! | layout | how the model is built |
//! | --- | --- |
//! | one process | `Mlp::new(&Builder::new(vb))` |
//! | `Ddp` | `Ddp::new(comm, vb, &config, \|vb\| Mlp::new(&Builder::new(vb)))` |
//! | `Fsdp` | `Fsdp::new(comm, vb, &config, \|units\| Mlp::new(&Builder::from(units)))` |
//! | `Pipeline` | `Modules::of_units(Mlp::new)` |
//! | `TensorParallel` | `TensorParallel::new(&mesh, &config, &weights, \|shards\| Ok(Mlp::new(&Builder::from(shards))?))` |
//!
//! Units can be recomputed in backward instead of keeping their intermediate results: [`Builder::recomputing`].

mod counting;
mod frozen;
mod layers;
mod model;
mod parts;
mod recompute;
mod unit;
mod whole;
mod whole_rows;

use ops::kernels::lock;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use ops::Expert;

pub use counting::{counting, is_counting};
pub use frozen::frozen;
pub use layers::{Division, ExpertConfig, Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};
pub use model::Model;
pub use parts::RangeReader;
pub use recompute::Recompute;
pub use unit::{RunUnit, Unit, UnitPlace, UnitSource, Units};
pub use whole::WholeLayers;
pub use whole_rows::{in_whole_rows, whole_rows};

use unit::LocalUnits;

/// Makes a model's units.
#[derive(Clone)]
pub struct Builder {
    units: Arc<dyn UnitSource>,
    layers: Arc<dyn Layers>,
    recompute: Recompute,
    /// Number of units built so far.
    built: Arc<AtomicUsize>,
    names: Arc<Mutex<HashSet<String>>>,
}

impl Builder {
    /// Every parameter is whole and stays in this process: for one process, and for wrappers of a `VarBuilder` such
    /// as `Ddp`.
    pub fn new(vb: VarBuilder<'static>) -> Self {
        Self::of_units(Arc::new(LocalUnits(vb)))
    }

    /// Builds units with a strategy's source of units.
    pub fn of_units(units: Arc<dyn UnitSource>) -> Self {
        Self {
            units,
            layers: Arc::new(WholeLayers),
            recompute: Recompute::default(),
            built: Arc::default(),
            names: Arc::default(),
        }
    }

    /// Makes the units' layers with `layers`.
    #[must_use]
    pub fn with_layers(self, layers: Arc<dyn Layers>) -> Self {
        Self { layers, ..self }
    }

    /// Recomputes some units in backward. The count for [`Recompute::Every`] starts at the next unit built.
    ///
    /// Backward must then be [`backward`](ops::backward), or that of a strategy, not candle's own.
    #[must_use]
    pub fn recomputing(self, recompute: Recompute) -> Self {
        Self { recompute, built: Arc::default(), ..self }
    }

    /// The factory of layers.
    pub fn layers(&self) -> &Arc<dyn Layers> {
        &self.layers
    }

    /// Makes a unit of what `build` returns. `name` is unique among the units; parameter names start at the model's
    /// root, and no two units share one.
    ///
    /// # Errors
    /// A second unit of this name; errors of `build` and of the strategy; [`Recompute::Every`] of 0.
    pub fn unit<M>(&self, name: &str, build: impl FnOnce(&Part) -> Result<M>) -> Result<Unit<M>> {
        if !lock(&self.names).insert(name.into()) {
            bail!("two units are called {name}: give each a name and parameters of its own")
        }
        let again = self.recompute.mode_of_unit(self.built.fetch_add(1, Ordering::Relaxed))?;
        let (mut build, mut module) = (Some(build), None);
        let place = self.units.unit(name, &mut |vb| {
            if let Some(build) = build.take() {
                module = Some(build(&Part::new(vb, self.layers.clone()))?);
            }
            Ok(())
        })?;
        Ok(Unit::new(name, module, place, again))
    }

    /// Makes a unit that also uses parameters of `other`, such as an output head tied to the embedding. `build`
    /// receives the other unit's module if it is in this process; if not, `build` makes its own copy, and the code
    /// that builds the stages ties the two.
    ///
    /// # Errors
    /// Errors of [`unit`](Self::unit).
    pub fn unit_sharing<M, N>(
        &self,
        name: &str,
        other: &Unit<N>,
        build: impl FnOnce(&Part, Option<&N>) -> Result<M>,
    ) -> Result<Unit<M>> {
        let mut unit = self.unit(name, |part| build(part, other.module()))?;
        unit.needs(other);
        Ok(unit)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").finish_non_exhaustive()
    }
}

/// Source of a unit's parameters while it is built.
#[derive(Clone)]
pub struct Part {
    vb: VarBuilder<'static>,
    layers: Arc<dyn Layers>,
}

impl Part {
    fn new(vb: VarBuilder<'static>, layers: Arc<dyn Layers>) -> Self {
        Self { vb, layers }
    }

    /// One level down, as [`VarBuilder::pp`].
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), layers: self.layers.clone() }
    }

    /// The builder of parameters that every rank has whole and applies between divided layers: norms, positions.
    pub fn whole(&self) -> VarBuilder<'static> {
        if self.layers.freezes() { frozen(&self.vb) } else { self.layers.between(&self.vb) }
    }

    /// The builder of parameters that every rank has whole and applies to all positions of the sequence
    /// ([`Layers::gather`]), so that each has all of the gradient: small heads.
    pub fn replicated(&self) -> VarBuilder<'static> {
        let is_frozen = self.layers.freezes() && !self.layers.trains(&self.vb.prefix());
        if is_frozen { frozen(&self.vb) } else { self.vb.clone() }
    }

    /// The builder of parameters that every rank has whole and applies to its own heads only, so that each has a part
    /// of the gradient: norms of queries and keys.
    pub fn of_heads(&self) -> VarBuilder<'static> {
        if self.layers.freezes() { frozen(&self.vb) } else { self.layers.of_heads(&self.vb) }
    }

    /// Makes a linear layer of `weight` and, if configured, `bias`, divided as configured where layers are divided.
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; errors of the builder.
    pub fn linear(&self, config: &LinearConfig) -> Result<Linear> {
        self.layers.linear(&self.vb, config)
    }

    /// Makes this rank's part of `weight`: see [`Layers::weight`].
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; errors of the builder.
    pub fn weight(&self, config: &LinearConfig) -> Result<Tensor> {
        self.layers.weight(&self.vb, config)
    }

    /// Makes this rank's part of the `weight` of one expert out of so many, `None` if another rank has the expert: see
    /// [`Layers::weight_of_expert`].
    ///
    /// # Errors
    /// Sizes that are not divisible by the number of ranks; fewer experts than ranks; errors of the builder.
    pub fn weight_of_expert(&self, config: &LinearConfig, expert: (usize, usize)) -> Result<Option<Tensor>> {
        self.layers.weight_of_expert(&self.vb, config, expert)
    }

    /// Makes this rank's part of one expert out of so many, with the builder's name; `None` if another rank has it: see
    /// [`Layers::expert`].
    ///
    /// # Errors
    /// Those of [`weight_of_expert`](Self::weight_of_expert).
    pub fn expert(&self, config: &ExpertConfig, expert: (usize, usize)) -> Result<Option<Expert>> {
        self.layers.expert(&self.vb, config, expert)
    }

    /// Makes a table of one vector for each token, `weight` (tokens, features), divided by tokens where layers are
    /// divided: an embedding, a head, or both.
    ///
    /// # Errors
    /// Errors of the builder.
    pub fn vocabulary(&self, tokens: usize, features: usize) -> Result<Arc<dyn Vocabulary>> {
        self.layers.vocabulary(&self.vb, &VocabularyConfig { tokens, features, frozen: false })
    }

    /// The factory of layers.
    pub fn layers(&self) -> &Arc<dyn Layers> {
        &self.layers
    }

    /// Number of ranks that layers are divided over.
    pub fn ranks(&self) -> usize {
        self.layers.ranks()
    }

    /// How many of `count` things, such as heads, each rank has. `what` names them in the error message.
    ///
    /// # Errors
    /// A count that is not divisible by the number of ranks.
    pub fn share(&self, what: &str, count: usize) -> Result<usize> {
        let ranks = self.ranks();
        if count.is_multiple_of(ranks) {
            return Ok(count / ranks);
        }
        let of = match self.vb.prefix() {
            prefix if prefix.is_empty() => String::new(),
            prefix => format!(" of {prefix}"),
        };
        bail!(
            "{what}{of}: {count} cannot be divided over {ranks} tensor-parallel ranks (tp={ranks} of a layout)"
        )
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({})", self.vb.prefix())
    }
}

#[cfg(test)]
mod tests;
