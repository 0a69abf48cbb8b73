//! A factory of layers whose experts are divided over ranks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::DividedExperts;
use training::build::{Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};

use crate::ExpertParallel;

/// Makes the layers of `inner`, and of experts this rank's.
pub(crate) struct ExpertLayers {
    pub(crate) inner: Arc<dyn Layers>,
    pub(crate) experts: ExpertParallel,
}

impl Layers for ExpertLayers {
    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn freezes(&self) -> bool {
        self.inner.freezes()
    }

    fn between(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        self.inner.between(vb)
    }

    fn positions(&self, len: usize) -> Result<Range<usize>> {
        self.inner.positions(len)
    }

    fn positions_before(&self, own: usize) -> usize {
        self.inner.positions_before(own)
    }

    fn of_heads(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        self.inner.of_heads(vb)
    }

    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.inner.weight(vb, config)
    }

    fn vector(
        &self,
        vb: &VarBuilder<'static>,
        name: &str,
        init: Init,
        config: &LinearConfig,
    ) -> Result<Tensor> {
        self.inner.vector(vb, name, init, config)
    }

    fn skip_weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<()> {
        self.inner.skip_weight(vb, config)
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

    fn divide(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.divide(x)
    }

    fn combine(&self, part: &Tensor) -> Result<Tensor> {
        self.inner.combine(part)
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        self.inner.linear(vb, config)
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        self.inner.vocabulary(vb, config)
    }
}
