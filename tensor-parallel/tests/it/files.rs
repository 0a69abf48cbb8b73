//! Weights are read in parts, and written as a whole.

use std::path::{Path, PathBuf};

use crate::common::{Dense, bits, on_mesh, sizes, try_on_mesh, values, whole};
use candle_core::{DType, Device, Tensor, safetensors};
use tensor_parallel::{
    DistributedModel, LanguageModel, LanguageModelConfig, ParallelMlp, TensorParallel, TensorParallelConfig,
    Weights,
};

/// Writes a file of the dense model.
fn dense_file(folder: &Path, dtype: DType) -> PathBuf {
    let path = folder.join("dense.safetensors");
    let model = Dense::new(&sizes(), 5, dtype);
    safetensors::save(&model.values().into_iter().collect(), &path).unwrap();
    path
}

fn config(dtype: DType) -> TensorParallelConfig {
    TensorParallelConfig { dtype, ..TensorParallelConfig::default() }
}

fn model(builder: tensor_parallel::ShardBuilder) -> tensor_parallel::Result<LanguageModel> {
    LanguageModel::new(builder, &sizes())
}

/// Asserts that names, shapes and bits of this rank's parts are equal.
fn assert_same(one: &TensorParallel<LanguageModel>, other: &TensorParallel<LanguageModel>) {
    for ((name, part, _), (other, same, _)) in values(one).iter().zip(&values(other)) {
        assert_eq!((name, part.dims(), bits(part)), (other, same.dims(), bits(same)));
    }
}

#[test]
fn a_file_gives_the_parts_that_the_seed_gives() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let path = dense_file(folder.path(), dtype);
        for tp in [1, 2, 4] {
            on_mesh(1, tp, |mesh| {
                let drawn = TensorParallel::new(mesh, &config(dtype), &Weights::seed(5), model)?;
                let read = TensorParallel::new(mesh, &config(dtype), &Weights::File(path.clone()), model)?;
                assert_same(&drawn, &read);
                Ok(())
            });
        }
    }
}

#[test]
fn a_model_that_is_built_reads_its_parts_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let path = dense_file(folder.path(), dtype);
        for (dp, tp) in [(1, 1), (2, 2), (1, 4)] {
            on_mesh(dp, tp, |mesh| {
                let built = TensorParallel::new(mesh, &config(dtype), &Weights::seed(6), model)?;
                built.load_full(&path)?;
                let read = TensorParallel::new(mesh, &config(dtype), &Weights::File(path.clone()), model)?;
                assert_same(&built, &read);
                Ok(())
            });
        }
    }
}

#[test]
fn a_file_that_does_not_fit_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = dense_file(folder.path(), DType::F32);
    let mut tensors = safetensors::load(&path, &Device::Cpu).unwrap();
    tensors.remove("norm.weight");
    let less = folder.path().join("less.safetensors");
    safetensors::save(&tensors, &less).unwrap();
    let found = on_mesh(1, 2, |mesh| {
        let built = TensorParallel::new(mesh, &config(DType::F32), &Weights::seed(6), model)?;
        let numbers = || values(&built).iter().map(|(_, part, _)| bits(part)).collect::<Vec<_>>();
        let before = numbers();
        // Rank 1 alone has a file that lacks a tensor.
        let own = if mesh.axis("tp")?.rank() == 1 { &less } else { &path };
        let error = built.load_full(own).unwrap_err().to_string();
        assert_eq!(numbers(), before);
        Ok(error)
    });
    assert!(
        found[0].starts_with("rank 1 failed: ") && found[0].contains("no tensor `norm.weight`"),
        "{found:?}"
    );
    assert!(found[1].contains("no tensor `norm.weight`"), "{found:?}");
}

#[test]
fn what_is_saved_is_the_dense_models_file() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::F16] {
        let expected = Dense::new(&sizes(), 5, dtype).values();
        for (dp, tp) in [(1, 1), (1, 2), (2, 2), (1, 4)] {
            let path = folder.path().join("saved.safetensors");
            on_mesh(dp, tp, |mesh| {
                TensorParallel::new(mesh, &config(dtype), &Weights::seed(5), model)?.save_full(&path)
            });
            let saved = safetensors::load(&path, &Device::Cpu).unwrap();
            assert_eq!(saved.len(), expected.len());
            for (name, tensor) in &expected {
                assert_eq!((saved[name].dtype(), saved[name].dims()), (dtype, tensor.dims()), "{name}");
                assert_eq!(bits(&saved[name]), bits(tensor), "{name}, {dp} x {tp}");
            }
            let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
            assert_eq!(names.len(), 1, "nothing is left beside it");
        }
    }
}

