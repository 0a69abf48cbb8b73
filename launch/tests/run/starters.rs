//! One program under different launchers: always a single job.

use std::process::Output;

use crate::port::free_port;
use crate::process::{end, lines, program, text};

/// Output of the ranks of one job of three.
const THREE: [&str; 3] = ["rank 0 of 3: 1", "rank 1 of 3: 1", "rank 2 of 3: 1"];

pub(crate) fn by_hand() {
    let [output] = end([program("mean")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(lines(&[output]), ["rank 0 of 2: 0.5", "rank 1 of 2: 0.5"]);
}

/// Runs three processes with these variables. `R` stands for the rank, and `PORT` for a common port.
fn told(variables: &[(&str, &str)]) {
    let port = free_port().to_string();
    let outputs: [Output; 3] = end([0, 1, 2].map(|rank: usize| {
        let mut command = program("mean");
        for (name, value) in variables {
            command.env(name, value.replace("PORT", &port).replace('R', &rank.to_string()));
        }
        command
    }));
    for output in &outputs {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert_eq!(lines(&outputs), THREE);
}

pub(crate) fn torchrun() {
    let rank = [("RANK", "R"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "R"), ("LOCAL_WORLD_SIZE", "3")];
    let place = [("GROUP_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "PORT")];
    let elastic = [("TORCHELASTIC_RUN_ID", "none"), ("TORCHELASTIC_USE_AGENT_STORE", "False")];
    told(&[&rank[..], &place, &elastic].concat());
}

pub(crate) fn slurm() {
    told(&[
        ("SLURM_JOB_ID", "17"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "R"),
        ("SLURM_NTASKS", "3"),
        ("SLURM_LOCALID", "R"),
        ("SLURM_NODEID", "0"),
        ("SLURM_JOB_NODELIST", "n1"),
        ("SLURM_TASKS_PER_NODE", "3"),
        ("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        ("MASTER_PORT", "PORT"),
    ]);
}

pub(crate) fn open_mpi() {
    told(&[
        ("OMPI_COMM_WORLD_RANK", "R"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "R"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
        ("PMIX_NAMESPACE", "prterun-17"),
        ("MASTER_PORT", "PORT"),
    ]);
}

pub(crate) fn mpich() {
    told(&[
        ("PMI_RANK", "R"),
        ("PMI_SIZE", "3"),
        ("MPI_LOCALRANKID", "R"),
        ("MPI_LOCALNRANKS", "3"),
        ("MASTER_PORT", "PORT"),
    ]);
}

pub(crate) fn kubeflow() {
    told(&[
        ("PET_NNODES", "3"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_NODE_RANK", "R"),
        ("PET_MASTER_ADDR", "127.0.0.1"),
        ("PET_MASTER_PORT", "PORT"),
        ("RANK", "R"),
        ("WORLD_SIZE", "3"),
    ]);
}

/// The program is started by `spawn` in another program.
pub(crate) fn launcher() {
    let outer = program("launch mean");
    let [output] = end([outer]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(lines(&[output]), THREE);
}
