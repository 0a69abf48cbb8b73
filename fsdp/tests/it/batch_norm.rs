//! Buffers (state that is not a parameter) in checkpoints and files: rank 0's are saved.

use std::collections::HashMap;
use std::path::Path;

use crate::common::{Comm, full_state, full_tensors, numbers, on_all_ranks, values};
use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, Linear, ModuleT, VarBuilder, VarMap, batch_norm, linear};
use fsdp::{DistributedModel, Fsdp, FsdpConfig, MixedPrecision, Result, Unit};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

const NAMES: [&str; 6] =
    ["fc.bias", "fc.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"];

struct Net {
    fc: Unit<Linear>,
    norm: Unit<BatchNorm>,
}

impl ModuleT for Net {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.norm.forward_t(&candle_nn::Module::forward(&self.fc, x)?, train)
    }
}

fn net(comm: Comm) -> Result<Fsdp<Net>> {
    net_with(comm, &FsdpConfig::default())
}

fn net_with(comm: Comm, config: &FsdpConfig) -> Result<Fsdp<Net>> {
    let start = HashMap::from(
        [("fc.weight", vec![4, 3]), ("fc.bias", vec![4]), ("norm.weight", vec![4]), ("norm.bias", vec![4])]
            .map(|(name, dims)| (name.to_string(), values(name.len() as u64, &dims, DType::F64))),
    );
    let start = start.into_iter().chain(
        ["norm.running_mean", "norm.running_var"]
            .map(|name| (name.to_string(), Tensor::ones(4, DType::F64, &Device::Cpu).expect("on the CPU"))),
    );
    let vb = VarBuilder::from_tensors(start.collect(), DType::F64, &Device::Cpu);
    Fsdp::new(comm, vb, config, |units| {
        Ok(Net {
            fc: units.pp("fc").unit(|vb| linear(3, 4, vb))?,
            norm: units.pp("norm").unit(|vb| batch_norm(4, 1e-5, vb))?,
        })
    })
}

/// Returns a model that has different statistics on every rank.
fn used(comm: Comm) -> Result<Fsdp<Net>> {
    let (rank, net) = (comm.rank() as u64, net(comm)?);
    net.forward_t(&values(rank + 1, &[5, 3], DType::F64), true)?;
    Ok(net)
}

#[test]
fn buffers_have_a_dtype_of_their_own_and_files_may_have_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let kept = on_all_ranks(2, |comm| {
        let net = used(comm)?;
        net.save_full(&path)?;
        net.save_checkpoint(&checkpoints(folder.path()), None, &Checkpoint::default())?;
        Ok(statistics(&net))
    });
    let contents = checkpoints(folder.path()).latest().expect("whole").expect("there");
    for dtype in [DType::F16, DType::BF16] {
        for whole in [false, true] {
            let read = on_all_ranks(2, |comm| {
                // The layer computes statistics in f32, and the builder's dtype is f64.
                let mixed_precision =
                    MixedPrecision { param_dtype: Some(dtype), ..MixedPrecision::default() };
                let config = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
                let x = values(1, &[5, 3], DType::F64);
                assert!(net_with(comm.clone(), &config)?.forward_t(&x, true).is_err());
                let config = FsdpConfig { buffer_dtype: Some(DType::F32), ..config };
                let mut net = net_with(comm, &config)?;
                net.forward_t(&x, true)?;
                match whole {
                    true => net.load_full(&path)?,
                    false => drop(net.load_checkpoint(&contents, None)?),
                }
                assert!(net.buffers().iter().all(|(_, var)| var.dtype() == DType::F32));
                Ok(statistics(&net))
            });
            for read in read {
                crate::common::assert_close(&read, &kept[0], 1e-6);
            }
        }
    }
}

fn statistics(net: &Fsdp<Net>) -> Vec<f64> {
    numbers(net.buffers().iter().map(|(_, var)| var.as_tensor()))
}

fn checkpoints(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.to_path_buf(), ..CheckpointConfig::default() })
        .expect("a folder")
}

fn sorted_names(all: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut names: Vec<_> = all.into_iter().collect();
    names.sort();
    names
}

#[test]
fn checkpoints_have_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let kept = on_all_ranks(3, |comm| {
        let net = used(comm)?;
        net.save_checkpoint(&checkpoints(folder.path()), None, &Checkpoint::default())?;
        Ok(statistics(&net))
    });
    assert_ne!(kept[0], kept[1]);
    let contents = checkpoints(folder.path()).latest().expect("whole").expect("there");
    for ranks in 1..=4 {
        let read = on_all_ranks(ranks, |comm| {
            let mut net = net(comm)?;
            net.load_checkpoint(&contents, None)?;
            Ok(statistics(&net))
        });
        assert!(read.iter().all(|read| *read == kept[0]), "{read:?}");
    }
    let full = full_tensors(&contents).expect("readable");
    assert_eq!(sorted_names(full.iter().map(|(name, _)| name.clone())), NAMES);
    let of =
        |name: &str| full.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor).expect("there");
    assert_eq!(numbers([of("norm.running_mean"), of("norm.running_var")]), kept[0]);
}

