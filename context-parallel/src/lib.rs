//! Context parallelism: the rows of a batch are divided over ranks by position, for rows whose activations one rank has no room
//! for. Attention sees the keys of all ranks; everything else of a model computes the places that a rank has.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use comm::Local;
//! use context_parallel::ContextParallel;
//! use ops::{AttentionConfig, AttentionMask, RowContext, attention};
//!
//! let (config, len) = (AttentionConfig::new(2, AttentionMask::Causal), 10);
//! let x = Tensor::arange(0f32, 40., &Device::Cpu)?.reshape((1, len, 4))?;
//! let whole = attention(&x, &x, &x, &config)?;
//! let sums = Local::run_shared(2, |comm| {
//!     let rows = ContextParallel::new(comm).divide(len, None)?;
//!     let (own, expected) = (rows.part_of(&x)?, rows.part_of(&whole)?);
//!     let context = RowContext { divided: Some(rows), ..RowContext::default() };
//!     let y = context.scope(|| attention(&own, &own, &own, &config))?;
//!     Ok((y - expected)?.abs()?.max_all()?.to_scalar::<f32>()?)
//! })?;
//! assert!(sums.iter().all(|gap| *gap < 1e-5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The parameters are copies along these ranks: average their gradients over them, as over ranks with other rows, and weigh each
//! rank's loss by its targets. `girandole::Parallel` does it in a layout with `cp`.
//!
//! [`places`] decides which places a rank has, so that all have equal work; [`ContextParallel`] exchanges what attention needs.
#![forbid(unsafe_code)]

mod error;
mod exchange;
mod places;

use std::sync::Arc;

use comm::Communicator;
use ops::{DividedRows, Documents};

pub use error::{Error, Result};
pub use places::places;

use exchange::Exchange;

/// The ranks that rows are divided over.
#[derive(Debug, Clone)]
pub struct ContextParallel {
    exchange: Arc<Exchange>,
    multiple: usize,
}

impl ContextParallel {
    /// Divides rows over the ranks of `comm`. All of them must run the same operations on the same rows, in the same order.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { exchange: Arc::new(Exchange::new(comm)), multiple: 1 }
    }

    /// Gives each rank a multiple of so many places, which sequence parallelism divides further.
    #[must_use]
    pub fn in_multiples_of(self, multiple: usize) -> Self {
        Self { multiple, ..self }
    }

    /// The group.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        self.exchange.comm()
    }

    /// Divides rows of `len` places, by [`places`]. The rows of packed documents are whole.
    ///
    /// # Errors
    /// Those of [`places`].
    pub fn divide(&self, len: usize, documents: Option<&Documents>) -> Result<DividedRows> {
        let places = places(len, self.comm().world_size(), self.multiple, documents)?;
        Ok(DividedRows::new(places, self.exchange.clone())?)
    }
}
