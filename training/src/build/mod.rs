//! The one way in which a model gets its parameters, whatever the layout: whole, as shards that come and go, as slices of
//! divided layers, or only those of one stage.
//!
//! A model is written once on a [`Builder`]. It is a chain of *units* (the embedding, each block, the head), which is what
//! sharding gathers and releases, and where a pipeline cuts:
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
//! Units may be computed again in backward, in place of keeping what they have computed: [`Builder::recomputing`].

mod frozen;
mod layers;
mod model;
mod parts;
mod recompute;
mod unit;
mod whole;
mod whole_rows;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Result;
use candle_nn::VarBuilder;

pub use frozen::frozen;
pub use layers::{Division, Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};
pub use model::Model;
pub use parts::PartSource;
pub use recompute::Recompute;
pub use unit::{RunUnit, Unit, UnitPlace, UnitSource, Units};
pub use whole::WholeLayers;
pub use whole_rows::{in_whole_rows, whole_rows};

use unit::Here;

/// What a model is built with: it makes the units.
#[derive(Clone)]
pub struct Builder {
    units: Arc<dyn UnitSource>,
    layers: Arc<dyn Layers>,
    recompute: Recompute,
    /// Units so far.
    built: Arc<AtomicUsize>,
}

impl Builder {
    /// Every parameter is here, whole, and stays: for one process, and for wrappers of a `VarBuilder` such as `Ddp`.
    pub fn new(vb: VarBuilder<'static>) -> Self {
        Self::of_units(Arc::new(Here(vb)))
    }

    /// Units as a strategy makes them.
    pub fn of_units(units: Arc<dyn UnitSource>) -> Self {
        Self { units, layers: Arc::new(WholeLayers), recompute: Recompute::default(), built: Arc::default() }
    }

    /// The same units with other layers in them.
    #[must_use]
    pub fn with_layers(self, layers: Arc<dyn Layers>) -> Self {
        Self { layers, ..self }
    }

    /// The same units, of which some are computed again in backward. Those that are built from here on are counted.
    ///
    /// Backward is [`backward`](crate::backward) then, or that of a strategy, and not candle's own.
    #[must_use]
    pub fn recomputing(self, recompute: Recompute) -> Self {
        Self { recompute, built: Arc::default(), ..self }
    }

    /// How layers are made.
    pub fn layers(&self) -> &Arc<dyn Layers> {
        &self.layers
    }

    /// Makes a unit of what `build` builds. Its name is its own among the units; names of parameters begin at the model's root,
    /// and no two units have the same.
    ///
    /// # Errors
    /// What `build` and the strategy fail with; [`Recompute::Every`] of none.
    pub fn unit<M>(&self, name: &str, build: impl FnOnce(&Part) -> Result<M>) -> Result<Unit<M>> {
        let again = self.recompute.of(self.built.fetch_add(1, Ordering::Relaxed))?;
        let (mut build, mut module) = (Some(build), None);
        let place = self.units.unit(name, &mut |vb| {
            if let Some(build) = build.take() {
                module = Some(build(&Part::new(vb, self.layers.clone()))?);
            }
            Ok(())
        })?;
        Ok(Unit::new(name, module, place, again))
    }

    /// A unit that uses parameters of `other`, too: a head that is the embedding, for one. `build` is given what the other unit
    /// is, where it is in this process; where it is not, it makes a copy of its own, and whoever builds the stages ties the two.
    ///
    /// # Errors
    /// Those of [`unit`](Self::unit).
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

/// What a unit's parameters come from while it is built.
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

    /// The builder of what every rank has whole and applies between divided layers: norms, positions.
    pub fn whole(&self) -> VarBuilder<'static> {
        if self.layers.freezes() { frozen(&self.vb) } else { self.layers.between(&self.vb) }
    }

    /// The builder of what every rank has whole and applies to its own heads alone, so that each has a part of the gradient: norms
    /// of queries and keys.
    pub fn of_heads(&self) -> VarBuilder<'static> {
        if self.layers.freezes() { frozen(&self.vb) } else { self.layers.of_heads(&self.vb) }
    }

    /// A linear layer of `weight` and perhaps `bias`, divided as the configuration says where layers are divided.
    ///
    /// # Errors
    /// Sizes that the ranks do not divide; what the builder fails with.
    pub fn linear(&self, config: &LinearConfig) -> Result<Linear> {
        self.layers.linear(&self.vb, config)
    }

    /// A table of one vector for each token, `weight` (tokens, features), divided by its tokens where layers are divided: an
    /// embedding, a head, or both.
    ///
    /// # Errors
    /// What the builder fails with.
    pub fn vocabulary(&self, tokens: usize, features: usize) -> Result<Arc<dyn Vocabulary>> {
        self.layers.vocabulary(&self.vb, &VocabularyConfig { tokens, features, frozen: false })
    }

    /// How layers are made.
    pub fn layers(&self) -> &Arc<dyn Layers> {
        &self.layers
    }

    /// Ranks that layers are divided over.
    pub fn ranks(&self) -> usize {
        self.layers.ranks()
    }

    /// How many of `count` things, such as heads, a rank has.
    ///
    /// # Errors
    /// A count that the ranks do not divide.
    pub fn share(&self, what: &str, count: usize) -> Result<usize> {
        let ranks = self.ranks();
        if count.is_multiple_of(ranks) {
            return Ok(count / ranks);
        }
        candle_core::bail!("{what}: {count} cannot be divided over {ranks} tensor-parallel ranks")
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({})", self.vb.prefix())
    }
}

#[cfg(test)]
mod tests;