#[test]
fn whole_files_have_them_and_serve_a_model_that_is_not_sharded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let evaluated = on_all_ranks(2, |comm| {
        let net = used(comm)?;
        net.save_full(&path)?;
        Ok((numbers([&net.forward_t(&values(9, &[2, 3], DType::F64), false)?]), statistics(&net)))
    });
    let mut map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let fc = linear(3, 4, vb.pp("fc")).expect("built");
    let norm = batch_norm(4, 1e-5, vb.pp("norm")).expect("built");
    map.load(&path).expect("all that the model has");
    let x = candle_nn::Module::forward(&fc, &values(9, &[2, 3], DType::F64)).expect("forward");
    assert_eq!(numbers([&norm.forward_t(&x, false).expect("forward")]), evaluated[0].0);
    for ranks in 1..=3 {
        let read = on_all_ranks(ranks, |comm| {
            let net = net(comm)?;
            net.load_full(&path)?;
            Ok(statistics(&net))
        });
        assert!(read.iter().all(|read| *read == evaluated[0].1), "{read:?}");
    }
}

/// Loads a file on two ranks; returns the buffers of rank 0, or its error.
fn load(path: &Path, tensors: &HashMap<String, Tensor>) -> std::result::Result<Vec<f64>, String> {
    candle_core::safetensors::save(tensors, path).expect("written");
    let ends = on_all_ranks(2, |comm| {
        let net = net(comm)?;
        Ok(net.load_full(path).map(|()| statistics(&net)).map_err(|error| error.to_string()))
    });
    assert_eq!(ends[0].is_ok(), ends[1].is_ok());
    ends[0].clone()
}

#[test]
fn files_of_pytorch_fit_with_and_without_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    on_all_ranks(1, |comm| used(comm)?.save_full(&path));
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).expect("read");
    let expected = numbers([&tensors["norm.running_mean"], &tensors["norm.running_var"]]);
    // As `torch.nn.BatchNorm1d` saves it.
    let batches = Tensor::new(7i64, &Device::Cpu).expect("on the CPU");
    tensors.insert("norm.num_batches_tracked".into(), batches);
    assert_eq!(load(&path, &tensors), Ok(expected));
    let mut more = tensors.clone();
    more.insert("more".into(), values(1, &[2], DType::F64));
    let line = load(&path, &more).expect_err("refused");
    assert!(line.contains("has a tensor `more` (F64 [2]) that the model has not"), "{line}");
    more.remove("more");
    more.insert("norm.running_mean".into(), values(1, &[5], DType::F64));
    let line = load(&path, &more).expect_err("refused");
    assert!(line.contains("tensor `norm.running_mean` is F64 [5], expected F64 [4]"), "{line}");
    tensors.retain(|name, _| !name.starts_with("norm.running"));
    assert_eq!(load(&path, &tensors), Ok(vec![1.0; 8]), "as they were");
}

/// A table of indices is a buffer of the dtype that the model asks for, whichever that of the builder is.
#[test]
fn tables_of_indices_keep_their_dtype() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let config = FsdpConfig {
        buffers: vec!["ids".into()],
        buffer_dtype: Some(DType::F64),
        mixed_precision: MixedPrecision { param_dtype: Some(DType::BF16), ..MixedPrecision::default() },
        ..FsdpConfig::default()
    };
    for unchecked in [false, true] {
        let found = on_all_ranks(2, |comm| {
            let is_first = comm.rank() == 0;
            let start = [
                ("ids".to_string(), Tensor::new(&[2i64, 0, 2], &Device::Cpu)?),
                ("w".to_string(), Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?),
            ];
            let vb = VarBuilder::from_tensors(start.into(), DType::F32, &Device::Cpu);
            let net = Fsdp::new(comm, vb, &config, |units| {
                units.unit(|vb| {
                    let ids = match unchecked {
                        true => vb.get_unchecked_dtype("ids", DType::I64)?,
                        false => vb.get_with_hints_dtype(3, "ids", Default::default(), DType::I64)?,
                    };
                    Ok((vb.get((3, 2), "w")?, ids))
                })
            })?;
            assert_eq!(net.buffers()[0].1.dtype(), DType::I64);
            let rows: &Unit<(Tensor, Tensor)> = net.model()?;
            let picked = numbers([&rows.run(|(w, ids)| w.index_select(ids, 0))?]);
            net.save_full(&path)?;
            let (mut visited, all) = (Vec::new(), full_state(&net)?);
            net.visit_full(|name, tensor| {
                visited.push((name.to_string(), tensor.dtype()));
                Ok(())
            })?;
            let expected = [("w".to_string(), DType::F32), ("ids".to_string(), DType::I64)];
            assert_eq!(visited, expected[..if is_first { 2 } else { 0 }]);
            let all: Vec<_> = all.into_iter().map(|(name, tensor)| (name, tensor.dtype())).collect();
            assert_eq!(all, visited);
            net.buffers()[0].1.set(&Tensor::new(&[0i64, 0, 0], &Device::Cpu)?)?;
            net.load_full(&path)?;
            Ok((picked, net.buffers()[0].1.to_vec1::<i64>()?))
        });
        assert_eq!(found, vec![(vec![5.0, 6.0, 1.0, 2.0, 5.0, 6.0], vec![2, 0, 2]); 2]);
    }
}
