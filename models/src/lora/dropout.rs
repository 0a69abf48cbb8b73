//! Dropout before adapters.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};
use ops::Dropout;
use training::build::{Division, Layers, LinearConfig};

/// Dropout of an adapter's input.
pub(super) struct AdapterDropout {
    dropout: Dropout,
    /// Set where the input may be divided along the sequence: the offset of this rank's positions is needed.
    between: Option<Arc<dyn Layers>>,
}

impl AdapterDropout {
    pub(super) fn new(
        p: f64,
        layers: &Arc<dyn Layers>,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
    ) -> Result<Self> {
        let mut dropout = Dropout::by_row(p, &vb.prefix())?;
        if config.division == Division::Inputs {
            let before = layers.rank() * config.inputs / layers.ranks();
            dropout = dropout.among_features(before, config.inputs);
        }
        // A layer divided by inputs gets all positions of a row, so its dropout needs no position offset.
        let between = (config.division != Division::Inputs).then(|| layers.clone());
        Ok(Self { dropout, between })
    }

    /// Returns the input itself where there is no dropout.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.between {
            _ if self.dropout.p() == 0.0 => Ok(x.clone()),
            Some(layers) => self.dropout.clone().after(layers.positions_before(x.dim(1)?)).forward_t(x, true),
            None => self.dropout.forward_t(x, true),
        }
    }
}
