//! Broadcast of named tensors, such as a model's or an optimizer's state.

use std::str::FromStr;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Communicator, Operation, Result, broadcast_object};

/// Name, dtype and shape of a tensor, for ranks that do not have it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Outline {
    name: String,
    dtype: String,
    dims: Vec<usize>,
}

/// Returns, on every rank, the tensors of rank `root` with their names, in its order. The others need not know names
/// and shapes, and what they pass is ignored. On the root the results are its own tensors, elsewhere new ones on the
/// CPU. Nothing is changed in place, so that after a failure in the middle every rank still has its old tensors.
///
/// # Cost
/// Two broadcasts of names and shapes, and one for each tensor.
///
/// # Errors
/// Those of [`Communicator::run`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use comm::{Communicator, Local};
///
/// let names = Local::run(3, |comm| {
///     let own = match comm.rank() {
///         1 => vec![("weight".to_string(), Tensor::new(&[1f32, 2.0], &Device::Cpu)?)],
///         _ => vec![],
///     };
///     let tensors = comm::broadcast_tensors(comm, own, 1)?;
///     Ok((tensors[0].0.clone(), tensors[0].1.to_vec1::<f32>()?))
/// })?;
/// assert_eq!(names, vec![("weight".to_string(), vec![1.0, 2.0]); 3]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn broadcast_tensors(
    comm: &dyn Communicator,
    own: Vec<(String, Tensor)>,
    root: usize,
) -> Result<Vec<(String, Tensor)>> {
    let outline = |(name, tensor): &(String, Tensor)| Outline {
        name: name.clone(),
        dtype: tensor.dtype().as_str().to_string(),
        dims: tensor.dims().to_vec(),
    };
    let is_root = comm.rank() == root;
    let own = if is_root { own } else { Vec::new() };
    let outlines: Vec<Outline> = broadcast_object(comm, &own.iter().map(outline).collect::<Vec<_>>(), root)?;
    let mut own = own.into_iter();
    let mut tensors = Vec::with_capacity(outlines.len());
    for Outline { name, dtype, dims } in outlines {
        let tensor = match own.next() {
            Some((_, tensor)) => tensor,
            None => {
                Tensor::zeros(dims, DType::from_str(&dtype).map_err(candle_core::Error::msg)?, &Device::Cpu)?
            }
        };
        if tensor.elem_count() > 0 {
            // From the CPU, since all others receive it there: CUDA tensors may be moved by another transport than CPU
            // tensors.
            let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
            comm.run(Operation::Broadcast { tensor, root })?;
        }
        tensors.push((name, tensor));
    }
    Ok(tensors)
}
