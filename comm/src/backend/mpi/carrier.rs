//! MPI carrier: operations as MPI calls on copies of the tensors. MPI may continue to write after a rank has given up a
//! call, and must not write into memory that the program sees.

use std::ffi::c_int;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::backend::traffic;
use crate::base::buffer::element::divide_bytes;
use crate::base::buffer::staging::Before;
use crate::base::buffer::storage;
use crate::transport::carrier::{Carrier, Pump};
use crate::{Error, Message, Operation, ReduceOp, Result};

use super::handle::MpiHandle;
use super::pending_call::{Buffer, MpiCall, PartBounds, PendingCall};

/// Most buffers kept for reuse.
const SPARE: usize = 4;
/// Most elements of one call; longer tensors take several calls, except in operations with one part for each rank.
const MOST: usize = 1 << 30;

pub(super) struct MpiCarrier {
    comm: Arc<MpiHandle>,
    rank: usize,
    world_size: usize,
    pending: Vec<(PendingCall, CallOutput)>,
    spare: Vec<Buffer>,
    bytes: (u64, u64),
}

/// Where the output of a call is stored.
struct CallOutput {
    /// The tensors it fills, one after the other, each with the range of its elements.
    tensors: Vec<(Tensor, std::ops::Range<usize>)>,
    /// The dtype of the output: f32 for tensors of f16 and bf16 that were reduced.
    dtype: DType,
    /// What to divide the output by: the world size, for means.
    divide: Option<usize>,
}

impl Carrier for MpiCarrier {
    fn takes(&self, operation: &Operation) -> bool {
        operation.tensors().iter().all(|tensor| tensor.device().is_cpu())
    }

    fn begin(&mut self, operation: &Operation, before: &Before) -> Result<()> {
        before.wait()?;
        let (sent, received) = traffic::operation_bytes(operation, self.rank, self.world_size);
        self.bytes = (self.bytes.0 + sent, self.bytes.1 + received);
        match operation {
            Operation::AllReduce { tensor, op } => self.all_reduce(std::slice::from_ref(tensor), *op),
            Operation::AllReduceCoalesced { tensors, op } => self.all_reduce(tensors, *op),
            Operation::Reduce { tensor, op, root } => self.reduce(tensor, *op, *root),
            Operation::Broadcast { tensor, root } => self.broadcast(tensor, *root),
            Operation::BroadcastCoalesced { tensors, root } => {
                tensors.iter().try_for_each(|tensor| self.broadcast(tensor, *root))
            }
            Operation::Send { tensor, to } => self.send(tensor, *to),
            Operation::Recv { tensor, from } => self.receive(tensor, *from),
            Operation::Batch { messages } => messages.iter().try_for_each(|message| match message {
                Message::Send { tensor, to } => self.send(tensor, *to),
                Message::Recv { tensor, from } => self.receive(tensor, *from),
            }),
            // The agreement on the call was already a barrier.
            Operation::Barrier => Ok(()),
            _ => self.divided(operation),
        }
    }

    fn poll(&mut self) -> Result<bool> {
        let mut index = 0;
        while index < self.pending.len() {
            if self.pending[index].0.test()? {
                let (call, destination) = self.pending.swap_remove(index);
                self.store_output(call, destination)?;
            } else {
                index += 1;
            }
        }
        Ok(self.pending.is_empty())
    }

    fn abandon(&mut self) {
        self.pending.clear();
    }

    fn pump(&self) -> Option<Pump> {
        let comm = self.comm.clone();
        Some(Box::new(move || comm.pump()))
    }

    fn bytes(&self) -> (u64, u64) {
        self.bytes
    }
}

impl MpiCarrier {
    pub(super) fn new(comm: Arc<MpiHandle>, rank: usize, world_size: usize) -> Self {
        Self { comm, rank, world_size, pending: Vec::new(), spare: Vec::new(), bytes: (0, 0) }
    }

    /// Reduces the elements of all tensors as one sequence.
    fn all_reduce(&mut self, tensors: &[Tensor], op: ReduceOp) -> Result<()> {
        let Some(dtype) = tensors.first().map(|tensor| widened(tensor.dtype())) else { return Ok(()) };
        let divide = (op == ReduceOp::Avg).then_some(self.world_size);
        for tensors in shares(tensors) {
            let count = elements(&tensors);
            let input = self.load(&tensors, dtype)?;
            let output = self.buffer(count * dtype.size_in_bytes());
            let call = MpiCall::AllReduce { op, count: count as c_int };
            self.start(dtype, call, input, output, CallOutput { tensors, dtype, divide })?;
        }
        Ok(())
    }

