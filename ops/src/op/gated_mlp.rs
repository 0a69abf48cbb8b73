//! The gated feed-forward block of Llama and related models.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;

use super::gated::Gate;
use super::linear::{Linear, linear_no_bias};

/// `down_proj(activation(gate_proj(x)) * up_proj(x))`: the feed-forward block of Llama, Mistral, Qwen and Gemma,
/// without biases, with the parameter names of Hugging Face's transformers (`gate_proj.weight`, `up_proj.weight`,
/// `down_proj.weight`).
///
/// # Shapes
/// Input and result `(.., hidden)`.
///
/// # Cost
/// Three matrix products forward and six backward; [`Gate::apply`].
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use ops::{Gate, gated_mlp};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let mlp = gated_mlp(4, 6, Gate::Silu, builder.pp("mlp"))?;
/// let y = mlp.forward(&Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [2, 3, 4]);
/// let mut names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
/// names.sort();
/// assert_eq!(names, ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    gate: Gate,
}

/// Makes a [`GatedMlp`] of `hidden` features and `intermediate` inner ones, from the builder's variables.
///
/// # Errors
/// Variables of these names that exist with another shape.
pub fn gated_mlp(
    hidden: usize,
    intermediate: usize,
    gate: Gate,
    builder: VarBuilder<'_>,
) -> candle_core::Result<GatedMlp> {
    Ok(GatedMlp {
        gate_proj: linear_no_bias(hidden, intermediate, builder.pp("gate_proj"))?,
        up_proj: linear_no_bias(hidden, intermediate, builder.pp("up_proj"))?,
        down_proj: linear_no_bias(intermediate, hidden, builder.pp("down_proj"))?,
        gate,
    })
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let active = self.gate.apply(&self.gate_proj.forward(x)?, &self.up_proj.forward(x)?)?;
        self.down_proj.forward(&active)
    }
}
