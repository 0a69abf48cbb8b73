//! Expert parallelism: the experts of a model ([`ops::Experts`]) are divided over ranks with different rows. Each token goes to the
//! ranks of its experts, and what they compute of it comes back; everything else of a model is as without.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use comm::{Communicator, Local};
//! use expert_parallel::ExpertParallel;
//! use ops::{Experts, Gate, Router};
//!
//! let (count, per_token, device) = (5, 2, Device::Cpu);
//! let weight = |expert: usize, shape| Tensor::full((expert + 1) as f32 / 8.0, shape, &device);
//! let expert = |expert| Ok([weight(expert, (6, 4))?, weight(expert, (6, 4))?, weight(expert, (4, 6))?]);
//! let weights = |experts: std::ops::Range<usize>| experts.map(expert).collect::<candle_core::Result<Vec<_>>>();
//! let gaps = Local::run_shared(2, |comm| {
//!     let rank = comm.rank();
//!     // The tokens of this rank, and their scores.
//!     let x = Tensor::arange(0f32, 12., &device)?.reshape((3, 4))?.affine(0.1, rank as f64)?;
//!     let scores = Tensor::arange(0f32, 15., &device)?.reshape((3, count))?.affine(1.7, rank as f64)?.sin()?;
//!     let routes = Router::new("gate", per_token)?.route(&scores)?;
//!     let expected = Experts::new(weights(0..count)?, Gate::Silu)?.forward(&x, &routes)?;
//!
//!     let divided = ExpertParallel::new(comm).divide(count)?;
//!     assert_eq!(divided.own(), [0..2, 2..5][rank]);
//!     let experts = Experts::new(weights(divided.own())?, Gate::Silu)?.divided(divided)?;
//!     Ok((experts.forward(&x, &routes)? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?)
//! })?;
//! assert!(gaps.iter().all(|gap| *gap < 1e-6));
//! # Ok::<(), comm::Error>(())
//! ```
//!
//! The gradients of experts' weights are then those of all ranks' tokens, divided by the number of ranks: average them over the
//! ranks that have the same experts, and all others over all ranks with different rows. `girandole::Parallel` does it in a layout
//! with `ep`.
//!
//! # Source
//! Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (2020).
#![forbid(unsafe_code)]

mod exchange;
mod layers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use candle_core::Result;
use comm::Communicator;
use ops::DividedExperts;
use training::build::Layers;
use training::internal::lock;

use exchange::Exchange;
use layers::ExpertLayers;

/// The ranks that experts are divided over.
#[derive(Debug, Clone)]
pub struct ExpertParallel {
    exchange: Arc<Exchange>,
    /// Names of the weights of this rank's experts.
    own: Arc<Mutex<BTreeSet<String>>>,
}

impl ExpertParallel {
    /// Divides experts over the ranks of `comm`. All of them must run the same operations in the same order, also in backward; they
    /// may have different numbers of tokens.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { exchange: Arc::new(Exchange(comm)), own: Arc::default() }
    }

    /// The group.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.exchange.0
    }

    /// Divides the experts of a layer: each rank has a range of them.
    ///
    /// # Errors
    /// Fewer experts than ranks.
    pub fn divide(&self, count: usize) -> Result<DividedExperts> {
        let ranks = self.comm().world_size();
        if count < ranks {
            candle_core::bail!(
                "{count} experts cannot be divided over {ranks} ranks: give ep at most {count}"
            )
        }
        DividedExperts::new(count, self.exchange.clone())
    }

    /// The layers of `inner`, and of the experts of models written with [`training::build`] this rank's.
    pub fn layers(&self, inner: Arc<dyn Layers>) -> Arc<dyn Layers> {
        Arc::new(ExpertLayers { inner, experts: self.clone() })
    }

    /// Whether a weight that was made with [`layers`](Self::layers) is of one of this rank's experts, which ranks with other experts
    /// do not have.
    pub fn is_of_expert(&self, name: &str) -> bool {
        lock(&self.own).contains(name)
    }

    /// Whether this rank has experts.
    pub fn has_experts(&self) -> bool {
        !lock(&self.own).is_empty()
    }

    fn note(&self, name: String) {
        lock(&self.own).insert(name);
    }
}
