//! Self-attention layers: projections, rotary embedding, attention and the output projection.

use candle_core::{Module, Tensor};
use candle_nn::{Init, ModuleT, VarBuilder};

use super::attention::{AttentionConfig, attention_with, invalid};
use super::columns::columns;
use super::linear::{Linear, linear_no_bias};
use super::rotary::Rotary;
use crate::Result;

/// Projections to queries, keys and values.
#[derive(Debug, Clone)]
enum Projections {
    /// One layer, with the features of queries, keys and values among its outputs, in this order.
    Together(Linear, [usize; 3]),
    Apart([Linear; 3]),
}

/// A self-attention layer: PyTorch's, made by [`multihead_attention`], or that of Llama and related models, made by
/// [`self_attention`]. Add [rotary embedding](Self::with_rotary) to either.
///
/// # Shapes
/// Input and result `(batch, length, hidden)`. [`AttentionConfig::dropout`] counts in training only
/// (`forward_t(x, true)`).
///
/// # Cost
/// Two matrix products forward and four backward, or four and eight with separate projections; [`attention`](crate::attention).
///
/// # Errors
/// Those of [`attention`](crate::attention); an input of another width or dtype; a length beyond the rotary table.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    projections: Projections,
    rotary: Option<Rotary>,
    out: Linear,
    config: AttentionConfig,
}

/// Makes PyTorch's `nn.MultiheadAttention(hidden, config.num_heads, batch_first=True)` for self-attention, with its
/// parameters `in_proj_weight`, `in_proj_bias`, `out_proj.weight` and `out_proj.bias`, and initial values of the same
/// distributions. With fewer key and value heads, `in_proj_weight` has fewer rows.
///
/// # Errors
/// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for heads that do not divide `hidden`, or key and value heads that do not divide
/// `num_heads`; variables of these names that exist with another shape.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{ModuleT, VarBuilder, VarMap};
/// use ops::{AttentionConfig, AttentionMask, multihead_attention};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = multihead_attention(8, AttentionConfig::new(2, AttentionMask::Causal), builder.pp("attn"))?;
/// let y = layer.forward_t(&Tensor::ones((3, 5, 8), DType::F32, &Device::Cpu)?, true)?;
/// assert_eq!(y.dims(), [3, 5, 8]);
/// let mut names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
/// names.sort();
/// assert_eq!(names, ["attn.in_proj_bias", "attn.in_proj_weight", "attn.out_proj.bias", "attn.out_proj.weight"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn multihead_attention(
    hidden: usize,
    config: AttentionConfig,
    builder: VarBuilder<'_>,
) -> candle_core::Result<SelfAttention> {
    let (heads, _) = config.heads()?;
    if hidden == 0 || !hidden.is_multiple_of(heads) {
        return Ok(invalid("num_heads", heads, "it must divide the hidden features")?);
    }
    let widths = widths(hidden / heads, &config)?;
    let rows = widths.iter().sum();
    let bound = (6.0 / (rows + hidden) as f64).sqrt();
    let weight =
        builder.get_with_hints((rows, hidden), "in_proj_weight", Init::Uniform { lo: -bound, up: bound })?;
    let bias = builder.get_with_hints(rows, "in_proj_bias", Init::Const(0.0))?;
    let builder = builder.pp("out_proj");
    let bound = 1.0 / (hidden as f64).sqrt();
    let out = builder.get_with_hints((hidden, hidden), "weight", Init::Uniform { lo: -bound, up: bound })?;
    let out = Linear::new(out, builder.get_with_hints(hidden, "bias", Init::Const(0.0))?);
    let projections = Projections::Together(Linear::new(weight, bias), widths);
    Ok(SelfAttention { projections, rotary: None, out, config })
}

/// Makes the self-attention of Llama, Mistral and related models, with heads of `head_dim` features and without biases,
/// under the parameter names of Hugging Face's transformers (`q_proj.weight`, `k_proj.weight`, `v_proj.weight`,
/// `o_proj.weight`).
///
/// # Errors
/// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for key and value heads that do not divide `num_heads`; variables of these names that exist
/// with another shape.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{ModuleT, VarBuilder, VarMap};
/// use ops::{AttentionConfig, AttentionMask, Rotary, RotaryConfig, self_attention};
///
/// let builder = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// // Four heads of queries, two of keys and values, positions up to 16.
/// let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, AttentionMask::Causal) };
/// let rotary = Rotary::new(&RotaryConfig::new(2, 16), &Device::Cpu)?;
/// let layer = self_attention(8, 2, config, builder.pp("self_attn"))?.with_rotary(rotary);
/// let y = layer.forward_t(&Tensor::ones((3, 5, 8), DType::F32, &Device::Cpu)?, true)?;
/// assert_eq!(y.dims(), [3, 5, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn self_attention(
    hidden: usize,
    head_dim: usize,
    config: AttentionConfig,
    builder: VarBuilder<'_>,
) -> candle_core::Result<SelfAttention> {
    let [q, k, v] = widths(head_dim, &config)?;
    let into = |name: &str, width| linear_no_bias(hidden, width, builder.pp(name));
    let projections = Projections::Apart([into("q_proj", q)?, into("k_proj", k)?, into("v_proj", v)?]);
    let out = linear_no_bias(q, hidden, builder.pp("o_proj"))?;
    Ok(SelfAttention { projections, rotary: None, out, config })
}

/// Features of queries, keys and values.
fn widths(head_dim: usize, config: &AttentionConfig) -> Result<[usize; 3]> {
    let (heads, kv_heads) = config.heads()?;
    Ok([heads, kv_heads, kv_heads].map(|heads| heads * head_dim))
}

impl SelfAttention {
    /// Rotates queries and keys by their positions, the first of which is 0. Layers share the table.
    #[must_use]
    pub fn with_rotary(self, rotary: Rotary) -> Self {
        Self { rotary: Some(rotary), ..self }
    }

    /// Computes the layer's output where some positions of the batch's rows (padding) are hidden from all others.
    ///
    /// # Shapes
    /// `x` and the result `(batch, length, hidden)`; `key_mask`, of u8, `(batch, length)`: 0 hides a position.
    ///
    /// # Errors
    /// Those of the layer, and of [`attention_with_key_mask`](crate::attention_with_key_mask).
    pub fn forward_with_key_mask(
        &self,
        x: &Tensor,
        key_mask: &Tensor,
        train: bool,
    ) -> candle_core::Result<Tensor> {
        self.run(x, Some(key_mask), train)
    }

    fn run(&self, x: &Tensor, key_mask: Option<&Tensor>, train: bool) -> candle_core::Result<Tensor> {
        let [mut q, mut k, v] = match &self.projections {
            Projections::Together(all, [q, k, v]) => {
                let all = all.forward(x)?;
                [columns(&all, 0..*q)?, columns(&all, *q..q + k)?, columns(&all, q + k..q + k + v)?]
            }
            Projections::Apart([q, k, v]) => [q.forward(x)?, k.forward(x)?, v.forward(x)?],
        };
        if let Some(rotary) = &self.rotary {
            (q, k) = (rotary.apply(&q, 0)?, rotary.apply(&k, 0)?);
        }
        let dropout = self.config.dropout.clone().filter(|_| train);
        let config = AttentionConfig { dropout, ..self.config.clone() };
        self.out.forward(&attention_with(&q, &k, &v, key_mask, &config)?)
    }
}

impl ModuleT for SelfAttention {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.run(x, None, train)
    }
}
