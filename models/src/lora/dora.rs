//! Adapters with weight decomposition (DoRA): each row of the weight has a magnitude, which is trained apart from its direction.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use ops::tape::{add, explicit_op2, scale};
use ops::wide_dtype;
use training::build::{Division, LinearConfig, whole_rows};

use super::dropout::AdapterDropout;
use super::product::{Matrix, Product};
use crate::names::{self, ADAPTER, MAGNITUDE};

/// `x w' m / n`, where `w` is the base's weight with the adapter's change, `n` the norms of its rows, and `m` the magnitudes.
///
/// In backward the norms are constants, as in peft. Where there is dropout, the change of the base's output by the magnitudes is that of
/// the dropped input, as in peft, too.
///
/// # Source
/// Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024), section 4.3.
pub(super) struct DoraLinear {
    base: Product,
    bias: Option<Tensor>,
    a: Product,
    b: Product,
    magnitude: Tensor,
    dropout: AdapterDropout,
    scale: f64,
    dtype: DType,
}

impl DoraLinear {
    /// Makes the layer of a base without a bias, which is divided as `config` says. `divisions` are those of the two matrices.
    pub(super) fn new(
        base: Product,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        divisions: [Division; 2],
        (rank, scale): (usize, f64),
        dropout: AdapterDropout,
        dtype: DType,
    ) -> Result<Self> {
        let layers = base.layers.clone();
        let product = |part: &str, config: LinearConfig| {
            let matrix = Matrix::Wide(layers.weight(&vb.pp(part).to_dtype(dtype), &config)?);
            Ok::<_, candle_core::Error>(Product { matrix, division: config.division, layers: layers.clone() })
        };
        let a = product(ADAPTER[0], LinearConfig::new(config.inputs, rank, divisions[0]))?;
        let second = LinearConfig::new(rank, config.outputs, divisions[1]);
        let b = product(ADAPTER[1], LinearConfig { groups: config.groups, ..second })?;
        let bias = if config.bias { Some(layers.bias(vb, config)?) } else { None };
        let init = names::magnitude_init(base.matrix.format());
        let trained = LinearConfig { frozen: false, ..config.clone() };
        let magnitude = layers.vector(&vb.clone().to_dtype(dtype), MAGNITUDE, init, &trained)?;
        Ok(Self { base, bias, a, b, magnitude, dropout, scale, dtype })
    }

    /// Returns the norms of the rows of the base's weight with the adapter's change, without making either.
    fn norms(&self) -> Result<Tensor> {
        let dtype = wide_dtype(self.dtype);
        let (Matrix::Wide(a), Matrix::Wide(b)) = (&self.a.matrix, &self.b.matrix) else {
            candle_core::bail!("the matrices of an adapter are never in few bits")
        };
        let [a, b] = [a, b].map(|matrix| matrix.detach().to_dtype(dtype));
        let (a, b) = (a?, b?);
        // |w + s b a|^2 = |w|^2 + 2 s b (w a') + s^2 b (b a a'), row by row.
        let with_base = self.base.matrix.constant_times(&a)?.t()?;
        let of_both =
            ((with_base * (2.0 * self.scale))? + (b.matmul(&a.matmul(&a.t()?)?)? * self.scale.powi(2))?)?;
        let squares = (self.base.matrix.squares(dtype)? + (of_both * &b)?.sum(1)?)?;
        let squares = match self.base.division {
            // Each rank has a part of each row.
            Division::Inputs => whole_rows(|| self.base.layers.combine(&squares))?,
            Division::Whole | Division::Outputs => squares,
        };
        squares.sqrt()
    }
}

impl Module for DoraLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let input = x.to_dtype(self.dtype)?;
        let own = self.dropout.forward(&input)?;
        let is_dropped = own.id() != input.id();
        let change = self.b.forward(&scale(&self.a.forward(&own)?, self.scale)?)?;
        let whole = self.base.forward(&own.to_dtype(x.dtype())?)?;
        let sum = scaled_by(&add(&whole.to_dtype(self.dtype)?, &change)?, &self.magnitude, &self.norms()?)?;
        let mut y = sum.to_dtype(x.dtype())?;
        if is_dropped {
            y = add(&y, &add(&self.base.forward(x)?, &scale(&whole, -1.0)?)?)?;
        }
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// `y m / n` for each output, where `n` is a constant.
fn scaled_by(y: &Tensor, magnitude: &Tensor, norms: &Tensor) -> Result<Tensor> {
    let factor = (magnitude.detach().to_dtype(norms.dtype())? / norms)?.to_dtype(y.dtype())?;
    let (result, norms) = (y.detach().broadcast_mul(&factor)?, norms.clone());
    explicit_op2("scale by magnitude", [y, magnitude], result, move |[y, magnitude], gradient| {
        let of_y = y.track_op().then(|| gradient.detach().broadcast_mul(&factor)).transpose()?;
        if !magnitude.track_op() {
            return Ok([of_y, None]);
        }
        let each = (gradient.detach() * y.detach())?.to_dtype(norms.dtype())?;
        let sums = each.reshape(((), norms.elem_count()))?.sum(0)?;
        Ok([of_y, Some((sums / &norms)?.to_dtype(magnitude.dtype())?)])
    })
}

/// Returns a weight times its magnitudes over the norms of its rows.
pub(super) fn merged(weight: &Tensor, magnitude: &Tensor) -> Result<Tensor> {
    let factor = (magnitude.to_dtype(weight.dtype())? / weight.sqr()?.sum(1)?.sqrt()?)?;
    weight.broadcast_mul(&factor.unsqueeze(1)?)
}
