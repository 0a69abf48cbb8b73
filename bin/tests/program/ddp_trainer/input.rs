//! Wrong options and files: rejected before anything is done.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, losses};
use crate::ddp_trainer::TRAINER;

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

/// Returns the error for a file with these tensors.
fn refused(option: &str, tensors: &[(&str, Tensor)]) -> String {
    let folder = Folder::new();
    let tensors = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
    safetensors::save(&tensors, folder.path("file")).unwrap();
    TRAINER.refuse(&[option, &folder.argument("file")])
}

#[test]
fn options_that_cannot_be_used() {
    for option in ["--epochs", "--batch-size", "--samples", "--checkpoint-every"] {
        let line = TRAINER.refuse(&[option, "0", "--checkpoint-dir", "/nowhere"]);
        assert!(line.contains(option) && line.contains("1 or more"), "{line}");
    }
    assert!(TRAINER.refuse(&["--loss", "l1"]).contains("[possible values: mse, document]"));
    assert!(TRAINER.refuse(&["--samples", "99999999999999999"]).contains("got 99999999999999999; "));
    assert!(TRAINER.refuse(&["--samples", "5", "--data", "x"]).contains("--samples"));
    for option in ["--resume", "--checkpoint-every=3"] {
        assert!(TRAINER.refuse(&[option]).contains("--checkpoint-dir"));
    }
}

#[test]
fn files_that_do_not_fit() {
    let (x, y) = (zeros(&[8, 20], DType::F32), zeros(&[8, 1], DType::F32));
    let line = refused("--data", &[("x", zeros(&[8, 19], DType::F32)), ("y", y.clone())]);
    assert!(line.contains("`x` is F32 [8, 19], expected F32 [*, 20]"), "{line}");
    let line = refused("--data", &[("x", x.clone()), ("y", zeros(&[7, 1], DType::F32))]);
    assert!(line.contains("`y` is F32 [7, 1], expected F32 [8, 1]"), "{line}");
    let line = refused("--data", &[("x", zeros(&[0, 20], DType::F32)), ("y", y.clone())]);
    assert!(line.contains("it has no samples"), "{line}");
    let line = refused("--data", &[("x", x), ("y", y), ("z", zeros(&[1], DType::F32))]);
    assert!(line.contains("`z`"), "{line}");
    let line = refused("--init", &[("weight", zeros(&[1, 20], DType::F32))]);
    assert!(line.contains("has no tensor `bias` (F32 [1])"), "{line}");
}

#[test]
fn a_run_begins_with_given_weights_and_data() {
    let folder = Folder::new();
    let save = |name: &str, tensors: &[(&str, Tensor)]| {
        let tensors = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
        safetensors::save(&tensors, folder.path(name)).unwrap();
    };
    let ones = Tensor::ones((6, 20), DType::F32, &Device::Cpu).unwrap();
    save("data", &[("x", ones), ("y", zeros(&[6, 1], DType::F32))]);
    let weight = Tensor::full(0.5f32, (1, 20), &Device::Cpu).unwrap();
    save("init", &[("weight", weight), ("bias", Tensor::ones(1, DType::F32, &Device::Cpu).unwrap())]);
    let [data, init, lines] = ["data", "init", "m.jsonl"].map(|name| folder.argument(name));
    let files = ["--data", &data, "--init", &init, "--metrics", &lines];
    TRAINER.succeed(&[&["--epochs", "1", "--batch-size", "3"], &files[..]].concat());
    // The squared error of an output of 20 * 0.5 + 1 = 11 against 0; three samples on each of two ranks make one step.
    assert_eq!(losses(lines.as_ref()), [121.0]);
}
