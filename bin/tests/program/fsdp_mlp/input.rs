//! Wrong options: reported in one line each, before anything is done.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::Folder;
use crate::fsdp_mlp::{FSDP, SMALL};

#[test]
fn options_that_cannot_be_used_are_named() {
    let line = |arguments: &[&str]| FSDP.refuse(arguments);
    assert!(line(&["--sharding", "all"]).contains("full-shard"));
    assert!(line(&["--sharding", "hybrid-shard"]).contains("--shard-ranks"));
    assert!(line(&["--shard-ranks", "2"]).contains("it needs --sharding hybrid-shard"));
    let three = line(&["--sharding", "hybrid-shard", "--shard-ranks", "3"]);
    assert!(three.contains("--shard-ranks: got 3; the 4 ranks cannot be divided"), "{three}");
    assert!(line(&["--param-dtype", "f64"]).contains("bf16"));
    assert!(line(&["--steps", "0"]).contains("1 or more"));
    assert!(line(&["--hidden", "9999999999999"]).contains("more elements than can be counted"));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    let path = folder.argument("f.safetensors");
    let refuse = |option: &str, tensors: &[(&str, Tensor)]| {
        let tensors = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
        safetensors::save(&tensors, &path).unwrap();
        FSDP.refuse(&[&SMALL[..], &[option, &path]].concat())
    };
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let line = refuse("--init", &[("layer1.weight", zeros(&[50, 24], DType::F32))]);
    assert!(line.contains("has no tensor `layer1.bias` (F32 [50])"), "{line}");
    let line = refuse("--init", &[("layer1.weight", zeros(&[24, 50], DType::F32))]);
    assert!(line.contains("tensor `layer1.weight` is F32 [24, 50], expected F32 [50, 24]"), "{line}");
    let line = refuse("--data", &[("x", zeros(&[3, 24], DType::F32))]);
    assert!(line.contains("has no tensor `y` (I64 [3])"), "{line}");
    let ten = (Tensor::ones(3, DType::I64, &Device::Cpu).unwrap() * 10.0).unwrap();
    let line = refuse("--data", &[("x", zeros(&[3, 24], DType::F32)), ("y", ten)]);
    assert!(line.contains("number 0 is 10; the classes are 0 to 9"), "{line}");
    let nowhere = folder.argument("nowhere/w.safetensors");
    assert!(FSDP.refuse(&["--save", &nowhere]).contains("cannot write"));
    assert!(FSDP.refuse(&["--init", &nowhere]).contains("cannot read"));
}
