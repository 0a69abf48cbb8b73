//! Linear layers with LoRA adapters.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::quantized::Format;
use ops::tape::{add, scale};
use ops::{Expert, ExpertAdapter, ExpertWeight};
use training::build::{Division, ExpertConfig, Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig};

use super::LoraConfig;
use super::base::{quantized_linear, quantized_weight, quantized_weight_of_expert};
use super::dora::DoraLinear;
use super::dropout::AdapterDropout;
use super::product::frozen_weight;
use crate::names::{ADAPTER, JOINED};

/// Layer factory that freezes all layers and adds adapters to the targets.
pub(super) struct LoraLayers {
    pub(super) inner: Arc<dyn Layers>,
    pub(super) config: LoraConfig,
    /// Names of the weights that are trained whole.
    pub(super) saved: BTreeSet<String>,
    /// How the linear layers below the adapters are held, if they are quantized.
    pub(super) format: Option<Format>,
    /// Names of the weights that are not, all the same.
    pub(super) wide: BTreeSet<String>,
}

impl Layers for LoraLayers {
    fn inner(&self) -> Option<&dyn Layers> {
        Some(&*self.inner)
    }

    fn freezes(&self) -> bool {
        true
    }

    fn trains(&self, module: &str) -> bool {
        self.saved.contains(&format!("{module}.weight"))
    }

    /// Frozen: there is no gradient of which a rank would have a part.
    fn between(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        vb.clone()
    }

    /// Frozen, as [`between`](Self::between).
    fn of_heads(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        vb.clone()
    }

    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.inner.weight(vb, &LinearConfig { frozen: true, ..config.clone() })
    }

    fn vector(
        &self,
        vb: &VarBuilder<'static>,
        name: &str,
        init: Init,
        config: &LinearConfig,
    ) -> Result<Tensor> {
        self.inner.vector(vb, name, init, &LinearConfig { frozen: true, ..config.clone() })
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

    fn expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &ExpertConfig,
        expert: (usize, usize),
    ) -> Result<Option<Expert>> {
        let weight = |(name, layer): (&str, LinearConfig)| {
            let (vb, frozen) = (vb.pp(name), LinearConfig { frozen: true, ..layer });
            Ok::<_, candle_core::Error>(match self.format_of(&vb) {
                Some(format) => quantized_weight_of_expert(format, &self.inner, &vb, &frozen, expert)?
                    .map(ExpertWeight::Quantized),
                None => self.inner.weight_of_expert(&vb, &frozen, expert)?.map(ExpertWeight::Wide),
            })
        };
        let [gate, up, down] = config.layers().map(weight);
        let own = gate?.zip(up?).zip(down?).map(|((gate, up), down)| Expert::new([gate, up, down]));
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let gate_up =
            LinearConfig { groups: 2, ..LinearConfig::new(hidden, 2 * intermediate, Division::Outputs) };
        let down = LinearConfig::new(intermediate, hidden, Division::Inputs);
        let [gate_up, down] = [(JOINED[0], gate_up), (JOINED[1], down)]
            .map(|(name, layer)| self.adapter_of_expert(&vb.pp(name), &layer, expert));
        let (gate_up_adapter, down_adapter) = (gate_up?, down?);
        Ok(own.map(|own| Expert { gate_up_adapter, down_adapter, ..own }))
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        let frozen = LinearConfig { frozen: true, ..config.clone() };
        let is_target = self.config.is_target(&vb.prefix());
        if is_target && self.config.dora {
            return self.linear_with_magnitudes(vb, &frozen);
        }
        let base = match self.format_of(vb) {
            Some(format) => quantized_linear(format, &self.inner, vb, &frozen)?,
            None => self.inner.linear(vb, &frozen)?,
        };
        if !is_target {
            return Ok(base);
        }
        let [first, second] = of_matrices(config.division);
        let (rank, scale) = (self.config.rank_of(&vb.prefix()), self.config.scale_of(&vb.prefix()));
        let dtype = self.config.dtype.unwrap_or(vb.dtype());
        let [a, b] = ADAPTER.map(|part| vb.pp(part).to_dtype(dtype));
        let a = self.inner.linear(&a, &LinearConfig::new(config.inputs, rank, first))?;
        let second =
            LinearConfig { groups: config.groups, ..LinearConfig::new(rank, config.outputs, second) };
        let b = self.inner.linear(&b, &second)?;
        let dropout = AdapterDropout::new(self.config.dropout, &self.inner, vb, config)?;
        Ok(Linear::new(LoraLinear { base, a, b, dropout, scale, dtype }))
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        let frozen = !self.saved.contains(&format!("{}.weight", vb.prefix()));
        self.inner.vocabulary(vb, &VocabularyConfig { frozen, ..config.clone() })
    }
}

