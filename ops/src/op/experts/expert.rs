//! One expert: its weights, wide or in few bits, and the adapters beside them.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::Precision;
use crate::quantized::{QuantizedLinear, QuantizedPart, Side};

/// The weight of a layer of an expert, `(outputs, inputs)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ExpertWeight {
    /// In numbers.
    Wide(Tensor),
    /// Frozen, in 4 or 8 bits.
    Quantized(QuantizedPart),
}

/// An adapter of low rank (LoRA) of an expert's layer: `scale * b a` is added to the layer's weight.
#[derive(Debug, Clone)]
pub struct ExpertAdapter {
    /// `(rank, inputs)`.
    pub a: Tensor,
    /// `(outputs, rank)`.
    pub b: Tensor,
    /// Factor of their product.
    pub scale: f64,
}

/// One of [`Experts`](super::Experts): a gated feed-forward layer.
#[derive(Debug, Clone)]
pub struct Expert {
    /// The weight of the gate, `(intermediate, hidden)`.
    pub gate: ExpertWeight,
    /// The weight of what it multiplies, `(intermediate, hidden)`.
    pub up: ExpertWeight,
    /// The weight of the last layer, `(hidden, intermediate)`.
    pub down: ExpertWeight,
    /// An adapter of gate and up as one layer: the rows of its second matrix are those of the gate, then those of up.
    pub gate_up_adapter: Option<ExpertAdapter>,
    /// An adapter of the last layer.
    pub down_adapter: Option<ExpertAdapter>,
}

/// A tensor of an expert that may have a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Gate,
    Up,
    Down,
    GateUpA,
    GateUpB,
    DownA,
    DownB,
}

/// A weight that is ready to be multiplied.
#[derive(Debug, Clone)]
pub(super) enum Matrix {
    Wide(Tensor),
    Quantized(QuantizedLinear),
}

/// An adapter, and the rows of its second matrix that belong to a layer.
pub(super) struct Change<'a> {
    pub(super) adapter: &'a ExpertAdapter,
    pub(super) outputs: Range<usize>,
}

impl From<Tensor> for ExpertWeight {
    fn from(weight: Tensor) -> Self {
        Self::Wide(weight)
    }
}

impl ExpertWeight {
    /// The number of outputs and of inputs.
    pub(super) fn dims(&self) -> Result<[usize; 2]> {
        match self {
            Self::Wide(weight) => weight.dims2().map(|(outputs, inputs)| [outputs, inputs]),
            Self::Quantized(part) => part.dims().map(|(inputs, outputs)| [outputs, inputs]),
        }
    }

    /// The tensor, unless it is in few bits.
    pub(super) fn wide(&self) -> Option<&Tensor> {
        match self {
            Self::Wide(weight) => Some(weight),
            Self::Quantized(_) => None,
        }
    }

    /// Where a model is sharded, its bytes are there from now on.
    pub(super) fn ready(&self) -> Result<Matrix> {
        Ok(match self {
            Self::Wide(weight) => Matrix::Wide(weight.detach()),
            Self::Quantized(part) => Matrix::Quantized(part.layer()?),
        })
    }
}

impl Expert {
    /// An expert of these weights, without adapters.
    pub fn new([gate, up, down]: [ExpertWeight; 3]) -> Self {
        Self { gate, up, down, gate_up_adapter: None, down_adapter: None }
    }

    /// The same with contiguous tensors.
    pub(super) fn contiguous(&self) -> Result<Self> {
        let weight = |weight: &ExpertWeight| match weight {
            ExpertWeight::Wide(weight) => weight.contiguous().map(ExpertWeight::Wide),
            quantized => Ok(quantized.clone()),
        };
        let adapter = |adapter: &Option<ExpertAdapter>| match adapter {
            None => Ok(None),
            Some(ExpertAdapter { a, b, scale }) => {
                let (a, b, scale) = (a.contiguous()?, b.contiguous()?, *scale);
                Ok::<_, candle_core::Error>(Some(ExpertAdapter { a, b, scale }))
            }
        };
        Ok(Self {
            gate: weight(&self.gate)?,
            up: weight(&self.up)?,
            down: weight(&self.down)?,
            gate_up_adapter: adapter(&self.gate_up_adapter)?,
            down_adapter: adapter(&self.down_adapter)?,
        })
    }

