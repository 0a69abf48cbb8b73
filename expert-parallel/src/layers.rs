//! A factory of layers whose experts are divided over ranks.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use ops::DividedExperts;
use training::build::{Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};

use crate::ExpertParallel;

/// Makes the layers of `inner`, and of experts this rank's.
pub(crate) struct ExpertLayers {
    pub(crate) inner: Arc<dyn Layers>,
    pub(crate) experts: ExpertParallel,
}

impl Layers for ExpertLayers {
    fn inner(&self) -> Option<&dyn Layers> {
        Some(&*self.inner)
    }

    fn experts(&self, count: usize) -> Result<Option<DividedExperts>> {
        self.experts.divide(count).map(Some)
    }

    fn weight_of_expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        (expert, count): (usize, usize),
    ) -> Result<Option<Tensor>> {
        if !self.experts.divide(count)?.own().contains(&expert) {
            return self.inner.skip_weight(vb, config).map(|()| None);
        }
        self.experts.note(format!("{}.weight", vb.prefix()));
        self.inner.weight(vb, config).map(Some)
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        self.inner.linear(vb, config)
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        self.inner.vocabulary(vb, config)
    }
}