impl LoraLayers {
    /// Returns how the weight of a linear layer is held, if it is quantized.
    fn format_of(&self, vb: &VarBuilder<'static>) -> Option<Format> {
        self.format.filter(|_| !self.wide.contains(&format!("{}.weight", vb.prefix())))
    }

    /// Makes the adapter of a layer of one expert out of so many; `None` if it has none, or is another rank's.
    fn adapter_of_expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        expert: (usize, usize),
    ) -> Result<Option<ExpertAdapter>> {
        let layer = vb.prefix();
        if !self.config.is_target(&layer) {
            return Ok(None);
        }
        let (rank, scale) = (self.config.rank_of(&layer), self.config.scale_of(&layer));
        let [first, second] = of_matrices(config.division);
        let dtype = self.config.dtype.unwrap_or(vb.dtype());
        let matrix = |name: &str, config: &LinearConfig| {
            let part = vb.pp(name).to_dtype(dtype);
            // Each rank applies a whole matrix to its part of the expert alone.
            let part = if config.division == Division::Whole { self.inner.of_heads(&part) } else { part };
            self.inner.weight_of_expert(&part, config, expert)
        };
        let a = matrix(ADAPTER[0], &LinearConfig::new(config.inputs, rank, first))?;
        let b = LinearConfig { groups: config.groups, ..LinearConfig::new(rank, config.outputs, second) };
        let b = matrix(ADAPTER[1], &b)?;
        Ok(a.zip(b).map(|(a, b)| ExpertAdapter { a, b, scale }))
    }

    /// Makes a layer of a frozen weight and an adapter with magnitudes.
    fn linear_with_magnitudes(&self, vb: &VarBuilder<'static>, frozen: &LinearConfig) -> Result<Linear> {
        let base = match self.format_of(vb) {
            Some(format) => quantized_weight(format, &self.inner, vb, frozen)?,
            None => frozen_weight(&self.inner, vb, frozen)?,
        };
        let layer = vb.prefix();
        let (rank, scale) = (self.config.rank_of(&layer), self.config.scale_of(&layer));
        let dtype = self.config.dtype.unwrap_or(vb.dtype());
        let (divisions, dropout) = (
            of_matrices(frozen.division),
            AdapterDropout::new(self.config.dropout, &self.inner, vb, frozen)?,
        );
        DoraLinear::new(base, vb, frozen, divisions, (rank, scale), dropout, dtype).map(Linear::new)
    }
}

/// How the two matrices of an adapter are divided: of a layer divided by outputs the second, of one divided by inputs the first.
fn of_matrices(division: Division) -> [Division; 2] {
    match division {
        Division::Whole => [Division::Whole, Division::Whole],
        Division::Outputs => [Division::Whole, Division::Outputs],
        Division::Inputs => [Division::Inputs, Division::Whole],
    }
}

struct LoraLinear {
    base: Linear,
    a: Linear,
    b: Linear,
    dropout: AdapterDropout,
    scale: f64,
    dtype: DType,
}

impl Module for LoraLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Scaled between the two matrices, where the activation is small.
        let own = self.dropout.forward(&x.to_dtype(self.dtype)?)?;
        let change = self.b.forward(&scale(&self.a.forward(&own)?, self.scale)?)?;
        add(&self.base.forward(x)?, &change.to_dtype(x.dtype())?)
    }
}
