//! Wrong options and files: rejected before anything is done.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::cifar10::data::{Files, PICTURE, TEST};
use crate::cifar10::{CIFAR10, SHORT};
use crate::common::Folder;

#[test]
fn options_that_cannot_be_used() {
    for option in [
        "--epochs", "--batch-size", "--samples", "--test-samples", "--pictures", "--print-every",
        "--world-size",
    ] {
        for value in ["0", "-1", "x"] {
            let line = CIFAR10.refuse(&[option, value]);
            assert!(line.contains(option) && line.contains("1 or more"), "{line}");
        }
    }
    for option in ["--lr", "--momentum"] {
        for value in ["-1", "NaN", "fast"] {
            let line = CIFAR10.refuse(&[option, value]);
            assert!(line.contains(option) && line.contains("0 or more"), "{line}");
        }
    }
    for option in ["--samples", "--test-samples"] {
        let line = CIFAR10.refuse(&[option, "99999999999999999"]);
        assert!(line.contains("got 99999999999999999; "), "{line}");
        let line = CIFAR10.refuse(&["--data-dir", "x", option, "5"]);
        assert!(line.contains(option) && line.contains("--data-dir"), "{line}");
        assert!(CIFAR10.refuse(&["--data", "x", option, "5"]).contains(option));
    }
    assert!(CIFAR10.refuse(&["--data", "x", "--data-dir", "y"]).contains("--data-dir"));
    assert!(CIFAR10.refuse(&["--pictures", "3"]).contains("--picture <FILE.png>"));
}

#[test]
fn folders_without_the_pictures() {
    let folder = Folder::new();
    let refused = || CIFAR10.refuse(&["--data-dir", &folder.argument("cifar")]);
    let line = refused();
    assert!(line.contains(&format!("cannot read {}: No such file", folder.argument("cifar"))), "{line}");
    std::fs::create_dir(folder.path("cifar")).unwrap();
    let line = refused();
    assert!(line.contains("it lacks data_batch_1.bin, data_batch_2.bin, ") && line.contains(TEST), "{line}");
    let files = Files::write(folder.path("cifar"), 2);
    std::fs::remove_file(files.path("data_batch_4.bin")).unwrap();
    let line = refused();
    assert!(line.contains("it lacks data_batch_4.bin; unpack cifar-10-binary.tar.gz"), "{line}");
    let line = CIFAR10.refuse(&["--data-dir", &folder.argument("cifar/test_batch.bin")]);
    assert!(line.contains("it is no folder"), "{line}");
    // The version that torchvision unpacks.
    std::fs::create_dir(folder.path("cifar-10-batches-py")).unwrap();
    let line = CIFAR10.refuse(&["--data-dir", &folder.argument("")]);
    assert!(line.contains("it has cifar-10-batches-py, the version of CIFAR-10 for Python"), "{line}");
    std::fs::write(folder.path("cifar-10-batches-py/data_batch_1"), "").unwrap();
    let line = CIFAR10.refuse(&["--data-dir", &folder.argument("cifar-10-batches-py")]);
    assert!(line.contains("it is cifar-10-batches-py, "), "{line}");
}

#[test]
fn files_that_are_damaged() {
    let folder = Folder::new();
    let files = Files::write(folder.path("cifar"), 2);
    let refused = |name: &str, bytes: &[u8], part: &str| {
        let before = std::fs::read(files.path(name)).unwrap();
        std::fs::write(files.path(name), bytes).unwrap();
        let line = CIFAR10.refuse(&["--data-dir", &folder.argument("cifar")]);
        assert!(line.contains(part) && line.contains(name), "{line}");
        std::fs::write(files.path(name), before).unwrap();
    };
    let whole = std::fs::read(files.path(TEST)).unwrap();
    refused(TEST, &whole[..whole.len() - 1], "6145 bytes are no whole number of records of 3073 bytes");
    refused("data_batch_3.bin", b"", "0 bytes are no whole number");
    let mut wrong = whole.clone();
    wrong[PICTURE + 1] = 11;
    refused("data_batch_2.bin", &wrong, "record 1 has the label 11; labels are 0 to 9");
    refused(TEST, &wrong, "record 1 has the label 11");
}

#[test]
fn tensors_that_do_not_fit() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let refused = |option: &str, change: (&str, Tensor)| {
        let folder = Folder::new();
        let mut tensors = std::collections::HashMap::from(
            ["", "test_"].map(|set| (format!("{set}x"), zeros(&[2, 3, 32, 32], DType::U8))),
        );
        tensors.extend(["", "test_"].map(|set| (format!("{set}y"), zeros(&[2], DType::U8))));
        tensors.insert(change.0.to_string(), change.1);
        safetensors::save(&tensors, folder.path("file")).unwrap();
        CIFAR10.refuse(&[option, &folder.argument("file")])
    };
    let line = refused("--data", ("x", zeros(&[2, 3, 32, 31], DType::U8)));
    assert!(line.contains("`x` is U8 [2, 3, 32, 31], expected U8 [*, 3, 32, 32]"), "{line}");
    let line = refused("--data", ("test_x", zeros(&[2, 3, 32, 32], DType::F32)));
    assert!(line.contains("`test_x` is F32"), "{line}");
    let line = refused("--data", ("test_y", zeros(&[3], DType::U8)));
    assert!(line.contains("`test_y` is U8 [3], expected U8 [2]"), "{line}");
    let line = refused("--data", ("x", zeros(&[0, 3, 32, 32], DType::U8)));
    assert!(line.contains("`x`: it has no pictures"), "{line}");
    let line = refused("--data", ("y", Tensor::new(&[9u8, 10], &Device::Cpu).unwrap()));
    assert!(line.contains("`y`: sample 1 is of class 10; classes are 0 to 9"), "{line}");
    let line = refused("--data", ("z", zeros(&[1], DType::U8)));
    assert!(line.contains("`z`"), "{line}");
    let line = refused("--init", ("conv1.weight", zeros(&[6, 3, 5, 4], DType::F32)));
    assert!(line.contains("`conv1.bias`"), "{line}");
}

#[test]
fn results_that_cannot_be_written() {
    let folder = Folder::new();
    std::fs::write(folder.path("file"), "old").unwrap();
    for place in [folder.argument("missing/file"), folder.argument(""), folder.argument("file/below")] {
        for option in ["--picture", "--save", "--report", "--metrics"] {
            let line = CIFAR10.refuse(&[option, &place]);
            assert!(line.starts_with(&format!("error: cannot write {place}: ")), "{option}: {line}");
        }
    }
    let file = folder.argument("file");
    for option in ["--save", "--metrics", "--report", "--trace", "--init", "--data"] {
        let line = CIFAR10.refuse(&["--picture", &folder.argument("./file"), option, &file]);
        assert!(line.contains(&format!("--picture: {file} is also the file of {option}")), "{line}");
    }
    assert_eq!(std::fs::read_to_string(folder.path("file")).unwrap(), "old");
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 1, "nothing was made on the way");
}

#[cfg(unix)]
#[test]
fn a_picture_may_go_to_a_device() {
    CIFAR10.succeed(&[&SHORT[..], &["--picture", "/dev/null"]].concat());
}
