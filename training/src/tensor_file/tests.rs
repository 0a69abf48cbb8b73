//! Tests of saving and loading, and of files that do not fit.

use std::fs::{self, File, Permissions};

use candle_core::Var;

use super::*;

fn vars(seed: f32) -> VarMap {
    let map = VarMap::new();
    let mut data = map.data().lock().unwrap();
    let a = Tensor::arange(seed, seed + 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
    let b = Tensor::new(&[seed as f64], &Device::Cpu).unwrap();
    data.insert("fc.weight".into(), Var::from_tensor(&a).unwrap());
    data.insert("fc.bias".into(), Var::from_tensor(&b).unwrap());
    drop(data);
    map
}

fn values(map: &VarMap) -> (Vec<f32>, Vec<f64>) {
    let data = map.data().lock().unwrap();
    (data["fc.weight"].flatten_all().unwrap().to_vec1().unwrap(), data["fc.bias"].to_vec1().unwrap())
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_saved_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    check_writable(&path).unwrap();
    assert!(!path.exists());
    save_weights(&path, &vars(0.)).unwrap();
    save_weights(&path, &vars(5.)).unwrap();
    check_writable(&path).unwrap();
    assert_eq!(names_in(folder.path()), ["m.safetensors"]);
    let other = vars(0.);
    let view = other.data().lock().unwrap()["fc.weight"].as_tensor().clone();
    load_weights(&path, &other).unwrap();
    assert_eq!(values(&other), values(&vars(5.)));
    assert_eq!(view.flatten_all().unwrap().to_vec1::<f32>().unwrap(), values(&other).0);
}

/// The tensors of a file, and words that the error message must contain.
type Misfit = (Vec<(&'static str, Tensor)>, Vec<&'static str>);

#[test]
fn every_misfit_is_one_line_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let weight = || Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let bias = || Tensor::zeros(1, DType::F64, &Device::Cpu).unwrap();
    let other = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let cases: [Misfit; 6] = [
        (vec![("fc.weight", weight())], vec!["no tensor `fc.bias`", "F64 [1]", "holds fc.weight"]),
        (
            vec![("fc.weight", weight()), ("fc.bias", bias()), ("more", weight())],
            vec!["`more`", "F32 [2, 3]", "that the model has not"],
        ),
        (
            vec![("fc.weight", other(&[3, 2], DType::F32)), ("fc.bias", bias())],
            vec!["`fc.weight`", "F32 [3, 2]", "F32 [2, 3]"],
        ),
        (
            vec![("fc.weight", weight()), ("fc.bias", other(&[1], DType::F16))],
            vec!["`fc.bias`", "F16 [1]", "F64 [1]"],
        ),
        (
            vec![("module.fc.weight", weight()), ("module.fc.bias", bias())],
            vec!["`fc.bias`", "model.module.state_dict()"],
        ),
        (vec![], vec!["`fc.bias`", "holds none"]),
    ];
    for (tensors, words) in cases {
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        let map = vars(1.);
        let line = load_weights(&path, &map).unwrap_err().to_string();
        assert!(line.contains(&path.display().to_string()), "{line}");
        assert!(words.iter().all(|word| line.contains(word)) && !line.contains('\n'), "{line}: {words:?}");
        assert_eq!(values(&map), values(&vars(1.)));
    }
}

#[test]
fn broken_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let line = TensorFile::open(&path).unwrap_err().to_string();
    assert!(line.starts_with(&format!("cannot read {}: ", path.display())), "{line}");
    save_weights(&path, &vars(0.)).unwrap();
    let whole = fs::read(&path).unwrap();
    let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    // Crafted so that sums and products of numbers in their headers overflow.
    let endless = include_bytes!("../../../fuzz/seeds/tensor-file/beyond-64-bits");
    let wide = include_bytes!("../../../fuzz/seeds/tensor-file/no-strides");
    let cut = [&whole[..whole.len() - 1], &whole[..20], &whole[..4]];
    for bytes in cut.into_iter().chain([&b""[..], b"not a safetensors file", &huge, endless, wide]) {
        fs::write(&path, bytes).unwrap();
        let line = load_weights(&path, &vars(0.)).unwrap_err().to_string();
        assert!(line.contains("is not a whole safetensors file") && !line.contains('\n'), "{line}");
    }
}

#[test]
fn data_is_taken_by_name_with_any_size_where_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.safetensors");
    let x = Tensor::arange(0f32, 6., &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
    safetensors::serialize_to_file([("x", x.clone()), ("unused", x)], None, &path).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.names(), ["unused", "x"]);
    let x = file.tensor("x", &[None, Some(2)], DType::F32, &Device::Cpu).unwrap();
    assert_eq!(x.to_vec2::<f32>().unwrap(), [[0., 1.], [2., 3.], [4., 5.]]);
    for (name, shape, dtype, word) in [
        ("x", vec![None, Some(3)], DType::F32, "expected F32 [*, 3]"),
        ("x", vec![None], DType::F32, "expected F32 [*]"),
        ("x", vec![None, None], DType::I64, "expected I64 [*, *]"),
        ("y", vec![None, None], DType::F32, "holds unused, x"),
    ] {
        let line = file.tensor(name, &shape, dtype, &Device::Cpu).unwrap_err().to_string();
        assert!(line.contains(word), "{line}");
    }
}

#[test]
fn places_that_cannot_be_written_are_found_early() {
    let folder = tempfile::tempdir().unwrap();
    let sub = folder.path().join("sub");
    fs::create_dir(&sub).unwrap();
    for path in
        [folder.path().join("no/such/m"), sub, PathBuf::from(""), PathBuf::from("/dev/null"), "..".into()]
    {
        for line in [check_writable(&path), save_weights(&path, &vars(0.))]
            .map(|result| result.unwrap_err().to_string())
        {
            assert!(line.starts_with("cannot write ") && !line.contains('\n'), "{line}");
        }
    }
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    assert_eq!(names_in(folder.path()), ["sub"]);
}

#[cfg(unix)]
#[test]
fn links_and_permissions_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let (plain, path, link) =
        (folder.path().join("plain"), folder.path().join("m"), folder.path().join("link"));
    File::create(&plain).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    save_weights(&path, &vars(0.)).unwrap();
    assert_eq!(mode(&path), mode(&plain));
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    symlink(&path, &link).unwrap();
    save_weights(&link, &vars(3.)).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(mode(&path), 0o640);
    let loaded = vars(0.);
    load_weights(&path, &loaded).unwrap();
    assert_eq!(values(&loaded), values(&vars(3.)));
}

#[test]
fn many_names_are_cut() {
    let names: Vec<String> = (0..12).map(|i| format!("t{i}")).collect();
    assert_eq!(listing(&names), "t0, t1, t2, t3, t4, t5, t6, t7 and 4 more");
}
