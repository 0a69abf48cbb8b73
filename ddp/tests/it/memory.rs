//! Checks what the documentation of `Ddp` states about memory.

use crate::common::{INPUTS, Mlp, on_all_ranks, values};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use ddp::{Ddp, DdpConfig};

/// Returns the address of a tensor's storage, and its number of elements.
fn storage(tensor: &Tensor) -> (usize, usize) {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(data)) => (data.as_ptr().addr(), data.len()),
        _ => panic!("f32 on the CPU"),
    }
}

#[test]
fn one_copy_of_the_parameters_in_place() {
    on_all_ranks(2, |comm| {
        let ddp = Mlp::ddp(comm, DType::F32, &DdpConfig::default())?;
        let copies =
            || ddp.parameters().iter().map(|parameter| storage(parameter.tensor())).collect::<Vec<_>>();
        let before = copies();
        let elements: usize = ddp.vars().iter().map(|var| var.elem_count()).sum();
        assert_eq!(before.iter().map(|(_, len)| len).sum::<usize>(), elements);
        for var in ddp.vars() {
            var.set(&(var.as_tensor() * 2.0)?)?;
        }
        ddp.model()?;
        assert_eq!(copies(), before);
        Ok(())
    });
}

#[test]
fn gradients_exist_once() {
    let config = DdpConfig { bucket_bytes: 300, first_bucket_bytes: 100, ..Default::default() };
    for world_size in 1..=2 {
        on_all_ranks(world_size, |comm| {
            let ddp = Mlp::ddp(comm, DType::F32, &config)?;
            for _ in 0..2 {
                let loss = ddp.forward(&values(1, &[4, INPUTS], DType::F32))?.sqr()?.mean_all()?;
                ddp.backward_no_sync(&loss)?;
                let grads = ddp.backward(&loss)?;
                let mut buckets: Vec<(usize, usize)> =
                    ddp.vars().iter().filter_map(|var| grads.get(var)).map(storage).collect();
                buckets.sort_unstable();
                buckets.dedup();
                // Several ranks have buckets, with one additional element per parameter.
                match world_size {
                    1 => assert_eq!(buckets.len(), ddp.vars().len()),
                    _ => assert!(buckets.len() > 1 && buckets.len() < ddp.vars().len()),
                }
                let flag = usize::from(world_size > 1);
                let elements: usize = ddp.vars().iter().map(|var| var.elem_count() + flag).sum();
                assert_eq!(buckets.iter().map(|(_, len)| len).sum::<usize>(), elements);
                // There are no gradients of the model's copies.
                assert!(ddp.parameters().iter().all(|parameter| grads.get(parameter.tensor()).is_none()));
            }
            Ok(())
        });
    }
}

/// What a user does to one gradient must not change another.
#[test]
fn no_two_gradients_share_memory() {
    on_all_ranks(1, |comm| {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| Ok([vb.get(3, "a")?, vb.get(3, "b")?]))?;
        let [a, b] = ddp.model()?;
        // Both have the gradient of the sum.
        let grads = ddp.backward(&ops::mse(&ops::tape::add(a, b)?, &values(1, &[3], DType::F32))?)?;
        let addresses = ddp.vars().iter().filter_map(|var| grads.get(var)).map(storage).collect::<Vec<_>>();
        assert!(addresses.len() == 2 && addresses[0].0 != addresses[1].0);
        Ok(())
    });
}
