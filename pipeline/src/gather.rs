//! The whole model of a pipeline's stages.

use std::sync::PoisonError;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use comm::{Communicator, Operation, Result, all_gather_object};

/// Gathers the whole model on rank 0 from the ranks that hold parts of it on their devices; returns `None` on the
/// others. Every rank must call it.
///
/// # Errors
/// Failures of communication; more than the memory of a device.
pub fn gather(comm: &dyn Communicator, vars: &[(String, Var)], device: &Device) -> Result<Option<VarMap>> {
    let own: Vec<(String, Vec<usize>, String)> = vars
        .iter()
        .map(|(name, var)| (name.clone(), var.dims().to_vec(), var.dtype().as_str().to_string()))
        .collect();
    let all = all_gather_object(comm, &own)?;
    if comm.rank() > 0 {
        for (_, var) in vars {
            comm.run(Operation::Send { tensor: var.as_detached_tensor().contiguous()?, to: 0 })?;
        }
        return Ok(None);
    }
    let whole = VarMap::new();
    for (rank, held) in all.into_iter().enumerate() {
        for (index, (name, dims, dtype)) in held.into_iter().enumerate() {
            let var = match rank {
                0 => vars[index].1.clone(),
                from => {
                    let dtype = dtype.parse::<DType>().map_err(candle_core::Error::wrap)?;
                    // Received on the device, as it is sent from one; then moved to the CPU, as the whole model need
                    // not fit on the device.
                    let tensor = Tensor::zeros(dims, dtype, device)?;
                    comm.run(Operation::Recv { tensor: tensor.clone(), from })?;
                    Var::from_tensor(&tensor.to_device(&Device::Cpu)?)?
                }
            };
            whole.data().lock().unwrap_or_else(PoisonError::into_inner).insert(name, var);
        }
    }
    Ok(Some(whole))
}
