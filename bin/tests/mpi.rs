//! Tests of every experiment over MPI: results must equal those over TCP. `GIRANDOLE_MPIRUN` names another launcher
//! than `mpirun`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use candle_core::{DType, Device, safetensors};
use common::{Folder, clean, girandole, metrics, refuse_with, succeed, text};
use serde_json::Value;

/// Each experiment with small sizes, and options to add on 4 ranks.
const EXPERIMENTS: [(&str, &[&str], &[&str]); 9] = [
    ("ddp-linear", &["--epochs", "2", "--samples", "640"], &[]),
    ("ddp-trainer", &["--epochs", "2", "--samples", "320"], &[]),
    ("ddp-transformer", &["--epochs", "3"], &[]),
    ("ddp-mlp", &["--epochs", "2"], &[]),
    ("fsdp-mlp", &["--steps", "2", "--batch-size", "4"], &["--param-dtype", "f32"]),
    ("cifar10", &["--epochs", "1", "--samples", "160"], &[]),
    ("tensor-parallel-mlp", &["--epochs", "1", "--samples", "64", "--tp", "2"], &["--dp", "2"]),
    ("tensor-parallel-transformer", &["--epochs", "1", "--samples", "8", "--tp", "2"], &["--dp", "2"]),
    ("pipeline-transformer", &["--epochs", "2", "--dropout", "0", "--samples", "16"], &["--dp", "2"]),
];

/// Returns a command that runs under `mpirun`. Concurrent `mpirun`s need separate folders, since one removes files
/// that another uses.
fn under_mpirun(ranks: usize, folder: &Folder) -> Command {
    let mpirun = std::env::var_os("GIRANDOLE_MPIRUN").unwrap_or_else(|| "mpirun".into());
    let mut command = Command::new(mpirun);
    clean(&mut command).args(["-n", &ranks.to_string()]).arg(env!("CARGO_BIN_EXE_girandole"));
    // For Open MPI: allow more ranks than cores, and root in containers.
    let names = ["ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe"];
    command.envs(names.map(|name| (format!("OMPI_{name}"), "1"))).env("TMPDIR", folder.path(""));
    command
}

/// Returns the losses and the weights of a run.
fn learned(mut command: Command, experiment: &str, options: &[&str]) -> (Vec<f64>, Vec<(String, Vec<f32>)>) {
    let folder = Folder::new();
    command.arg(experiment).args(options).env("RAYON_NUM_THREADS", "1");
    command.args(["--metrics", &folder.argument("m.jsonl"), "--save", &folder.argument("w.safetensors")]);
    succeed(&mut command);
    let steps = metrics(&folder.path("m.jsonl"));
    let losses: Vec<f64> = steps.iter().filter_map(|step: &Value| step["loss"].as_f64()).collect();
    let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
    let values = |tensor: &candle_core::Tensor| {
        tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let mut weights: Vec<_> = weights.iter().map(|(name, tensor)| (name.clone(), values(tensor))).collect();
    weights.sort_by(|left, right| left.0.cmp(&right.0));
    assert!(!losses.is_empty() && !weights.is_empty(), "{experiment}");
    (losses, weights)
}

/// A sum of two numbers does not depend on their order, so the results are equal.
#[test]
fn two_ranks_learn_over_mpi_what_they_learn_over_tcp() {
    for (experiment, options, _) in EXPERIMENTS {
        let mpi =
            learned(under_mpirun(2, &Folder::new()), experiment, &[options, &["--backend", "mpi"]].concat());
        let tcp = learned(girandole(), experiment, &[options, &["--world-size", "2"]].concat());
        assert!(mpi == tcp, "{experiment}: {:?}, over TCP {:?}", mpi.0, tcp.0);
    }
}

/// MPI adds the numbers of more than two ranks in another order, so the results are only close.
#[test]
fn four_ranks_learn_over_mpi_what_they_learn_over_tcp() {
    for (experiment, options, more) in EXPERIMENTS {
        let mpi = learned(
            under_mpirun(4, &Folder::new()),
            experiment,
            &[options, more, &["--backend", "mpi"]].concat(),
        );
        let tcp = learned(girandole(), experiment, &[options, more, &["--world-size", "4"]].concat());
        let close = |left: f64, right: f64| (left - right).abs() <= 1e-4 * right.abs().max(1e-2);
        assert_eq!((mpi.0.len(), mpi.1.len()), (tcp.0.len(), tcp.1.len()), "{experiment}");
        assert!(mpi.0.iter().zip(&tcp.0).all(|(l, r)| close(*l, *r)), "{experiment}: {mpi:?} {tcp:?}");
        for ((name, mpi), (_, tcp)) in mpi.1.iter().zip(&tcp.1) {
            // Adam takes a step of full size for any gradient, however small, so a few weights may differ more.
            let far = mpi.iter().zip(tcp).filter(|(l, r)| !close(f64::from(**l), f64::from(**r))).count();
            assert!(far * 1000 <= mpi.len(), "{experiment}, {name}: {far} of {}", mpi.len());
        }
    }
}

/// Uses messages larger than those that MPI sends eagerly, before the receiver asks for them.
#[test]
fn every_schedule_learns_over_mpi_what_it_learns_over_tcp() {
    let all = ["naive", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v"];
    for (schedule, ranks) in all.map(|schedule| (schedule, 2)).into_iter().chain([("1f1b", 4), ("zb-v", 4)]) {
        let options =
            ["--schedule", schedule, "--micro-batches", "4", "--batch-size", "16", "--samples", "32"];
        let model = ["--d-model", "64", "--num-layers", "8", "--dropout", "0", "--epochs", "1"];
        let run = |command, more: &[&str]| {
            learned(command, "pipeline-transformer", &[&options, &model, more].concat())
        };
        let mpi = run(under_mpirun(ranks, &Folder::new()), &["--backend", "mpi"]);
        let tcp = run(girandole(), &["--world-size", &ranks.to_string()]);
        assert!(mpi == tcp, "{schedule}, {ranks} ranks: {:?}, over TCP {:?}", mpi.0, tcp.0);
    }
}

#[test]
fn what_is_printed_does_not_depend_on_the_back_end() {
    let options = ["ddp-linear", "--epochs", "2"];
    let mpi = succeed(under_mpirun(2, &Folder::new()).args(options).args(["--backend", "mpi"]));
    let tcp = succeed(girandole().args(options));
    let lines = common::without_times(&mpi);
    assert_eq!(lines, common::without_times(&tcp));
    let groups = succeed(under_mpirun(2, &Folder::new()).args(["process-groups", "--backend", "mpi"]));
    assert!(text(&groups.stdout).contains("\nMPI available: True (compiled in; version "));
    assert!(text(&groups.stdout).contains("get_backend mpi"));
}

#[test]
fn what_mpi_cannot_do_is_said_in_one_line() {
    let alone = refuse_with(girandole().arg("ddp-linear"), &["--backend", "mpi"]);
    assert!(alone.0.contains("no launcher of MPI has started this process") && alone.1 == 2, "{alone:?}");
    for (options, words) in [
        (["--world-size", "3"], "--world-size: got 3; MPI has started 1 ranks"),
        (["--init-method", "tcp://127.0.0.1:1"], "--init-method: got tcp://127.0.0.1:1; MPI ranks meet"),
    ] {
        let folder = Folder::new();
        let mut command = under_mpirun(1, &folder);
        let output = command.args(["ddp-linear", "--backend", "mpi"]).args(options).output().unwrap();
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
        assert!(!output.status.success() && output.stdout.is_empty());
    }
}
