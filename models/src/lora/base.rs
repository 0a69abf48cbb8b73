//! Adapters on a base in few bits (QLoRA).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::quantized::{Format, QuantizedMatrix, QuantizedPart};
use training::build::{Division, Layers, Linear, LinearConfig};

use super::Lora;
use super::product::{Matrix, Product};
use crate::names;
use crate::shapes::shapes_of;
use crate::{Error, Family, ModelConfig, Result};

impl Lora {
    /// Returns the same adapters on a base in 4 or 8 bits: the weights of all linear layers of the blocks are quantized as
    /// [`QuantizedMatrix`] does, each as it is read, before it is divided over ranks. Embedding, head, norms and biases are as
    /// they were.
    ///
    /// # Errors
    /// With 4 bits, a width that blocks of 64 numbers do not divide.
    ///
    /// # Source
    /// Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
    pub fn quantized(&self, format: Format) -> Result<Self> {
        let refuse = |field, got: usize, help| {
            Err(Error::Invalid { what: "a base in few bits", field, got: got.to_string(), help })
        };
        let model = &self.model;
        let is_odd = |(_, width): &(&str, usize)| !width.is_multiple_of(format.block());
        if let Some((field, width)) = widths_of_inputs(model).into_iter().find(is_odd) {
            let help = "it must be a multiple of 64, the numbers of a block of 4 bits: train it in 8 bits, or without";
            return refuse(field, width, help);
        }
        self.in_format(format)
    }

    /// Returns the same adapters on a base of which all linear layers are in this format, as the configuration of a folder says that
    /// transformers saved with bitsandbytes ([`ModelConfig::base_format`](crate::ModelConfig::base_format)): for a plan. Where rows are no
    /// whole blocks, the base is in numbers; experts always are, since neither quantizes them.
    ///
    /// # Errors
    /// candle's.
    pub fn planned_in(&self, format: Format) -> Result<Self> {
        let is_even = |(_, width): &(&str, usize)| width.is_multiple_of(format.block());
        if !widths_of_inputs(&self.model).iter().all(is_even) {
            return Ok(self.clone());
        }
        let mut lora = self.in_format(format)?;
        let (wide, quantized) = lora.quantized.into_iter().partition(|name| names::is_of_expert(name));
        (lora.quantized, lora.wide) = (quantized, wide);
        Ok(lora)
    }

    fn in_format(&self, format: Format) -> Result<Self> {
        let lora = Self { format: Some(format), ..self.clone() };
        let quantized = lora.linear_weights(format)?;
        Ok(Self { quantized, ..lora })
    }

    /// Returns the same adapters on a base as its folder has it ([`Weights::formats`](crate::Weights::formats)): the weights in these
    /// formats are taken with their codes and scales. Without any, these adapters.
    ///
    /// # Errors
    /// Linear layers in different formats.
    pub fn quantized_as(&self, formats: &BTreeMap<String, Format>) -> Result<Self> {
        let Some(&format) = formats.values().next() else { return Ok(self.clone()) };
        if let Some((name, other)) = formats.iter().find(|(_, other)| **other != format) {
            let (what, field) = ("a base in few bits", "the format of its weights");
            let (got, help) = (format!("{format:?}, and of {name} {other:?}"), "all must be in one");
            return Err(Error::Invalid { what, field, got, help });
        }
        let mut lora = Self { format: Some(format), is_held_so: true, ..self.clone() };
        // Rows of the others may be no whole blocks.
        let widest = Self { format: Some(Format::Int8), ..self.clone() };
        let (quantized, wide) =
            widest.linear_weights(Format::Int8)?.into_iter().partition(|name| formats.contains_key(name));
        (lora.quantized, lora.wide) = (quantized, wide);
        Ok(lora)
    }

    /// Returns the names of the weights that are in few bits.
    fn linear_weights(&self, format: Format) -> Result<BTreeSet<String>> {
        let shapes = shapes_of(&self.model, |builder| self.adapt(builder))?;
        let end = format!(".{}.weight", names::quantized(format));
        let layers = shapes.keys().filter_map(|name| name.strip_suffix(&end));
        Ok(layers.map(|layer| format!("{layer}.weight")).collect())
    }

    /// Returns how the base is held; `None` if it is not quantized.
    pub fn base_format(&self) -> Option<Format> {
        self.format
    }

    /// Returns a weight of the model as its 4 or 8 bits hold it; `None` if it is not quantized.
    pub(super) fn widened(&self, name: &str, weight: &Tensor) -> Result<Option<Tensor>> {
        let is_quantized = !self.is_held_so && self.quantized.contains(name);
        let Some(format) = self.format.filter(|_| is_quantized) else { return Ok(None) };
        Ok(Some(QuantizedMatrix::quantize(format, weight)?.widen()?.to_dtype(weight.dtype())?))
    }
}

/// A linear layer in few bits.
struct QuantizedLayer {
    product: Product,
    bias: Option<Tensor>,
}

