//! Inputs that are not regular files: rejected without blocking.

use std::process::{Command, Stdio};

use crate::common::{Folder, clean, refuse_with, text};

/// Returns the program, killed after 120 s if it blocks.
pub(crate) fn within_minutes() -> Command {
    let mut command = Command::new("timeout");
    clean(&mut command).args(["120", env!("CARGO_BIN_EXE_girandole")]).stdin(Stdio::null());
    command
}

#[test]
fn pipes_and_devices_are_no_inputs() {
    let folder = Folder::new();
    let pipe = folder.argument("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let commands = [
        "ddp-linear", "ddp-trainer", "ddp-transformer", "ddp-mlp", "fsdp-mlp", "cifar10",
        "tensor-parallel-mlp", "tensor-parallel-transformer", "pipeline-transformer",
    ];
    for command in commands {
        for option in ["--init", "--data"] {
            for (path, kind) in [(&*pipe, "a pipe"), ("/dev/zero", "a device")] {
                let (line, code) = refuse_with(&mut within_minutes(), &[command, option, path]);
                let told =
                    line.contains(path) && line.contains(&format!("it is {kind}, and not a regular file"));
                assert!(told && code == 1, "{command} {option}: {code}: {line}");
            }
        }
    }
}

/// With checkpoints, data files are read for their hash; and ranks of another launcher read the files themselves.
#[test]
fn a_pipe_is_refused_wherever_it_is_read() {
    let folder = Folder::new();
    let (pipe, dir) = (folder.argument("pipe"), folder.argument("c"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (line, _) =
        refuse_with(&mut within_minutes(), &["ddp-trainer", "--data", &pipe, "--checkpoint-dir", &dir]);
    assert!(line.contains("it is a pipe"), "{line}");
    let mut command = within_minutes();
    command.args(["launch", "--nproc-per-node", "2", "--", env!("CARGO_BIN_EXE_girandole")]);
    let output = command.args(["ddp-linear", "--init", &pipe]).output().unwrap();
    assert!(
        text(&output.stderr).contains("it is a pipe, and not a regular file"),
        "{}",
        text(&output.stderr)
    );
    let pictures = folder.path("cifar-10-batches-bin");
    std::fs::create_dir(&pictures).unwrap();
    for name in
        ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"]
    {
        std::fs::write(pictures.join(name), [1; 3073]).unwrap();
    }
    std::fs::rename(&pipe, pictures.join("test_batch.bin")).unwrap();
    let (line, _) = refuse_with(&mut within_minutes(), &["cifar10", "--data-dir", &folder.argument("")]);
    assert!(line.contains("test_batch.bin: it is a pipe"), "{line}");
}
