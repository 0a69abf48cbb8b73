//! Adapters of experts. Here each expert has its own, under its number; in peft's files those of all experts of a layer are one, as
//! their weights are one tensor in `transformers` 5.

use candle_core::{Result, Tensor, bail};

use crate::names::{ADAPTER, JOINED, OfExpert};
use crate::{Family, names};

/// A matrix of an expert's adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertMatrix<'a> {
    of: OfExpert<'a>,
    /// Index in [`JOINED`].
    weight: usize,
    /// Index in [`ADAPTER`].
    part: usize,
}

impl<'a> ExpertMatrix<'a> {
    /// Takes the name of an adapter's matrix apart; `None` if it is not an expert's.
    pub(crate) fn of(name: &'a str) -> Option<Self> {
        let of = OfExpert::of(name)?;
        let (weight, part) = of.rest.strip_suffix(".weight")?.split_once('.')?;
        let place = |all: [&str; 2], name: &str| all.iter().position(|known| *known == name);
        Some(Self { of, weight: place(JOINED, weight)?, part: place(ADAPTER, part)? })
    }

    /// The number of the expert.
    pub(crate) fn expert(&self) -> usize {
        self.of.expert
    }

    /// The name of the same matrix of another expert.
    pub(crate) fn of_expert(&self, expert: usize) -> String {
        self.of.with(expert, self.of.rest)
    }

    /// The name of the first matrix of the expert's other adapter.
    pub(crate) fn other(&self) -> String {
        self.of.with(self.of.expert, &format!("{}.{}.weight", JOINED[1 - self.weight], ADAPTER[0]))
    }

    /// The name in peft's file of that matrix of all experts. peft wraps the layer once for each weight with an adapter, gate and up
    /// first: with both (`has_both`) these are the inner ones.
    pub(crate) fn in_file(&self, has_both: bool) -> String {
        let wrapped = if has_both && self.weight == 0 { ".base_layer" } else { "" };
        format!("{}.experts{wrapped}.{}.weight", self.of.joined_layer(), ADAPTER[self.part])
    }

    /// The dimensions in peft's file.
    pub(crate) fn dims_in_file(&self, dims: &[usize], experts: usize) -> Vec<usize> {
        match (self.part, dims) {
            (0, [rank, inputs]) => vec![rank * experts, *inputs],
            (_, [outputs, rank]) => vec![*outputs, rank * experts],
            _ => dims.to_vec(),
        }
    }

    /// Joins the matrices of all experts: the first ones one below the other, and of the second ones the columns with the same number
    /// side by side.
    pub(crate) fn joined(&self, all: &[Tensor]) -> Result<Tensor> {
        match self.part {
            0 => Tensor::cat(all, 0),
            _ => Tensor::stack(all, 2)?.flatten_from(1),
        }
    }

    /// The inverse of [`joined`](Self::joined) for this expert.
    pub(crate) fn part_of(&self, joined: &Tensor, experts: usize) -> Result<Tensor> {
        let (rows, columns) = joined.dims2()?;
        let (along, expert) = (if self.part == 0 { rows } else { columns }, self.of.expert);
        if expert >= experts || !along.is_multiple_of(experts.max(1)) {
            bail!("adapters of {experts} experts cannot be {rows} x {columns}")
        }
        match self.part {
            0 => joined.narrow(0, expert * (rows / experts), rows / experts)?.force_contiguous(),
            _ => joined
                .reshape((rows, columns / experts, experts))?
                .narrow(2, expert, 1)?
                .squeeze(2)?
                .force_contiguous(),
        }
    }
}

/// An expert's weight, as its adapter has it: the name of the layer with the adapter, and which half of that layer's outputs the weight
/// is, if it is one.
pub(super) fn adapted(family: Family, weight: &str) -> Option<(String, Option<usize>)> {
    let of = OfExpert::of(weight)?;
    let names = names::of_experts(family);
    let layer = of.rest.strip_suffix(".weight")?;
    let place = [names.gate, names.up, names.down].iter().position(|known| *known == layer)?;
    let (joined, half) = if place < 2 { (JOINED[0], Some(place)) } else { (JOINED[1], None) };
    Some((of.with(of.expert, joined), half))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn matrices_are_joined_as_peft_takes_them_apart() -> Result<()> {
        let (experts, rank, inputs, outputs) = (3, 2, 4, 5);
        let name =
            |part: &str| format!("model.layers.1.block_sparse_moe.experts.2.gate_up_proj.{part}.weight");
        let [a, b] = ADAPTER.map(name);
        let [a, b] = [&a, &b].map(|name| ExpertMatrix::of(name).expect("an expert's matrix"));
        assert_eq!(a.in_file(true), "model.layers.1.mlp.experts.base_layer.lora_A.weight");
        assert_eq!(b.in_file(false), "model.layers.1.mlp.experts.lora_B.weight");
        let of =
            |rows, columns| (0..experts).map(move |_| Tensor::randn(0f32, 1., (rows, columns), &Device::Cpu));
        let (firsts, seconds): (Vec<_>, Vec<_>) =
            (of(rank, inputs).collect::<Result<_>>()?, of(outputs, rank).collect::<Result<_>>()?);
        let (joined_a, joined_b) = (a.joined(&firsts)?, b.joined(&seconds)?);
        assert_eq!(joined_a.dims(), a.dims_in_file(&[rank, inputs], experts));
        assert_eq!(joined_b.dims(), b.dims_in_file(&[outputs, rank], experts));
        // peft: `lora_A` as (experts, rank, inputs), and `lora_B` as (outputs, rank, experts).
        let peft_a = joined_a.reshape((experts, rank, inputs))?.get(2)?;
        let peft_b = joined_b.reshape((outputs, rank, experts))?.get_on_dim(2, 2)?;
        assert_eq!(peft_a.to_vec2::<f32>()?, firsts[2].to_vec2::<f32>()?);
        assert_eq!(peft_b.to_vec2::<f32>()?, seconds[2].to_vec2::<f32>()?);
        assert_eq!(a.part_of(&joined_a, experts)?.to_vec2::<f32>()?, firsts[2].to_vec2::<f32>()?);
        assert_eq!(b.part_of(&joined_b, experts)?.to_vec2::<f32>()?, seconds[2].to_vec2::<f32>()?);
        assert!(a.part_of(&joined_a, 4).is_err());
        for other in [
            "model.layers.1.mlp.experts.2.gate_proj.lora_A.weight",
            "model.layers.1.mlp.gate_up_proj.lora_A.weight",
        ] {
            assert_eq!(ExpertMatrix::of(other), None);
        }
        Ok(())
    }
}