    fn reduce(&mut self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<()> {
        let dtype = widened(tensor.dtype());
        let divide = (op == ReduceOp::Avg).then_some(self.world_size);
        for tensors in shares(std::slice::from_ref(tensor)) {
            let count = elements(&tensors);
            let input = self.load(&tensors, dtype)?;
            let output = self.buffer(count * dtype.size_in_bytes());
            let call = MpiCall::Reduce { op, count: count as c_int, root: root as c_int };
            let tensors = if self.rank == root { tensors } else { Vec::new() };
            self.start(dtype, call, input, output, CallOutput { tensors, dtype, divide })?;
        }
        Ok(())
    }

    fn broadcast(&mut self, tensor: &Tensor, root: usize) -> Result<()> {
        let dtype = tensor.dtype();
        for tensors in shares(std::slice::from_ref(tensor)) {
            let count = elements(&tensors);
            let own = self.rank == root;
            let output = match own {
                true => self.load(&tensors, dtype)?,
                false => self.buffer(count * dtype.size_in_bytes()),
            };
            let call = MpiCall::Broadcast { count: count as c_int, root: root as c_int };
            let tensors = if own { Vec::new() } else { tensors };
            self.start(dtype, call, Buffer::new(), output, CallOutput { tensors, dtype, divide: None })?;
        }
        Ok(())
    }

    fn send(&mut self, tensor: &Tensor, to: usize) -> Result<()> {
        let dtype = tensor.dtype();
        for tensors in shares(std::slice::from_ref(tensor)) {
            let call = MpiCall::Send { count: elements(&tensors) as c_int, to: to as c_int };
            let input = self.load(&tensors, dtype)?;
            let destination = CallOutput { tensors: Vec::new(), dtype, divide: None };
            self.start(dtype, call, input, Buffer::new(), destination)?;
        }
        Ok(())
    }

    fn receive(&mut self, tensor: &Tensor, from: usize) -> Result<()> {
        let dtype = tensor.dtype();
        for tensors in shares(std::slice::from_ref(tensor)) {
            let count = elements(&tensors);
            let call = MpiCall::Receive { count: count as c_int, from: from as c_int };
            let output = self.buffer(count * dtype.size_in_bytes());
            self.start(dtype, call, Buffer::new(), output, CallOutput { tensors, dtype, divide: None })?;
        }
        Ok(())
    }

    /// Starts an operation on parts of tensors, one part for each rank.
    fn divided(&mut self, operation: &Operation) -> Result<()> {
        let name = operation.name();
        let parts = |counts: &Option<Vec<usize>>, whole: usize| match counts {
            Some(counts) => parts(name, counts),
            None => parts(name, &vec![whole / self.world_size; self.world_size]),
        };
        let root_of = |root: &usize| *root as c_int;
        let count = |tensor: &Tensor| c_int::try_from(tensor.elem_count()).map_err(|_| too_many(name));
        let (call, input, output) = match operation {
            Operation::AllGather { output, input, counts } => {
                let counts = parts(counts, output.elem_count())?;
                (MpiCall::AllGather { count: count(input)?, counts }, Some(input), Some(output))
            }
            Operation::ReduceScatter { output, input, op, counts } => {
                let counts = parts(counts, input.elem_count())?;
                (MpiCall::ReduceScatter { op: *op, counts }, Some(input), Some(output))
            }
            Operation::Gather { output, input, root, counts } => {
                let counts = parts(counts, input.elem_count() * self.world_size)?;
                let call = MpiCall::Gather { count: count(input)?, counts, root: root_of(root) };
                (call, Some(input), output.as_ref())
            }
            Operation::Scatter { output, input, root, counts } => {
                let counts = parts(counts, output.elem_count() * self.world_size)?;
                let call = MpiCall::Scatter { count: count(output)?, counts, root: root_of(root) };
                (call, input.as_ref(), Some(output))
            }
            Operation::AllToAll { output, input, output_counts, input_counts } => {
                let outgoing = parts(input_counts, input.elem_count())?;
                let incoming = parts(output_counts, output.elem_count())?;
                (MpiCall::AllToAll { outgoing, incoming }, Some(input), Some(output))
            }
            // All other operations are handled in `begin`.
            _ => return Ok(()),
        };
        let op = if let Operation::ReduceScatter { op, .. } = operation { Some(*op) } else { None };
        let Some(kind) = input.or(output).map(Tensor::dtype) else { return Ok(()) };
        let dtype = if op.is_some() { widened(kind) } else { kind };
        let whole = |tensor: &Tensor| vec![(tensor.clone(), 0..tensor.elem_count())];
        let loaded = input.map_or(Ok(Buffer::new()), |tensor| self.load(&whole(tensor), dtype))?;
        let room = self.buffer(output.map_or(0, Tensor::elem_count) * dtype.size_in_bytes());
        let divide = (op == Some(ReduceOp::Avg)).then_some(self.world_size);
        let destination = CallOutput { tensors: output.map_or(Vec::new(), whole), dtype, divide };
        self.start(dtype, call, loaded, room, destination)
    }

    fn start(
        &mut self,
        dtype: DType,
        call: MpiCall,
        input: Buffer,
        output: Buffer,
        destination: CallOutput,
    ) -> Result<()> {
        self.pending.push((PendingCall::start(&self.comm, dtype, call, input, output)?, destination));
        Ok(())
    }

    fn store_output(&mut self, call: PendingCall, destination: CallOutput) -> Result<()> {
        let Some((input, mut output)) = call.take_buffers() else { return Ok(()) };
        let CallOutput { tensors, dtype, divide } = destination;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut output);
        let mut at = 0;
        for (tensor, range) in &tensors {
            let end = at + range.len() * dtype.size_in_bytes();
            let part = &mut bytes[at..end];
            if let Some(by) = divide {
                divide_bytes(dtype, by, part);
            }
            store(tensor, range.clone(), dtype, part)?;
            at = end;
        }
        self.spare.extend([input, output].into_iter().filter(|buffer| buffer.capacity() > 0));
        let surplus = self.spare.len().saturating_sub(SPARE);
        self.spare.drain(..surplus);
        Ok(())
    }

