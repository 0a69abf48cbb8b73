//! Option names with underscores, as in PyTorch's programs.

use crate::common::{Folder, girandole, refuse_with, succeed};

#[test]
fn underscores_in_names_are_taken() {
    for (arguments, part) in [
        (&["ddp-linear", "--batch_size", "0"][..], "--batch-size <N>"),
        (&["ddp-linear", "--world_size=0"], "--world-size <N>"),
        (&["plan", "ddp-mlp", "--ranks_per_node", "0"], "--ranks-per-node"),
        (&["comm-bench", "--init_method", "x"], "--init-method"),
        (&["launch", "--max_restarts", "x", "--", "true"], "--max-restarts"),
        (&["ddp-trainer", "--max_epochs", "0"], "--epochs"),
    ] {
        let (line, code) = refuse_with(&mut girandole(), arguments);
        assert!(line.contains(part) && code == 2, "{arguments:?}: {line}");
    }
    let folder = Folder::new();
    let run = ["ddp-trainer", "--samples", "8", "--epochs", "1", "--world_size", "2", "--batch_size=2"];
    succeed(girandole().args(run).args([
        "--checkpoint_dir",
        &folder.argument("c"),
        "--checkpoint_every",
        "1",
    ]));
    assert!(folder.path("c/latest").is_file());
    // Arguments of the launched program are not changed.
    let launch = [
        "launch", "--nproc_per_node", "1", "--", "sh", "-c", "test \"$1\" = --my_option", "sh", "--my_option",
    ];
    succeed(girandole().args(launch));
}

#[test]
fn a_back_end_of_pytorch_is_answered_with_its_name_here() {
    for command in ["ddp-linear", "comm-bench", "process-groups"] {
        let (line, code) = refuse_with(&mut girandole(), &[command, "--backend", "gloo"]);
        assert!(line.contains("use tcp") && code == 2, "{line}");
        let (line, _) = refuse_with(&mut girandole(), &[command, "--backend", "rdma"]);
        assert!(line.contains("[possible values: auto, tcp, nccl, mpi]"), "{line}");
    }
}
