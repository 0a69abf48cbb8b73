//! Layers that are whole on every rank.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::{
    LinearCrossEntropyConfig, embedding, linear, linear_cross_entropy, linear_log_probs, linear_no_bias,
};

use super::frozen::frozen;
use super::{Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};

/// Makes every layer whole, on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct WholeLayers;

impl Layers for WholeLayers {
    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        let &LinearConfig { inputs, outputs, bias, .. } = config;
        let vb = if config.frozen { frozen(vb) } else { vb.clone() };
        let layer = if bias { linear } else { linear_no_bias };
        Ok(Linear::new(layer(inputs, outputs, vb)?))
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        let vb = if config.frozen { frozen(vb) } else { vb.clone() };
        let shape = (config.tokens, config.features);
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        Ok(Arc::new(Whole { weight: vb.get_with_hints(shape, "weight", init)? }))
    }
}

/// A whole token table.
struct Whole {
    weight: Tensor,
}

impl Vocabulary for Whole {
    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        embedding(&self.weight, tokens)
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        ops::Linear::new(self.weight.clone(), None).forward(x)
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, config: &LinearCrossEntropyConfig) -> Result<Tensor> {
        linear_cross_entropy(x, &self.weight, None, targets, config)
    }

    fn log_probs(&self, x: &Tensor, targets: &Tensor, ignored: i64) -> Result<Tensor> {
        linear_log_probs(x, &self.weight, targets, Some(ignored))
    }
}