    /// Returns a buffer for this many bytes.
    fn buffer(&mut self, bytes: usize) -> Buffer {
        let words = bytes.div_ceil(size_of::<u64>());
        let fits = self.spare.iter().position(|spare| (words..=2 * words + 512).contains(&spare.capacity()));
        let mut buffer = fits.map(|index| self.spare.swap_remove(index)).unwrap_or_default();
        buffer.resize(words, 0);
        buffer
    }

    /// Returns a copy of the elements, converted to `dtype`.
    fn load(&mut self, tensors: &[(Tensor, std::ops::Range<usize>)], dtype: DType) -> Result<Buffer> {
        let mut buffer = self.buffer(elements(tensors) * dtype.size_in_bytes());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        let mut at = 0;
        for (tensor, range) in tensors.iter().filter(|(_, range)| !range.is_empty()) {
            let (own, end) = (tensor.dtype(), at + range.len() * dtype.size_in_bytes());
            let (size, part) = (own.size_in_bytes(), &mut bytes[at..end]);
            storage::read(tensor, range.start * size..range.end * size, |found| {
                if own == dtype {
                    part.copy_from_slice(found);
                } else {
                    storage::widen(own, found, bytemuck::cast_slice_mut(part));
                }
            })?;
            at = end;
        }
        Ok(buffer)
    }
}

/// Writes elements into a tensor, converted from `dtype`.
fn store(tensor: &Tensor, range: std::ops::Range<usize>, dtype: DType, bytes: &[u8]) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let (own, size) = (tensor.dtype(), tensor.dtype().size_in_bytes());
    storage::write(tensor, range.start * size..range.end * size, |place| {
        if own == dtype {
            place.copy_from_slice(bytes);
        } else {
            storage::narrow(own, bytemuck::cast_slice(bytes), place);
        }
    })
}

/// Returns the dtype to reduce in: f32 for f16 and bf16.
fn widened(dtype: DType) -> DType {
    if storage::is_half(dtype) { DType::F32 } else { dtype }
}

type Share = Vec<(Tensor, std::ops::Range<usize>)>;

fn elements(tensors: &[(Tensor, std::ops::Range<usize>)]) -> usize {
    tensors.iter().map(|(_, range)| range.len()).sum()
}

/// Divides the elements of tensors into shares that each fit into one call.
fn shares(tensors: &[Tensor]) -> Vec<Share> {
    let (mut shares, mut room) = (vec![Share::new()], MOST);
    for tensor in tensors {
        let (mut at, len) = (0, tensor.elem_count());
        while at < len {
            if room == 0 {
                shares.push(Share::new());
                room = MOST;
            }
            let taken = room.min(len - at);
            if let Some(share) = shares.last_mut() {
                share.push((tensor.clone(), at..at + taken));
            }
            (at, room) = (at + taken, room - taken);
        }
    }
    shares.retain(|share| !share.is_empty());
    shares
}

fn parts(name: &str, counts: &[usize]) -> Result<PartBounds> {
    let total: usize = counts.iter().sum();
    if c_int::try_from(total).is_err() {
        return Err(too_many(name));
    }
    let mut next = 0;
    let start = |count: &usize| {
        next += count;
        (next - count) as c_int
    };
    let starts = counts.iter().map(start).collect();
    Ok(PartBounds { counts: counts.iter().map(|count| *count as c_int).collect(), starts })
}

fn too_many(name: &str) -> Error {
    let got = format!("more than {} elements", c_int::MAX);
    Error::invalid(name, got, "MPI counts no further: divide the tensor")
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn parts_lie_one_after_the_other() {
        let parts = parts("gather", &[2, 0, 3]).unwrap();
        assert_eq!((parts.counts, parts.starts), (vec![2, 0, 3], vec![0, 2, 2]));
        let message = super::parts("gather", &[1 << 31]).unwrap_err().to_string();
        assert!(message.contains("gather: got more than 2147483647 elements"), "{message}");
    }

    #[test]
    fn empty_tensors_take_no_call() {
        let tensor = |len: usize| Tensor::zeros(len, DType::U8, &Device::Cpu).unwrap();
        assert!(shares(&[]).is_empty() && shares(&[tensor(0)]).is_empty());
        let shares = shares(&[tensor(2), tensor(0), tensor(3)]);
        assert_eq!((shares.len(), elements(&shares[0])), (1, 5));
    }
}
