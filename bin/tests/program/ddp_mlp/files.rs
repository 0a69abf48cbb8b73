//! Data from files, and validation on any number of ranks.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, losses, text};
use crate::ddp_mlp::MLP;

fn save(folder: &Folder, tensors: &[(&str, Tensor)]) -> String {
    let path = folder.argument("data.safetensors");
    let tensors = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
    safetensors::save(&tensors, &path).unwrap();
    path
}

fn inputs(samples: usize) -> Tensor {
    let values = sampler::Generator::new(3).randn(samples * 10).unwrap();
    Tensor::from_vec(values, (samples, 10), &Device::Cpu).unwrap()
}

fn classes(samples: usize) -> Tensor {
    Tensor::from_vec((0..samples).map(|i| (i % 2) as i64).collect::<Vec<_>>(), samples, &Device::Cpu).unwrap()
}

#[test]
fn any_number_of_ranks_validates_as_one_does() {
    let folder = Folder::new();
    let (data, weights) = (save(&folder, &[("x", inputs(333)), ("y", classes(333))]), folder.argument("w"));
    MLP.succeed(&["--data", &data, "--epochs", "3", "--save", &weights]);
    // With a learning rate of 0, all runs validate the same model.
    let validation = |ranks: &str| {
        let arguments =
            ["--data", &data, "--init", &weights, "--lr", "0", "--epochs", "1", "--world-size", ranks];
        text(&MLP.succeed(&arguments).stdout).lines().last().unwrap().to_string()
    };
    let alone = validation("1");
    assert!(alone.ends_with(" of 333)"), "{alone}");
    for ranks in ["2", "3", "5"] {
        assert_eq!(validation(ranks), alone);
    }
}

#[test]
fn data_is_shared_out_and_validation_may_have_its_own() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let own = [("x", inputs(100)), ("y", classes(100)), ("val_x", inputs(7)), ("val_y", classes(7))];
    let output = MLP.succeed(&[
        "--data",
        &save(&folder, &own),
        "--epochs",
        "2",
        "--batch-size",
        "10",
        "--metrics",
        &lines,
    ]);
    assert_eq!(losses(lines.as_ref()).len(), 2 * 5);
    let printed = text(&output.stdout);
    assert_eq!(printed.lines().count(), 3, "one loss an epoch, and the validation: {printed}");
    assert!(printed.trim_end().ends_with(" of 7)"), "{printed}");
    let remarks = text(&output.stderr);
    assert!(remarks.starts_with("note: the PyTorch handbook") && remarks.lines().count() == 1, "{remarks}");
    assert!(remarks.contains("its validation loss is the sum of the batches' means"), "{remarks}");
}

#[test]
fn data_that_does_not_fit_is_refused() {
    let folder = Folder::new();
    let refused = |tensors: &[(&str, Tensor)]| MLP.refuse(&["--data", &save(&folder, tensors)]);
    assert!(refused(&[("x", inputs(4))]).contains("has no tensor `y` (I64 [4])"));
    let line = refused(&[("x", inputs(4)), ("y", classes(3))]);
    assert!(line.contains("`y` is I64 [3], expected I64 [4]"), "{line}");
    let two = (classes(4) * 2.0).unwrap();
    assert!(refused(&[("x", inputs(4)), ("y", two)]).contains("number 1 is 2; the classes are 0 to 1"));
    let line = refused(&[("x", inputs(4)), ("y", classes(4)), ("val_x", inputs(4))]);
    assert!(line.contains("has no tensor `val_y`"), "{line}");
    let empty = Tensor::zeros((0, 10), DType::F32, &Device::Cpu).unwrap();
    assert!(refused(&[("x", empty), ("y", classes(0))]).contains("it has no samples"));
    assert!(MLP.refuse(&["--validation-samples", "0"]).contains("1 or more"));
    assert!(MLP.refuse(&["--validation-samples", "99999999999999999"]).contains("got 99999999999999999; "));
}

#[test]
fn a_run_goes_on_and_reports() {
    let folder = Folder::new();
    let (dir, report) = (folder.argument("checkpoints"), folder.argument("report.html"));
    let [longer, whole] = ["longer", "whole"].map(|name| folder.argument(name));
    let keep = ["--checkpoint-dir", &dir, "--report", &report];
    MLP.succeed(&[&["--epochs", "4"], &keep[..]].concat());
    MLP.succeed(&[&["--epochs", "9", "--resume", "--save", &longer], &keep[..]].concat());
    MLP.succeed(&["--epochs", "9", "--save", &whole]);
    assert!(std::fs::read(longer).unwrap() == std::fs::read(whole).unwrap());
    let report = std::fs::read_to_string(&report).unwrap();
    assert!(report.contains("<svg") && report.contains("validation accuracy"), "{report}");
    // Each rank has its own batch, so another number of ranks means other data.
    let line = MLP.refuse(&["--checkpoint-dir", &dir, "--resume", "--world-size", "3"]);
    assert!(
        line.starts_with(&format!("error: --world-size: got 3; the run in {dir} began with 2; ")),
        "{line}"
    );
}
