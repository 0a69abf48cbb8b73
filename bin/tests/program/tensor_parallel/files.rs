//! Weights saved in one layout are loaded in another.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, losses};
use crate::tensor_parallel::{MLP, SMALL_MLP, SMALL_TRANSFORMER, TRANSFORMER};

#[test]
fn weights_go_from_one_layout_to_another() {
    let folder = Folder::new();
    let (saved, again) = (folder.argument("a.safetensors"), folder.argument("b.safetensors"));
    TRANSFORMER.succeed(&[&SMALL_TRANSFORMER[..], &["--tp", "2", "--save", &saved]].concat());
    let mut found = vec![];
    for layout in [&["--tp", "1"][..], &["--tp", "4"], &["--tp", "2", "--dp", "1", "--sequence-parallel"]] {
        let lines = folder.argument("m.jsonl");
        let files = ["--init", &saved, "--metrics", &lines, "--save", &again, "--lr", "0"];
        TRANSFORMER.succeed(&[&SMALL_TRANSFORMER[..], layout, &files].concat());
        found.push(losses(lines.as_ref()));
        let (before, after) =
            [&saved, &again].map(|path| safetensors::load(path, &Device::Cpu).unwrap()).into();
        assert_eq!(before.len(), after.len());
        for (name, tensor) in &before {
            let all = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(all(tensor), all(&after[name]), "{name}: nothing was learnt");
        }
    }
    for other in &found[1..] {
        assert!(found[0].iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-5 * a.abs()), "{found:?}");
    }
}

#[test]
fn data_from_a_file() {
    let folder = Folder::new();
    let (data, lines) = (folder.argument("d.safetensors"), folder.argument("m.jsonl"));
    let x = Tensor::ones((8, 16), DType::F32, &Device::Cpu).unwrap();
    let save = |entries: &[(&str, &Tensor)]| {
        let entries = entries.iter().map(|(name, tensor)| (name.to_string(), (*tensor).clone()));
        safetensors::save(&entries.collect(), &data).unwrap();
    };
    save(&[("x", &x), ("y", &x)]);
    let options =
        ["--hidden-size", "16", "--data", &data, "--metrics", &lines, "--epochs", "60", "--lr", "0.01"];
    MLP.succeed(&options);
    assert!(losses(lines.as_ref()).last().unwrap() < &1e-2);
    save(&[("x", &x), ("y", &x.narrow(0, 0, 4).unwrap())]);
    assert!(MLP.refuse(&options).contains("tensor `y` is F32 [4, 16], expected F32 [8, 16]"));
    save(&[("tokens", &Tensor::new(&[[1i64, 32, 0]], &Device::Cpu).unwrap())]);
    let line = TRANSFORMER.refuse(&["--vocab-size", "32", "--data", &data]);
    assert!(line.contains("row 0 has token 32; with --vocab-size 32 there are 0 to 31"), "{line}");
}

#[test]
fn weights_that_do_not_fit() {
    let folder = Folder::new();
    let path = folder.argument("w.safetensors");
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let good =
        [("fc1.weight", &[64, 16][..]), ("fc1.bias", &[64]), ("fc2.weight", &[16, 64]), ("fc2.bias", &[16])];
    for (change, part) in [
        (("fc2.weight", Some(&[64, 16][..])), "tensor `fc2.weight` is F32 [64, 16], expected F32 [16, 64]"),
        (
            ("fc1.bias", None),
            "has no tensor `fc1.bias` (F32 [64]); it holds fc1.weight, fc2.bias, fc2.weight",
        ),
        (("fc3.bias", Some(&[1])), "has a tensor `fc3.bias` (F32 [1]) that the model has not"),
    ] {
        let mut tensors: std::collections::HashMap<String, Tensor> =
            good.iter().map(|(name, dims)| (name.to_string(), zeros(dims))).collect();
        tensors.remove(change.0);
        tensors.extend(change.1.map(|dims| (change.0.to_string(), zeros(dims))));
        safetensors::save(&tensors, &path).unwrap();
        let line = MLP.refuse(&[&SMALL_MLP[..], &["--init", &path]].concat());
        assert!(line.contains(&path) && line.contains(part), "{line}");
    }
    std::fs::write(&path, "no tensors").unwrap();
    let line = TRANSFORMER.refuse(&["--init", &path]);
    assert!(line.starts_with(&format!("error: {path} is not a whole safetensors file: ")), "{line}");
    let line = TRANSFORMER.refuse(&["--init", "no/such.safetensors"]);
    assert!(line.starts_with("error: cannot read no/such.safetensors: "), "{line}");
}
