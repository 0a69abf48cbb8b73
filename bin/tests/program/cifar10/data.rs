//! Tests with the binary version of CIFAR-10, with few pictures in each file.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use sampler::Generator;

use crate::cifar10::CIFAR10;
use crate::common::{Folder, losses, text};

pub(crate) const PICTURE: usize = 3 * 32 * 32;
pub(crate) const TEST: &str = "test_batch.bin";

/// A folder with all six files.
pub(crate) struct Files {
    dir: PathBuf,
    /// Records of the training set and of the test set.
    sets: [Vec<u8>; 2],
}

impl Files {
    /// Writes files of `pictures` pictures each: bright ones of class 1 and dark ones of class 8.
    pub(crate) fn write(dir: PathBuf, pictures: usize) -> Self {
        std::fs::create_dir_all(&dir).unwrap();
        let mut files = Self { dir, sets: [Vec::new(), Vec::new()] };
        let mut generator = Generator::new(0);
        let names = (1..6).map(|number| (format!("data_batch_{number}.bin"), 0));
        for (name, set) in names.chain([(TEST.to_string(), 1)]) {
            let mut records = Vec::new();
            for _ in 0..pictures {
                let bright = generator.next_u32().is_multiple_of(2);
                records.push(if bright { 1 } else { 8 });
                let byte = |_| (generator.next_u32() % 128) as u8 + if bright { 128 } else { 0 };
                records.extend((0..PICTURE).map(byte));
            }
            std::fs::write(files.path(&name), &records).unwrap();
            files.sets[set].extend(records);
        }
        files
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Saves the same pictures as a file for `--data`.
    fn save(&self, path: PathBuf) {
        let mut tensors = HashMap::new();
        for (set, name) in self.sets.iter().zip(["", "test_"]) {
            let records: Vec<&[u8]> = set.chunks(1 + PICTURE).collect();
            let labels: Vec<u8> = records.iter().map(|record| record[0]).collect();
            let bytes: Vec<u8> = records.iter().flat_map(|record| record[1..].to_vec()).collect();
            let x = Tensor::from_vec(bytes, (labels.len(), 3, 32, 32), &Device::Cpu).unwrap();
            tensors.insert(format!("{name}x"), x);
            tensors.insert(format!("{name}y"), Tensor::new(labels, &Device::Cpu).unwrap());
        }
        safetensors::save(&tensors, path).unwrap();
    }
}

#[test]
fn a_folder_is_learnt_and_the_same_tensors_give_the_same() {
    let folder = Folder::new();
    let files = Files::write(folder.path("unpacked/cifar-10-batches-bin"), 30);
    files.save(folder.path("data.safetensors"));
    let mut runs = Vec::new();
    for (option, source) in [
        ("--data-dir", folder.argument("unpacked")),
        ("--data-dir", folder.argument("unpacked/cifar-10-batches-bin")),
        ("--data", folder.argument("data.safetensors")),
    ] {
        let metrics = folder.argument("m.jsonl");
        let how = ["--momentum", "0.9", "--epochs", "4", "--print-every", "19", "--metrics", &metrics];
        let output = CIFAR10.succeed(&[&how[..], &[option, &source]].concat());
        let remarks = text(&output.stderr);
        let few = remarks.contains(
            " has 150 pictures to train on and 30 to test with; all of CIFAR-10 are 50000 and 10000\n",
        );
        assert_eq!(few, option == "--data-dir", "{remarks}");
        assert!(
            !remarks.contains("no --data-dir") && remarks.lines().count() == 1 + usize::from(few),
            "{remarks}"
        );
        runs.push((text(&output.stdout), losses(metrics.as_ref())));
    }
    let (printed, losses) = &runs[0];
    // 150 pictures on two ranks, 4 per step on each.
    assert_eq!(losses.len(), 4 * 19);
    assert!(printed.contains("Accuracy on the 30 test pictures: 100.0 %"), "{printed}");
    assert!(runs.iter().all(|run| run == &runs[0]));
}

#[test]
fn without_a_word_losses_are_printed_as_often_as_the_document_does() {
    let folder = Folder::new();
    Files::write(folder.path("cifar"), 2);
    // Ten pictures make ten steps per epoch.
    let printed = CIFAR10.succeed(&[
        "--data-dir",
        &folder.argument("cifar"),
        "--world-size",
        "1",
        "--batch-size",
        "1",
        "--epochs",
        "3",
    ]);
    assert!(text(&printed.stdout).starts_with("finish\n"));
}
