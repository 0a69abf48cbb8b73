//! Sinusoidal positional encoding.

use candle_core::{Device, Module, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};

/// Adds sines and cosines of a token's position to its features; the frequency falls with the feature index.
#[derive(Debug)]
pub struct PositionalEncoding {
    pe: Tensor,
}

impl PositionalEncoding {
    /// Creates the encoding for rows of up to `max_len` tokens of `d_model` features. The table is the variable `pe`,
    /// which PyTorch also saves; if the builder already holds it, it is not recomputed.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(max_len: usize, d_model: usize, builder: VarBuilder<'_>) -> Result<Self> {
        let known = builder.contains_tensor("pe");
        let pe = builder.get_with_hints((1, max_len, d_model), "pe", Init::Const(0.0))?;
        if known {
            return Ok(Self { pe: pe.detach() });
        }
        let pe = Var::from_tensor(&pe)?;
        pe.set(&table(max_len, d_model)?.to_dtype(pe.dtype())?.to_device(pe.device())?)?;
        Ok(Self { pe: pe.as_detached_tensor() })
    }
}

impl Module for PositionalEncoding {
    /// # Shapes
    /// (batch, length, d_model) to the same.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = self.pe.narrow(1, 0, x.dim(1)?)?;
        ops::tape::add(x, &rows.broadcast_as(x.shape())?)
    }
}

/// Computes the table: sines at even indices, cosines at odd ones; in f32, step by step as PyTorch does.
fn table(max_len: usize, d_model: usize) -> Result<Tensor> {
    let slower = (-(1e4f64.ln()) / d_model as f64) as f32;
    let speeds: Vec<f32> = (0..d_model).step_by(2).map(|place| (place as f32 * slower).exp()).collect();
    let row = |position: usize| {
        let angles = speeds.iter().map(move |speed| position as f32 * speed);
        angles.flat_map(|angle| [angle.sin(), angle.cos()])
    };
    let numbers: Vec<f32> = (0..max_len).flat_map(row).collect();
    Tensor::from_vec(numbers, (1, max_len, d_model), &Device::Cpu)
}
