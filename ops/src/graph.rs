//! Activation memory: bytes that a graph holds for backward.

use std::collections::HashMap;

use candle_core::{CpuStorage, Storage, Tensor};

use crate::kept::kept_by;

/// Returns the bytes that the graph of a loss, or of another start of backward, holds for backward: each storage
/// once, without variables and without `parameters` (a model's working copies of variables), plus what operations
/// store themselves, as far as they report it with [`SavedBytes`](crate::SavedBytes), which those of these crates do.
///
/// # Cost
/// One walk over the graph.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::activation_bytes;
///
/// let x = Var::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
/// let squares = x.sqr()?;
/// // Three squares, of which a view is no second copy, and their sum.
/// assert_eq!(activation_bytes(&squares.reshape((3, 1))?.sum_all()?, []), 4 * (3 + 1));
/// // Nor is one of a variable.
/// assert_eq!(activation_bytes(&x.narrow(0, 0, 2)?.sum_all()?, []), 4);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn activation_bytes<'a>(loss: &Tensor, parameters: impl IntoIterator<Item = &'a Tensor>) -> usize {
    // A storage's address identifies it as long as a tensor holds it.
    let place = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    let nodes = loss.sorted_nodes();
    let (variables, nodes): (Vec<&Tensor>, Vec<&Tensor>) =
        nodes.into_iter().partition(|node| node.is_variable());
    let mut seen: HashMap<usize, usize> = parameters.into_iter().map(|tensor| (place(tensor), 0)).collect();
    // A view of a variable has no storage of its own either.
    seen.extend(variables.into_iter().map(|variable| (place(variable), 0)));
    let mut inside = 0;
    for node in nodes {
        inside += kept_by(node);
        seen.entry(place(node)).or_insert_with(|| storage_bytes(node));
    }
    inside + seen.into_values().sum::<usize>()
}

/// Bytes of the tensor's whole storage, of which it may be a view.
fn storage_bytes(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    let elements = match &*storage {
        Storage::Cpu(CpuStorage::F64(all)) => all.len(),
        Storage::Cpu(CpuStorage::F32(all)) => all.len(),
        Storage::Cpu(CpuStorage::F16(all)) => all.len(),
        Storage::Cpu(CpuStorage::BF16(all)) => all.len(),
        _ => tensor.elem_count(),
    };
    elements * tensor.dtype().size_in_bytes()
}
