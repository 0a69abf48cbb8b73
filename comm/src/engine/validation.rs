//! Argument checks that one rank can make alone, before anything is sent.

use candle_core::Tensor;

use crate::algorithm::schedule::Parts;
use crate::base::buffer::staging;
use crate::base::fingerprint;
use crate::engine::overlap::{Span, first_overlap};
use crate::{Error, Message, Operation, ReduceOp, Result};

/// The rule of operations with an input and an output.
const SAME_DTYPE: &str = "input and output must have the same dtype";

impl Operation {
    /// Checks what one rank can check alone.
    pub(crate) fn validate(&self, rank: usize, world_size: usize) -> Result<()> {
        for tensor in self.tensors() {
            self.check_tensor(tensor)?;
        }
        self.check_call(rank, world_size)?;
        self.check_overlaps(rank)
    }

    fn check_call(&self, rank: usize, world_size: usize) -> Result<()> {
        match self {
            Operation::AllReduce { tensor, op } => self.check_reduce(tensor, *op),
            Operation::Reduce { tensor, op, root } => {
                self.check_rank(*root, world_size)?;
                self.check_reduce(tensor, *op)
            }
            Operation::Broadcast { root, .. } => self.check_rank(*root, world_size),
            Operation::AllGather { output, input, counts } => {
                self.check_parts("output", output, "input", input, counts.as_deref(), rank, world_size)
            }
            Operation::ReduceScatter { output, input, op, counts } => {
                let counts = counts.as_deref();
                self.check_parts("input", input, "output", output, counts, rank, world_size)?;
                self.check_reduce(input, *op)
            }
            Operation::Gather { output: whole, input: part, root, counts }
            | Operation::Scatter { output: part, input: whole, root, counts } => {
                self.check_rank(*root, world_size)?;
                self.check_root(whole.is_some(), rank == *root)?;
                self.check_rooted(whole.as_ref(), part, counts.as_deref(), rank, world_size)
            }
            Operation::AllToAll { output, input, output_counts, input_counts } => {
                self.check_dtypes(output, input, SAME_DTYPE)?;
                let output = self.parts("output", output, output_counts.as_deref(), world_size)?;
                let input = self.parts("input", input, input_counts.as_deref(), world_size)?;
                let (expected, got) = (input.of(rank).len(), output.of(rank).len());
                let what = "the part of `output` that comes from this rank itself";
                if expected == got { Ok(()) } else { Err(self.wrong_count(what, expected, got)) }
            }
            Operation::Barrier => Ok(()),
            Operation::AllReduceCoalesced { tensors, op } => tensors.iter().try_for_each(|tensor| {
                self.check_dtypes(&tensors[0], tensor, "all tensors must have the same dtype")?;
                self.check_reduce(tensor, *op)
            }),
            Operation::BroadcastCoalesced { root, .. } => self.check_rank(*root, world_size),
            Operation::Send { to: peer, .. } | Operation::Recv { from: peer, .. } => {
                self.check_peer(*peer, rank, world_size)
            }
            Operation::Batch { messages } => {
                messages.iter().try_for_each(|message| self.check_peer(message.peer(), rank, world_size))
            }
        }
    }

    fn check_tensor(&self, tensor: &Tensor) -> Result<()> {
        let operation = || self.name().to_string();
        if !fingerprint::supports(tensor.dtype()) {
            let help = "use f64, f32, f16, bf16, u8, u32 or i64".into();
            return Err(Error::UnsupportedDtype { operation: operation(), dtype: tensor.dtype(), help });
        }
        if !staging::is_supported(tensor.device()) {
            return Err(Error::invalid(
                operation(),
                "a tensor of a device whose tensors are not exchanged",
                "move it with `to_device(&Device::Cpu)`",
            ));
        }
        if !tensor.is_contiguous() {
            let got = format!("a tensor of shape {:?} with strides {:?}", tensor.dims(), tensor.stride());
            return Err(Error::invalid(
                operation(),
                got,
                "it must be contiguous: `contiguous()` gives a copy, which will do for a tensor that is only read; one that is \
                 written must be contiguous where it is kept",
            ));
        }
        Ok(())
    }

    /// Checks that a written tensor overlaps others only where the operation allows it: elsewhere, elements would be
    /// overwritten before they are read.
    fn check_overlaps(&self, rank: usize) -> Result<()> {
        match self {
            Operation::AllGather { output, input, counts }
            | Operation::Gather { output: Some(output), input, counts, .. } => {
                self.check_in_place("output", output, "input", input, counts.as_deref(), rank)
            }
            Operation::ReduceScatter { output, input, counts, .. }
            | Operation::Scatter { output, input: Some(input), counts, .. } => {
                self.check_in_place("input", input, "output", output, counts.as_deref(), rank)
            }
            Operation::AllToAll { output, input, .. } if Span::of(output).overlaps(&Span::of(input)) => {
                let got = "an output that overlaps the input";
                Err(Error::invalid(self.name(), got, "it is not done in place: give an output of its own"))
            }
            Operation::AllReduceCoalesced { tensors, .. } => self
                .check_no_overlap(tensors.iter().map(|tensor| (tensor, true)), "each would be reduced twice"),
            Operation::Batch { messages } => {
                let written = |message: &Message| matches!(message, Message::Recv { .. });
                let tensors = messages.iter().map(|message| (message.tensor(), written(message)));
                self.check_no_overlap(tensors, "what is received would take the place of something else")
            }
            _ => Ok(()),
        }
    }