/// Weights divided by rows and by columns.
#[test]
fn large_weights_are_put_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mlp.safetensors");
    let make = |builder| ParallelMlp::new(700, 1212, &builder);
    let parts = on_mesh(1, 2, |mesh| {
        let parallel = TensorParallel::new(mesh, &config(DType::F32), &Weights::seed(5), make)?;
        parallel.save_full(&path)?;
        Ok(values(&parallel))
    });
    let saved = safetensors::load(&path, &Device::Cpu).unwrap();
    for (name, tensor) in whole(&parts) {
        assert!(bits(&saved[&name]) == bits(&tensor), "{name}");
    }
}

/// Returns the error messages of all ranks.
fn messages(weights: &Weights) -> Vec<String> {
    let build = |mesh: &comm::Mesh| {
        let built = TensorParallel::new(mesh, &config(DType::F32), weights, model);
        Ok(built.unwrap_err().to_string())
    };
    try_on_mesh(1, 2, build).unwrap()
}

#[test]
fn a_file_that_does_not_fit_is_one_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let good: std::collections::HashMap<String, Tensor> =
        Dense::new(&sizes(), 5, DType::F32).values().into_iter().collect();
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let weights = Weights::File(path.clone());
    let expect = |change: &dyn Fn(&mut std::collections::HashMap<String, Tensor>), part: &str| {
        let mut tensors = good.clone();
        change(&mut tensors);
        safetensors::save(&tensors, &path).unwrap();
        for message in messages(&weights) {
            assert!(message.starts_with(&path.display().to_string()) && message.contains(part), "{message}");
            assert_eq!(message.lines().count(), 1);
            // The same error is found without ranks.
            assert_eq!(weights.check(&config(DType::F32), model).unwrap_err().to_string(), message);
        }
    };
    expect(&|t| drop(t.remove("layers.1.norm2.bias")), "has no tensor `layers.1.norm2.bias` (F32 [16])");
    let other = |dims: &'static [usize], dtype| {
        move |t: &mut std::collections::HashMap<String, Tensor>| {
            t.insert("head.weight".into(), zeros(dims, dtype));
        }
    };
    let expected = "expected F32 [24, 16]";
    expect(&other(&[16, 24], DType::F32), &format!("tensor `head.weight` is F32 [16, 24], {expected}"));
    expect(&other(&[12, 16], DType::F32), &format!("tensor `head.weight` is F32 [12, 16], {expected}"));
    expect(&other(&[24, 16], DType::F64), &format!("tensor `head.weight` is F64 [24, 16], {expected}"));
    expect(
        &|t| drop(t.insert("extra".into(), zeros(&[1], DType::F32))),
        "a tensor `extra` (F32 [1]) that the model",
    );
    // The offset of its tensors' end does not fit into 64 bits.
    let endless = include_bytes!("../../../fuzz/seeds/tensor-file/beyond-64-bits");
    for damage in [&b""[..], b"1234567", &[255; 64], b"\x08\0\0\0\0\0\0\0{\"a\":1}  ", endless] {
        std::fs::write(&path, damage).unwrap();
        for message in messages(&weights) {
            assert!(message.contains("is not a whole safetensors file: "), "{message}");
        }
    }
    safetensors::save(&good, &path).unwrap();
    weights.check(&config(DType::F32), model).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
    assert!(messages(&weights)[1].contains("and by its header"));
    std::fs::remove_file(&path).unwrap();
    assert!(messages(&weights).iter().all(|message| message.starts_with("cannot read ")));
}

#[test]
fn a_file_that_cannot_be_written_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/such/folder/w.safetensors");
    let small = LanguageModelConfig { num_layers: 1, ..sizes() };
    let found = on_mesh(2, 2, |mesh| {
        let model = |builder| LanguageModel::new(builder, &small);
        let parallel = TensorParallel::new(mesh, &config(DType::F32), &Weights::seed(5), model)?;
        Ok(parallel.save_full(&path).unwrap_err().to_string())
    });
    assert!(found[0].starts_with("cannot write "), "{found:?}");
    assert!(
        found[1..].iter().all(|message| message.starts_with("rank 0 failed: cannot write ")),
        "{found:?}"
    );
}

#[test]
fn a_visitor_that_fails_is_an_error_on_every_rank() {
    let small = LanguageModelConfig { num_layers: 1, ..sizes() };
    let found = on_mesh(2, 2, |mesh| {
        let model = |builder| LanguageModel::new(builder, &small);
        let parallel = TensorParallel::new(mesh, &config(DType::F32), &Weights::seed(5), model)?;
        let mut seen = 0;
        let visited = parallel.visit_full(|_, _| {
            seen += 1;
            Err(candle_core::Error::Msg("no room".into()))
        });
        let error = visited.unwrap_err();
        Ok((seen, error.is_peer_failure(), error.to_string()))
    });
    assert_eq!((found[0].0, found[0].1), (1, false));
    assert!(found[1..].iter().all(|(seen, is_peers, _)| *seen == 0 && *is_peers), "{found:?}");
    assert!(found.iter().all(|(.., message)| message.contains("no room")), "{found:?}");
}
