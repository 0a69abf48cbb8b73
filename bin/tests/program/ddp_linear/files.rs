//! Files that cannot be read, have the wrong content, or cannot be written.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use candle_core::{DType, Device, Tensor, safetensors};
use report::metrics::MetricsWriter;

use crate::common::Folder;
use crate::ddp_linear::LINEAR;

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

fn save(path: &Path, tensors: &[(&str, Tensor)]) {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, tensor)| (*name, tensor.clone())).collect();
    safetensors::save(&tensors, path).unwrap();
}

/// Returns the error for a file with these tensors.
fn refused(option: &str, tensors: &[(&str, Tensor)]) -> String {
    let folder = Folder::new();
    save(&folder.path("file"), tensors);
    let line = LINEAR.refuse(&[option, &folder.argument("file")]);
    assert!(line.contains(&folder.argument("file")), "{line}");
    line
}

#[test]
fn files_that_are_none() {
    let folder = Folder::new();
    let whole = folder.path("whole");
    save(&whole, &[("x", zeros(&[9, 1], DType::F32)), ("y", zeros(&[9, 1], DType::F32))]);
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(folder.path("cut"), &bytes[..bytes.len() - 5]).unwrap();
    std::fs::write(folder.path("long"), [&bytes[..], b"more"].concat()).unwrap();
    std::fs::write(folder.path("rubbish"), b"\xff\xfe\x00rubbish\n and more of it").unwrap();
    std::fs::write(folder.path("empty"), b"").unwrap();
    for option in ["--init", "--data"] {
        for (name, reason) in [
            ("missing", "cannot read"),
            ("", "cannot read"),
            ("cut", "not a whole safetensors file"),
            ("long", "not a whole safetensors file"),
            ("rubbish", "not a whole safetensors file"),
            ("empty", "not a whole safetensors file"),
        ] {
            let path = folder.argument(name);
            let line = LINEAR.refuse(&[option, &path]);
            assert!(line.contains(reason) && line.contains(&path), "{option} {name}: {line}");
        }
    }
}

#[test]
fn weights_that_do_not_fit() {
    let (weight, bias) = (zeros(&[1, 1], DType::F32), zeros(&[1], DType::F32));
    let init = |tensors: &[(&str, Tensor)]| refused("--init", tensors);
    let line = init(&[("linear.weight", weight.clone())]);
    assert!(line.contains("has no tensor `linear.bias` (F32 [1]); it holds linear.weight"), "{line}");
    let all = [("linear.weight", weight.clone()), ("linear.bias", bias.clone())];
    let line = init(&[&all[..], &[("linear.scale", bias.clone())]].concat());
    assert!(line.contains("has a tensor `linear.scale` (F32 [1])"), "{line}");
    let line = init(&[("linear.weight", zeros(&[2, 1], DType::F32)), ("linear.bias", bias.clone())]);
    assert!(line.contains("`linear.weight` is F32 [2, 1], expected F32 [1, 1]"), "{line}");
    let line = init(&[("linear.weight", weight.clone()), ("linear.bias", zeros(&[1], DType::F64))]);
    assert!(line.contains("`linear.bias` is F64 [1], expected F32 [1]"), "{line}");
    let line = init(&[("module.linear.weight", weight), ("module.linear.bias", bias)]);
    assert!(line.contains("model.module.state_dict()"), "{line}");
}

#[test]
fn data_that_does_not_fit() {
    let data = |x: Tensor, y: Tensor| refused("--data", &[("x", x), ("y", y)]);
    let good = || zeros(&[8, 1], DType::F32);
    let line = data(good(), zeros(&[7, 1], DType::F32));
    assert!(line.contains("`y` is F32 [7, 1], expected F32 [8, 1]"), "{line}");
    let line = data(zeros(&[0, 1], DType::F32), zeros(&[0, 1], DType::F32));
    assert!(line.contains("`x`: it has no samples"), "{line}");
    let line = data(zeros(&[8], DType::F32), good());
    assert!(line.contains("`x` is F32 [8], expected F32 [*, 1]"), "{line}");
    let line = data(good(), zeros(&[8, 1], DType::F64));
    assert!(line.contains("`y` is F64 [8, 1], expected F32 [8, 1]"), "{line}");
    assert!(refused("--data", &[("x", good())]).contains("has no tensor `y`"));
    let line = refused("--data", &[("x", good()), ("y", good()), ("z", good())]);
    assert!(line.contains("`z`"), "{line}");
}