    /// Checks that a rank's part, if it overlaps the whole, is exactly this rank's range of it.
    fn check_in_place(
        &self,
        whole_name: &str,
        whole: &Tensor,
        part_name: &str,
        part: &Tensor,
        counts: Option<&[usize]>,
        rank: usize,
    ) -> Result<()> {
        let len = part.elem_count();
        let first = counts.map_or(rank * len, |counts| counts[..rank].iter().sum());
        let (whole, part) = (Span::of(whole), Span::of(part));
        if !part.overlaps(&whole) || part.elements.start == whole.elements.start + first {
            return Ok(());
        }
        let got = format!("an {part_name} that overlaps the {whole_name} elsewhere than at this rank's part");
        let end = first + len;
        let help = format!("give a tensor of its own, or the elements {first}..{end} of the {whole_name}");
        Err(Error::invalid(self.name(), got, help))
    }

    fn check_no_overlap<'a>(
        &self,
        tensors: impl Iterator<Item = (&'a Tensor, bool)>,
        why: &str,
    ) -> Result<()> {
        let Some((one, other)) = first_overlap(tensors) else { return Ok(()) };
        let got = format!("tensors {one} and {other} (counted from 0), which overlap");
        Err(Error::invalid(self.name(), got, format!("{why}: give tensors of their own")))
    }

    fn check_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        if op == ReduceOp::Avg && !tensor.dtype().is_float() {
            let (operation, dtype) = (self.name().into(), tensor.dtype());
            let help = "an average of integers is not defined: use ReduceOp::Sum".into();
            return Err(Error::UnsupportedDtype { operation, dtype, help });
        }
        Ok(())
    }

    fn check_rank(&self, rank: usize, world_size: usize) -> Result<()> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { operation: self.name().into(), rank, world_size });
        }
        Ok(())
    }

    fn check_peer(&self, peer: usize, rank: usize, world_size: usize) -> Result<()> {
        self.check_rank(peer, world_size)?;
        if peer == rank {
            let help = "a rank cannot exchange messages with itself";
            return Err(Error::invalid(self.name(), format!("rank {peer}"), help));
        }
        Ok(())
    }

    fn check_root(&self, has_whole: bool, is_root: bool) -> Result<()> {
        let got = match (has_whole, is_root) {
            (true, false) => "a tensor for all ranks on a rank that is not the root",
            (false, true) => "no tensor for all ranks on the root",
            _ => return Ok(()),
        };
        Err(Error::invalid(self.name(), got, "give it on the root, and only there"))
    }

    /// Checks gather and scatter, where only the root has the whole.
    fn check_rooted(
        &self,
        whole: Option<&Tensor>,
        part: &Tensor,
        counts: Option<&[usize]>,
        rank: usize,
        world_size: usize,
    ) -> Result<()> {
        let [whole_name, part_name] = match self {
            Operation::Gather { .. } => ["output", "input"],
            _ => ["input", "output"],
        };
        match (whole, counts) {
            (Some(whole), _) => {
                self.check_parts(whole_name, whole, part_name, part, counts, rank, world_size)
            }
            (None, Some(counts)) => {
                self.check_counts(counts, world_size)?;
                self.check_elements(part_name, part, counts[rank])
            }
            (None, None) => Ok(()),
        }
    }

    fn check_parts(
        &self,
        whole_name: &'static str,
        whole: &Tensor,
        part_name: &'static str,
        part: &Tensor,
        counts: Option<&[usize]>,
        rank: usize,
        world_size: usize,
    ) -> Result<()> {
        self.check_dtypes(whole, part, SAME_DTYPE)?;
        match counts {
            None => self.check_elements(whole_name, whole, part.elem_count() * world_size),
            Some(counts) => {
                self.parts(whole_name, whole, Some(counts), world_size)?;
                self.check_elements(part_name, part, counts[rank])
            }
        }
    }

    fn check_dtypes(&self, a: &Tensor, b: &Tensor, rule: &str) -> Result<()> {
        if a.dtype() != b.dtype() {
            let got = format!("{:?} and {:?}", a.dtype(), b.dtype());
            return Err(Error::invalid(self.name(), got, rule));
        }
        Ok(())
    }

    fn check_counts(&self, counts: &[usize], world_size: usize) -> Result<usize> {
        if counts.len() != world_size {
            let help = format!("give one for each of the {world_size} ranks");
            return Err(Error::invalid(self.name(), format!("{} counts", counts.len()), help));
        }
        let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        sum.ok_or_else(|| {
            Error::invalid(self.name(), "counts too large to be added", "give numbers of elements")
        })
    }

    /// Returns how a tensor is divided among the ranks.
    fn parts(
        &self,
        name: &'static str,
        tensor: &Tensor,
        counts: Option<&[usize]>,
        world_size: usize,
    ) -> Result<Parts> {
        let len = tensor.elem_count();
        match counts {
            Some(counts) => {
                let sum = self.check_counts(counts, world_size)?;
                self.check_elements(name, tensor, sum)?;
                Ok(Parts::uneven(counts))
            }
            None if len.is_multiple_of(world_size) => Ok(Parts::even(len, world_size)),
            None => {
                let got = format!("{name} of {len} elements");
                let help = format!("give a multiple of the {world_size} ranks, or counts");
                Err(Error::invalid(self.name(), got, help))
            }
        }
    }

    fn check_elements(&self, what: &'static str, tensor: &Tensor, expected: usize) -> Result<()> {
        let got = tensor.elem_count();
        if expected == got { Ok(()) } else { Err(self.wrong_count(what, expected, got)) }
    }

    fn wrong_count(&self, what: &'static str, expected: usize, got: usize) -> Error {
        Error::ElementCount { operation: self.name().into(), what, expected, got }
    }
}
