//! Adapters on a base in 4 bits (QLoRA).

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::nf4::{BLOCK, Nf4Matrix};
use training::build::{Division, Layers, Linear, LinearConfig};

use super::Lora;
use super::product::{Matrix, Product};
use crate::names::IN_4_BITS;
use crate::shapes::shapes_of;
use crate::{Error, Result};

impl Lora {
    /// Returns the same adapters on a base in 4 bits: the weights of all linear layers of the blocks are quantized as
    /// [`Nf4Matrix`] does, each as it is read, before it is divided over ranks. Embedding, head, norms and biases are as
    /// they were.
    ///
    /// # Errors
    /// A model with experts; a width that blocks of 64 numbers do not divide.
    ///
    /// # Source
    /// Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
    pub fn in_4_bits(&self) -> Result<Self> {
        let refuse = |field, got: usize, help| {
            Err(Error::Invalid { what: "a base in 4 bits", field, got: got.to_string(), help })
        };
        let model = &self.model;
        if let Some(experts) = &model.experts {
            return refuse("num_experts", experts.count, "experts have no 4 bits so far: train it without");
        }
        let widths = [
            ("hidden_size", model.hidden_size),
            ("num_attention_heads * head_dim", model.num_heads * model.head_dim),
            ("intermediate_size", model.intermediate_size),
        ];
        if let Some((field, width)) = widths.into_iter().find(|(_, width)| !width.is_multiple_of(BLOCK)) {
            let help = "it must be a multiple of 64, the numbers of a block: train it without";
            return refuse(field, width, help);
        }
        // A name, so that `adapt` builds the layers in 4 bits.
        let mut lora = Self { in_4_bits: BTreeSet::from([String::new()]), ..self.clone() };
        let shapes = shapes_of(&lora.model, |builder| lora.adapt(builder))?;
        let end = format!(".{IN_4_BITS}.weight");
        let layers = shapes.keys().filter_map(|name| name.strip_suffix(&end));
        lora.in_4_bits = layers.map(|layer| format!("{layer}.weight")).collect();
        Ok(lora)
    }

    /// Whether the base is in 4 bits.
    pub fn is_in_4_bits(&self) -> bool {
        !self.in_4_bits.is_empty()
    }

    /// Returns a weight of the model as its 4 bits hold it; `None` if it is not in 4 bits.
    pub(super) fn widened(&self, name: &str, weight: &Tensor) -> Result<Option<Tensor>> {
        if !self.in_4_bits.contains(name) {
            return Ok(None);
        }
        Ok(Some(Nf4Matrix::quantize(weight)?.widen()?.to_dtype(weight.dtype())?))
    }
}

/// A linear layer in 4 bits.
struct LinearIn4Bits {
    product: Product,
    bias: Option<Tensor>,
}

/// Makes this rank's part of a frozen linear layer in 4 bits.
pub(super) fn linear_in_4_bits(
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> candle_core::Result<Linear> {
    let product = weight_in_4_bits(layers, vb, config)?;
    let bias = if config.bias { Some(layers.bias(vb, config)?) } else { None };
    Ok(Linear::new(LinearIn4Bits { product, bias }))
}

/// Makes this rank's part of a frozen weight in 4 bits.
pub(super) fn weight_in_4_bits(
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> candle_core::Result<Product> {
    let &LinearConfig { inputs, outputs, division, groups, .. } = config;
    let (ranks, per_row) = (layers.ranks(), inputs / BLOCK);
    let bytes = Nf4Matrix::row_bytes(inputs)?;
    if division == Division::Inputs && !per_row.is_multiple_of(ranks) {
        let layer = vb.prefix();
        candle_core::bail!(
            "{layer}: {inputs} inputs in 4 bits are {per_row} blocks of {BLOCK}, which cannot be divided over {ranks} tensor-parallel ranks \
             (tp={ranks} of a layout)"
        )
    }
    let part = vb.pp(IN_4_BITS).to_dtype(DType::U8);
    let blocks = layers.weight(&part, &LinearConfig { inputs: bytes, ..config.clone() })?;
    let len = Nf4Matrix::scale_bytes(outputs, inputs);
    let scales = part.get_with_hints(len, "scales", Init::Const(0.0))?;
    let own = blocks.dim(0)?;
    let first = |row: usize| match division {
        Division::Whole => row * per_row,
        Division::Inputs => row * per_row + blocks_before(layers, per_row),
        Division::Outputs => {
            let (of_group, group) = (own / groups.max(1), outputs / groups.max(1));
            let row = row / of_group.max(1) * group + layers.rank() * of_group + row % of_group.max(1);
            row * per_row
        }
    };
    let rows = (0..own).map(first).collect();
    let matrix = Matrix::In4Bits { blocks, scales, rows };
    Ok(Product { matrix, division, layers: layers.clone() })
}

/// Blocks of a row that ranks before this one have, of a layer divided by inputs.
fn blocks_before(layers: &Arc<dyn Layers>, per_row: usize) -> usize {
    layers.rank() * (per_row / layers.ranks())
}

impl Module for LinearIn4Bits {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.product.forward(x)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
