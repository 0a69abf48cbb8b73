//! A node of candle's graph that communicates.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, Shape, Storage, Tensor};

use crate::engine::lock;
use crate::{Communicator, Error, Result};

/// `output`, which was computed from `x` outside of the graph and is used nowhere else, as if candle had computed it.
pub(super) fn differentiable(
    name: &'static str,
    x: &Tensor,
    output: Tensor,
    comm: &Arc<dyn Communicator>,
    backward: impl Fn(&Tensor, &dyn Communicator) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let backward = Box::new(backward);
    let node = Node { name, output: Mutex::new(Some(output)), comm: comm.clone(), backward };
    Ok(x.apply_op1(node)?)
}

type Backward = dyn Fn(&Tensor, &dyn Communicator) -> Result<Tensor> + Send + Sync;

struct Node {
    name: &'static str,
    output: Mutex<Option<Tensor>>,
    comm: Arc<dyn Communicator>,
    backward: Box<Backward>,
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let output = lock(&self.output).take();
        let output = output.ok_or_else(|| Error::system(self.name, "its result was taken before"))?;
        let shape = output.shape().clone();
        Ok((into_storage(output)?, shape))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let output = lock(&self.output).take();
        let output = output.ok_or_else(|| Error::system(self.name, "its result was taken before"))?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            _ => Err(Error::system(self.name, "its result is on another device").into()),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some((self.backward)(grad, &*self.comm)?))
    }
}

/// The elements of a contiguous tensor that is used nowhere else, without a copy where it is the whole of its storage.
fn into_storage(tensor: Tensor) -> candle_core::Result<CpuStorage> {
    if tensor.elem_count() == 0 {
        let (storage, _) = tensor.storage_and_layout();
        return match &*storage {
            Storage::Cpu(storage) => Ok(storage.clone()),
            _ => Err(Error::invalid("a tensor", "one that is not on the CPU", "move it there").into()),
        };
    }
    let take = Take(RefCell::new(None));
    tensor.inplace_op1(&take)?;
    take.0.into_inner().ok_or_else(|| Error::system("a tensor's storage", "it is gone").into())
}

struct Take(RefCell<Option<CpuStorage>>);

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        // Nobody looks at the tensor again, so that its storage may be shorter than it says.
        *self.0.borrow_mut() = Some(std::mem::replace(storage, CpuStorage::U8(Vec::new())));
        Ok(())
    }
}
