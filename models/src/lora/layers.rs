//! Linear layers with LoRA adapters.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};
use ops::tape::{add, scale};
use ops::{DividedExperts, Dropout};
use training::build::{Division, Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};

use super::LoraConfig;
use super::base::linear_in_4_bits;
use crate::names::ADAPTER;

/// Layer factory that freezes all layers and adds adapters to the targets.
pub(super) struct LoraLayers {
    pub(super) inner: Arc<dyn Layers>,
    pub(super) config: LoraConfig,
    /// Whether the linear layers below the adapters are in 4 bits.
    pub(super) in_4_bits: bool,
}

impl Layers for LoraLayers {
    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn freezes(&self) -> bool {
        true
    }

    fn positions(&self, len: usize) -> Result<Range<usize>> {
        self.inner.positions(len)
    }

    fn positions_before(&self, own: usize) -> usize {
        self.inner.positions_before(own)
    }

    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.inner.weight(vb, &LinearConfig { frozen: true, ..config.clone() })
    }

    fn bias(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.inner.bias(vb, &LinearConfig { frozen: true, ..config.clone() })
    }

    fn skip_weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<()> {
        self.inner.skip_weight(vb, config)
    }

    fn experts(&self, count: usize) -> Result<Option<DividedExperts>> {
        self.inner.experts(count)
    }

    fn weight_of_expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        expert: (usize, usize),
    ) -> Result<Option<Tensor>> {
        let config = LinearConfig { frozen: true, ..config.clone() };
        self.inner.weight_of_expert(vb, &config, expert)
    }

    fn divide(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.divide(x)
    }

    fn combine(&self, part: &Tensor) -> Result<Tensor> {
        self.inner.combine(part)
    }

    fn gather(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.gather(x)
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        let frozen = LinearConfig { frozen: true, ..config.clone() };
        let base = match self.in_4_bits {
            true => linear_in_4_bits(&self.inner, vb, &frozen)?,
            false => self.inner.linear(vb, &frozen)?,
        };
        if !self.config.is_target(&vb.prefix()) {
            return Ok(base);
        }
        // A layer divided by outputs has its second matrix divided, a layer divided by inputs its first.
        let (first, second) = match config.division {
            Division::Whole => (Division::Whole, Division::Whole),
            Division::Outputs => (Division::Whole, Division::Outputs),
            Division::Inputs => (Division::Inputs, Division::Whole),
        };
        let rank = self.config.rank;
        let dtype = self.config.dtype.unwrap_or(vb.dtype());
        let [a, b] = ADAPTER.map(|part| vb.pp(part).to_dtype(dtype));
        let a = self.inner.linear(&a, &LinearConfig::new(config.inputs, rank, first))?;
        let second =
            LinearConfig { groups: config.groups, ..LinearConfig::new(rank, config.outputs, second) };
        let b = self.inner.linear(&b, &second)?;
        let mut dropout = Dropout::by_row(self.config.dropout, &vb.prefix())?;
        if config.division == Division::Inputs {
            let before = self.rank() * config.inputs / self.ranks();
            dropout = dropout.among_features(before, config.inputs);
        }
        // A layer divided by inputs gets all positions of a row, so its dropout needs no position offset.
        let between = (config.division != Division::Inputs).then(|| self.inner.clone());
        Ok(Linear::new(LoraLinear { base, a, b, dropout, between, scale: self.config.scale(), dtype }))
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        self.inner.vocabulary(vb, &VocabularyConfig { frozen: true, ..config.clone() })
    }
}

struct LoraLinear {
    base: Linear,
    a: Linear,
    b: Linear,
    dropout: Dropout,
    /// Set where the input may be divided along the sequence: `dropped` needs the offset of this rank's positions.
    between: Option<Arc<dyn Layers>>,
    scale: f64,
    dtype: DType,
}

impl LoraLinear {
    fn dropped(&self, x: &Tensor) -> Result<Tensor> {
        match &self.between {
            _ if self.dropout.p() == 0.0 => Ok(x.clone()),
            Some(layers) => self.dropout.clone().after(layers.positions_before(x.dim(1)?)).forward_t(x, true),
            None => self.dropout.forward_t(x, true),
        }
    }
}

impl Module for LoraLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Scaled between the two matrices, where the activation is small.
        let own = self.dropped(&x.to_dtype(self.dtype)?)?;
        let change = self.b.forward(&scale(&self.a.forward(&own)?, self.scale)?)?;
        add(&self.base.forward(x)?, &change.to_dtype(x.dtype())?)
    }
}
