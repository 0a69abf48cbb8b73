//! Weights of pipeline stages: building a rank's stages from the seed or a file, and gathering the whole model.

use std::sync::PoisonError;

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use comm::{Communicator, Operation, all_gather_object};
use experiment::error::Result;
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

/// Source of the initial weights.
pub(super) enum Weights {
    /// Generated from this seed.
    Seed(u64),
    /// Those of `--init`, for the whole model.
    Given(VarMap),
}

impl Weights {
    /// Returns a function that makes a builder for a stage, with a variable map of its own.
    pub(super) fn builder(&self, device: &Device) -> Box<dyn Fn(&VarMap) -> VarBuilder<'static>> {
        let device = device.clone();
        match self {
            Self::Seed(seed) => {
                let generator = SharedGenerator::from(Generator::new(*seed));
                Box::new(move |map| TorchInit::var_builder(&generator, map, DType::F32, &device))
            }
            Self::Given(all) => {
                let all = all.clone();
                Box::new(move |map| {
                    let backend = GivenWeightsBackend { all: all.clone(), stage: map.clone() };
                    VarBuilder::from_backend(Box::new(backend), DType::F32, device.clone())
                })
            }
        }
    }
}

/// Copies the requested variables of the whole model to a stage.
struct GivenWeightsBackend {
    all: VarMap,
    stage: VarMap,
}

impl SimpleBackend for GivenWeightsBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        match *tensor.shape() == shape {
            true => Ok(tensor),
            false => candle_core::bail!("{name} is of shape {:?}, expected {shape:?}", tensor.shape()),
        }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let all = self.all.data().lock().unwrap_or_else(PoisonError::into_inner);
        let Some(var) = all.get(name) else { candle_core::bail!("there is no variable {name}") };
        let mut stage = self.stage.data().lock().unwrap_or_else(PoisonError::into_inner);
        stage.insert(name.to_string(), var.clone());
        Ok(var.as_tensor().clone())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.all.data().lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }
}

/// Gathers the whole model on rank 0 from the ranks that hold parts of it on their devices; returns `None` on the
/// others. Every rank must call it.
pub(super) fn gather(
    comm: &dyn Communicator,
    vars: &[(String, Var)],
    device: &Device,
) -> Result<Option<VarMap>> {
    let own: Vec<(String, Vec<usize>)> =
        vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
    let all = all_gather_object(comm, &own)?;
    if comm.rank() > 0 {
        for (_, var) in vars {
            comm.run(Operation::Send { tensor: var.as_detached_tensor().contiguous()?, to: 0 })?;
        }
        return Ok(None);
    }
    let whole = VarMap::new();
    for (rank, held) in all.into_iter().enumerate() {
        for (index, (name, dims)) in held.into_iter().enumerate() {
            let var = match rank {
                0 => vars[index].1.clone(),
                from => {
                    // Received on the device, as it is sent from one; then moved to the CPU, as the whole model need
                    // not fit on the device.
                    let tensor = Tensor::zeros(dims, DType::F32, device)?;
                    comm.run(Operation::Recv { tensor: tensor.clone(), from })?;
                    Var::from_tensor(&tensor.to_device(&Device::Cpu)?)?
                }
            };
            whole.data().lock().unwrap_or_else(PoisonError::into_inner).insert(name, var);
        }
    }
    Ok(Some(whole))
}