#[test]
fn results_that_cannot_be_written() {
    let folder = Folder::new();
    std::fs::write(folder.path("file"), "").unwrap();
    let places = [folder.argument("missing/file"), folder.argument(""), folder.argument("file/below")];
    // Not even root can create files there.
    let places = places.into_iter().chain(cfg!(target_os = "linux").then(|| "/proc/self/file".into()));
    for place in places {
        for option in ["--save", "--metrics", "--trace", "--report"] {
            let line = LINEAR.refuse(&[option, &place]);
            assert!(line.starts_with(&format!("error: cannot write {place}: ")), "{option}: {line}");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 1, "nothing was made on the way");
}

#[cfg(unix)]
#[test]
fn results_that_may_not_be_written() {
    use std::os::unix::fs::PermissionsExt;

    if rustix::process::geteuid().is_root() {
        eprintln!("root may write everything: nothing to test");
        return;
    }
    let folder = Folder::new();
    std::fs::write(folder.path("file"), "old").unwrap();
    std::fs::set_permissions(folder.path("file"), PermissionsExt::from_mode(0o444)).unwrap();
    for option in ["--save", "--metrics", "--trace", "--report"] {
        assert!(LINEAR.refuse(&[option, &folder.argument("file")]).contains("ermission denied"));
    }
}

#[test]
fn one_file_under_two_names() {
    let folder = Folder::new();
    let file = folder.argument("file");
    let again = folder.argument("./file");
    for (one, other) in [("--metrics", "--save"), ("--trace", "--report"), ("--metrics", "--trace")] {
        let line = LINEAR.refuse(&[one, &file, other, &again]);
        assert!(line.contains(one) && line.contains(other) && line.contains("give each its own"), "{line}");
    }
    save(&folder.path("file"), &[("x", zeros(&[4, 1], DType::F32)), ("y", zeros(&[4, 1], DType::F32))]);
    let before = std::fs::read(&file).unwrap();
    for output in ["--save", "--metrics", "--trace", "--report"] {
        assert!(LINEAR.refuse(&["--data", &file, output, &again]).contains("--data"));
    }
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

#[test]
fn weights_may_be_saved_where_they_came_from() {
    let folder = Folder::new();
    let file = folder.argument("weights");
    let short = ["--epochs", "1", "--samples", "64", "--save", &file];
    LINEAR.succeed(&short);
    let before = std::fs::read(&file).unwrap();
    LINEAR.succeed(&[&short[..], &["--init", &file]].concat());
    assert_ne!(std::fs::read(&file).unwrap(), before);
}

#[cfg(unix)]
#[test]
fn metrics_may_go_to_a_device() {
    LINEAR.succeed(&["--epochs", "1", "--samples", "64", "--metrics", "/dev/null", "--report", "/dev/null"]);
}

/// A run that was killed has its file for a moment longer.
#[test]
fn metrics_that_another_run_writes_are_waited_for_and_then_refused() {
    let folder = Folder::new();
    let metrics = folder.argument("m.jsonl");
    let writer = MetricsWriter::create(Path::new(&metrics)).unwrap();
    let options = ["--epochs", "1", "--samples", "100", "--metrics", &metrics];
    assert!(LINEAR.refuse(&options).contains("another run is writing it"));
    let waiting = LINEAR.command().args(options).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    std::thread::sleep(Duration::from_millis(300));
    drop(writer);
    assert!(waiting.unwrap().wait().unwrap().success());
}