/// Makes this rank's part of a frozen linear layer in few bits.
pub(super) fn quantized_linear(
    format: Format,
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> candle_core::Result<Linear> {
    let product = quantized_weight(format, layers, vb, config)?;
    let bias = if config.bias { Some(layers.bias(vb, config)?) } else { None };
    Ok(Linear::new(QuantizedLayer { product, bias }))
}

/// Makes this rank's part of a frozen weight in few bits.
pub(super) fn quantized_weight(
    format: Format,
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> candle_core::Result<Product> {
    check_divisible(format, layers, vb, config)?;
    let part = vb.pp(names::quantized(format)).to_dtype(DType::U8);
    let bytes = format.row_bytes(config.inputs)?;
    let blocks = layers.weight(&part, &LinearConfig { inputs: bytes, ..config.clone() })?;
    let len = format.scale_bytes(config.outputs, config.inputs);
    let scales = part.get_with_hints(len, "scales", Init::Const(0.0))?;
    let matrix = Matrix::Quantized(part_of(format, (blocks, scales), layers, config)?);
    Ok(Product { matrix, division: config.division, layers: layers.clone() })
}

/// Makes this rank's part of a frozen weight of one expert out of so many in few bits; `None` if it is another rank's.
pub(super) fn quantized_weight_of_expert(
    format: Format,
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
    expert: (usize, usize),
) -> candle_core::Result<Option<QuantizedPart>> {
    check_divisible(format, layers, vb, config)?;
    let part = vb.pp(names::quantized(format)).to_dtype(DType::U8);
    let of_blocks = LinearConfig { inputs: format.row_bytes(config.inputs)?, ..config.clone() };
    let blocks = layers.weight_of_expert(&part, &of_blocks, expert)?;
    // As a matrix, since ranks with other experts do not have them either.
    let len = format.scale_bytes(config.outputs, config.inputs);
    let of_scales = LinearConfig { frozen: true, ..LinearConfig::new(len, 1, Division::Whole) };
    let scales = layers.weight_of_expert(&part.pp(names::SCALES), &of_scales, expert)?;
    blocks.zip(scales).map(|tensors| part_of(format, tensors, layers, config)).transpose()
}

/// Refuses a weight whose rows cannot be divided over ranks.
fn check_divisible(
    format: Format,
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> candle_core::Result<()> {
    let (inputs, ranks, block) = (config.inputs, layers.ranks(), format.block());
    let per_row = inputs / block;
    if config.division == Division::Inputs && !per_row.is_multiple_of(ranks) {
        let layer = vb.prefix();
        candle_core::bail!(
            "{layer}: {inputs} inputs in few bits are {per_row} blocks of {block}, which cannot be divided over {ranks} tensor-parallel ranks \
             (tp={ranks} of a layout)"
        )
    }
    Ok(())
}

/// Returns this rank's part of a weight, of its blocks and the scales of all.
fn part_of(
    format: Format,
    (blocks, scales_of): (Tensor, Tensor),
    layers: &Arc<dyn Layers>,
    config: &LinearConfig,
) -> candle_core::Result<QuantizedPart> {
    let &LinearConfig { inputs, outputs, division, groups, .. } = config;
    let (ranks, own, scales) = (layers.ranks(), blocks.dim(0)?, format.scales_per_row(inputs));
    let first = |row: usize| match division {
        Division::Whole => row * scales,
        // A row with one scale has it in each part.
        Division::Inputs => row * scales + layers.rank() * (scales / ranks),
        Division::Outputs => {
            let (of_group, group) = (own / groups.max(1), outputs / groups.max(1));
            let row = row / of_group.max(1) * group + layers.rank() * of_group + row % of_group.max(1);
            row * scales
        }
    };
    Ok(QuantizedPart { format, blocks, scales: scales_of, rows: (0..own).map(first).collect() })
}

/// Returns the numbers of inputs of the linear layers in a model's blocks, each with the field of `config.json` that gives it.
fn widths_of_inputs(model: &ModelConfig) -> Vec<(&'static str, usize)> {
    let mut widths = vec![("hidden_size", model.hidden_size)];
    if let Some(latent) = &model.latent {
        widths.extend(latent.query_rank.map(|rank| ("q_lora_rank", rank)));
        widths.push(("kv_lora_rank", latent.key_rank));
    }
    widths.extend(model.divided_inputs());
    widths
}

impl ModelConfig {
    /// Returns the numbers of inputs of those linear layers in the blocks that tensor parallelism divides by inputs, each with the field of
    /// `config.json` that gives it: the outputs of attention, and of the kinds of feed-forward layers that the model has.
    pub fn divided_inputs(&self) -> Vec<(&'static str, usize)> {
        let mut widths = vec![match &self.latent {
            None => ("num_attention_heads * head_dim", self.num_heads * self.head_dim),
            Some(latent) => ("num_attention_heads * v_head_dim", self.num_heads * latent.value_dim),
        }];
        let has = |kind: bool| self.experts.as_ref().is_some_and(|experts| experts.layers.contains(&kind));
        if self.experts.is_none() || has(false) {
            widths.push(("intermediate_size", self.intermediate_size));
        }
        if let Some(experts) = self.experts.as_ref().filter(|_| has(true)) {
            let is_mixtral = self.family == Family::Mixtral;
            widths.push((
                if is_mixtral { "intermediate_size" } else { "moe_intermediate_size" },
                experts.width,
            ));
            widths.extend(experts.shared_width.map(|width| ("shared_expert_intermediate_size", width)));
        }
        widths
    }
}

impl Module for QuantizedLayer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.product.forward(x)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