    /// Its tensors that may have a gradient.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (Part, &Tensor)> {
        let [gate_up, down] = [&self.gate_up_adapter, &self.down_adapter].map(Option::as_ref);
        let all = [
            (Part::Gate, self.gate.wide()),
            (Part::Up, self.up.wide()),
            (Part::Down, self.down.wide()),
            (Part::GateUpA, gate_up.map(|adapter| &adapter.a)),
            (Part::GateUpB, gate_up.map(|adapter| &adapter.b)),
            (Part::DownA, down.map(|adapter| &adapter.a)),
            (Part::DownB, down.map(|adapter| &adapter.b)),
        ];
        all.into_iter().filter_map(|(part, tensor)| Some((part, tensor?)))
    }

    /// What an adapter changes of the gate, of up and of the last layer.
    pub(super) fn changes(&self, intermediate: usize) -> [Option<Change<'_>>; 3] {
        let change = |adapter, outputs| Change { adapter, outputs };
        let of_gate_up = |outputs| self.gate_up_adapter.as_ref().map(|adapter| change(adapter, outputs));
        let of_down = self.down_adapter.as_ref();
        [
            of_gate_up(0..intermediate),
            of_gate_up(intermediate..2 * intermediate),
            of_down.map(|adapter| change(adapter, 0..adapter.b.dims()[0])),
        ]
    }
}

impl Matrix {
    /// `x w'`, summed over inputs, or `x w`, over outputs; `x` is contiguous.
    pub(super) fn times(&self, x: &Tensor, side: Side, precision: Precision) -> Result<Tensor> {
        match (self, side) {
            (Self::Wide(weight), Side::Inputs) => product(x, &weight.t()?, precision),
            (Self::Wide(weight), Side::Outputs) => product(x, weight, precision),
            (Self::Quantized(layer), side) => layer.product(x, side, precision),
        }
    }
}

impl Change<'_> {
    fn b(&self) -> Result<Tensor> {
        self.adapter.b.detach().narrow(0, self.outputs.start, self.outputs.len())
    }

    /// `scale x a'`, in the adapter's dtype.
    pub(super) fn inner(&self, x: &Tensor, precision: Precision) -> Result<Tensor> {
        let a = self.adapter.a.detach();
        product(&x.to_dtype(a.dtype())?, &a.t()?, precision)?.affine(self.adapter.scale, 0.0)
    }

    /// `scale g b` of a gradient of the layer's output.
    pub(super) fn inner_gradient(&self, gradient: &Tensor, precision: Precision) -> Result<Tensor> {
        let b = self.b()?;
        product(&gradient.to_dtype(b.dtype())?, &b, precision)?.affine(self.adapter.scale, 0.0)
    }

    /// Adds to the layer's output, or in backward to the gradient of its input, what the adapter has of these rows.
    pub(super) fn add_to(&self, y: Tensor, x: &Tensor, side: Side, precision: Precision) -> Result<Tensor> {
        let change = match side {
            Side::Inputs => product(&self.inner(x, precision)?, &self.b()?.t()?, precision)?,
            Side::Outputs => {
                product(&self.inner_gradient(x, precision)?, &self.adapter.a.detach(), precision)?
            }
        };
        let dtype = y.dtype();
        y + change.to_dtype(dtype)?
    }
}

/// The product of two matrices, without a graph.
pub(super) fn product(a: &Tensor, b: &Tensor, precision: Precision) -> Result<Tensor> {
    match a.device().is_cpu() {
        true => precision.matmul(a, b),
        false => precision.product(a, b),
    }
}
