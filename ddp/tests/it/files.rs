//! The whole model is written to a file, shown, and read from one.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, Init, Linear, VarBuilder, VarMap, batch_norm, linear};
use ddp::{Ddp, DdpConfig, DistributedModel, Error, Result};

use crate::common::{Comm, on_all_ranks};

const FEATURES: usize = 3;
/// Sorted.
const NAMES: [&str; 6] =
    ["fc.bias", "fc.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"];

/// A model all of whose numbers are `number`.
fn model(comm: Comm, number: f64) -> Result<Ddp<(Linear, BatchNorm)>> {
    let variables = VarMap::new();
    for name in NAMES {
        let dims: &[usize] = if name == "fc.weight" { &[FEATURES, FEATURES] } else { &[FEATURES] };
        variables.get(dims, name, Init::Const(number), DType::F32, &Device::Cpu)?;
    }
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    Ddp::new(comm, vb, &DdpConfig::default(), |vb| {
        Ok((linear(FEATURES, FEATURES, vb.pp("fc"))?, batch_norm(FEATURES, 1e-5, vb.pp("norm"))?))
    })
}

/// Name, shape and the first number of everything in the model, sorted by name, on every rank.
fn held(ddp: &Ddp<(Linear, BatchNorm)>) -> Vec<(String, Vec<usize>, f32)> {
    let all = ddp.named_vars().into_iter().chain(ddp.buffers().iter().cloned());
    let first = |var: &Tensor| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
    let mut all: Vec<_> = all.map(|(name, var)| (name, var.dims().to_vec(), first(&var))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn save(path: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let ones = |name: &&str| {
        let dims: &[usize] = if **name == *"fc.weight" { &[FEATURES, FEATURES] } else { &[FEATURES] };
        (name.to_string(), Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap())
    };
    let mut tensors = NAMES.iter().map(ones).collect();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, path).unwrap();
}

#[test]
fn what_is_saved_is_read_by_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    on_all_ranks(3, |comm| model(comm, 7.0)?.save_full(&path));
    for held in on_all_ranks(2, |comm| {
        let ddp = model(comm, 1.0)?;
        ddp.load_full(&path)?;
        Ok(held(&ddp))
    }) {
        assert_eq!(held.iter().map(|(name, ..)| &**name).collect::<Vec<_>>(), NAMES);
        assert!(held.iter().all(|(.., number)| *number == 7.0), "{held:?}");
    }
}

#[test]
fn everything_is_shown_on_the_first_rank() {
    let shown = on_all_ranks(2, |comm| {
        let (ddp, mut shown) = (model(comm, 7.0)?, Vec::new());
        ddp.visit_full(|name, tensor| {
            shown.push((
                name.to_string(),
                tensor.dims().to_vec(),
                tensor.flatten_all()?.to_vec1::<f32>()?[0],
            ));
            Ok(())
        })?;
        shown.sort_by(|a, b| a.0.cmp(&b.0));
        Ok((shown, held(&ddp)))
    });
    assert_eq!(shown[0].0, shown[0].1);
    assert!(shown[1].0.is_empty());
    let refused = on_all_ranks(2, |comm| {
        let seen = model(comm, 7.0)?.visit_full(|name, _| Err(candle_core::Error::Msg(format!("no {name}"))));
        Ok(seen.unwrap_err())
    });
    assert!(refused[0].to_string().contains("no fc.weight"), "{refused:?}");
    assert!(
        matches!(&refused[1], Error::Strategy(strategy::Error::PeerFailed { rank: 0, .. })),
        "{refused:?}"
    );
}

#[test]
fn buffers_may_be_missing_and_counters_of_batches_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    save(&path, |tensors| {
        tensors.remove("norm.running_mean");
        let count = Tensor::new(5i64, &Device::Cpu).unwrap();
        tensors.insert("norm.num_batches_tracked".into(), count);
    });
    for held in on_all_ranks(2, |comm| {
        let ddp = model(comm, 7.0)?;
        ddp.load_full(&path)?;
        Ok(held(&ddp))
    }) {
        let of = |name: &str| if name == "norm.running_mean" { 7.0 } else { 1.0 };
        assert!(held.iter().all(|(name, _, number)| *number == of(name)), "{held:?}");
    }
}

#[test]
fn a_file_that_does_not_fit_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let other = |dtype| Tensor::ones((FEATURES, 1), dtype, &Device::Cpu).unwrap();
    let cases: [(&str, Option<Tensor>, &str); 4] = [
        ("fc.bias", None, "has no tensor `fc.bias` (F32 [3])"),
        ("fc.bias", Some(other(DType::F32)), "tensor `fc.bias` is F32 [3, 1], expected F32 [3]"),
        (
            "norm.running_var",
            Some(other(DType::F32)),
            "tensor `norm.running_var` is F32 [3, 1], expected F32 [3]",
        ),
        ("more", Some(other(DType::F64)), "has a tensor `more` (F64 [3, 1])"),
    ];
    for (name, tensor, expected) in cases {
        save(&path, |tensors| {
            tensors.remove(name);
            tensors.extend(tensor.map(|tensor| (name.to_string(), tensor)));
        });
        for (message, held) in on_all_ranks(2, |comm| {
            let ddp = model(comm, 7.0)?;
            Ok((ddp.load_full(&path).unwrap_err().to_string(), held(&ddp)))
        }) {
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
            assert!(held.iter().all(|(.., number)| *number == 7.0), "{held:?}");
        }
    }
}

#[test]
fn a_rank_without_the_file_stops_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    save(&path, |_| ());
    let found = on_all_ranks(2, |comm| {
        let own = if comm.rank() == 0 { path.clone() } else { folder.path().join("missing") };
        let ddp = model(comm, 7.0)?;
        Ok((ddp.load_full(own).unwrap_err(), held(&ddp)))
    });
    assert!(
        matches!(&found[0].0, Error::Strategy(strategy::Error::PeerFailed { rank: 1, reason }) if reason.contains("cannot read ")),
        "{found:?}"
    );
    assert!(found[1].0.to_string().starts_with("cannot read "), "{found:?}");
    assert!(found.iter().flat_map(|(_, held)| held).all(|(.., number)| *number == 7.0), "{found:?}");
}
