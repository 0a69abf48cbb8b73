//! Overlap: while a unit computes, the next unit's parameters are gathered and the last unit's gradients are reduced.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Comm, on_all_ranks, values};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use comm::Communicator;
use fsdp::{Fsdp, FsdpConfig, Result, Unit};

const LAYERS: usize = 4;
const WIDTH: usize = 6;
/// Timeout, which is generous even for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the communicator has completed this many operations. They must already be in progress, since this thread
/// starts none while it waits.
fn wait_for(comm: &dyn Communicator, operations: u64, what: &str) -> candle_core::Result<()> {
    let began = Instant::now();
    while comm.stats().operations < operations {
        if began.elapsed() > LIMIT {
            candle_core::bail!("{what}: {} operations, {operations} were expected", comm.stats().operations);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// The identity operation, which waits in backward.
struct Probe {
    comm: Comm,
    operations: u64,
}

impl CustomOp1 for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        wait_for(&*self.comm, self.operations, "backward")?;
        Ok(Some(grad.clone()))
    }
}

fn model(comm: Comm) -> Result<Fsdp<Vec<Unit<Linear>>>> {
    let start = (0..LAYERS as u64).flat_map(|index| {
        let weight = values(index, &[WIDTH, WIDTH], DType::F32);
        [(format!("{index}.weight"), weight), (format!("{index}.bias"), values(index, &[WIDTH], DType::F32))]
    });
    let vb = VarBuilder::from_tensors(start.collect(), DType::F32, &Device::Cpu);
    Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
        (0..LAYERS).map(|index| units.pp(index).unit(|vb| linear(WIDTH, WIDTH, vb))).collect()
    })
}

#[test]
fn the_next_unit_comes_and_the_last_ones_gradients_go_while_one_computes() {
    on_all_ranks(3, |comm| {
        let fsdp = model(comm.clone())?;
        for _ in 0..2 {
            let before = comm.stats().operations;
            let layers = fsdp.model()?;
            let mut x = values(1, &[2, WIDTH], DType::F32);
            for (index, layer) in layers.iter().enumerate() {
                x = layer.run(|layer| {
                    // This unit's gather, and the next one's.
                    wait_for(&*comm, before + (index + 2).min(LAYERS) as u64, "forward")?;
                    let probe =
                        Probe { comm: Arc::clone(&comm), operations: before + backward_operations(index) };
                    layer.forward(&x.apply_op1(probe)?)
                })?;
            }
            // The probes are at the inputs of the units: backward reaches each after its unit, when gradients of the later
            // units have been reduced.
            fsdp.backward(&x.sqr()?.sum_all()?)?;
        }
        Ok(())
    });
}

/// Number of operations completed when backward reaches the input of a unit: all gathers of forward; the gathers in backward
/// of this unit, those after it and the one before it; the reductions of this unit and those after it.
fn backward_operations(index: usize) -> u64 {
    let gathers = LAYERS - index + usize::from(index > 0);
    (LAYERS + gathers + LAYERS - index) as u64
}
