//! Starts this program as a job of several ranks.

use std::process::{Command, Output};

/// Environment variable with the role of a rank.
pub(crate) const ROLE: &str = "GIRANDOLE_MPI_ROLE";
/// Environment variable with a folder for the job's files.
pub(crate) const FOLDER: &str = "GIRANDOLE_MPI_FOLDER";

/// Runs a job to its end.
pub(crate) fn run(role: &str, ranks: usize) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mpirun = std::env::var_os("GIRANDOLE_MPIRUN").unwrap_or_else(|| "mpirun".into());
    let mut command = Command::new(mpirun);
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    // Concurrent `mpirun` processes need separate folders: otherwise one removes files that another is about to use.
    command.env(ROLE, role).env(FOLDER, folder.path()).env("TMPDIR", folder.path());
    // Open MPI: allows more ranks than cores, and root in containers.
    for name in
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"]
    {
        command.env(name, "1");
    }
    command.output().unwrap_or_else(|error| panic!("mpirun cannot be started: {error}"))
}

/// Whether this process is rank 1 of a job with this role.
pub(crate) fn is_odd_in(role: &str) -> bool {
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(std::env::var_os);
    std::env::var(ROLE).is_ok_and(|own| own == role) && rank.is_some_and(|rank| rank == "1")
}

pub(crate) fn succeed(role: &str, ranks: usize) {
    let output = run(role, ranks);
    assert!(output.status.success(), "{role} on {ranks} ranks: {}\n{}", output.status, printed(&output));
}

/// Returns the output of all ranks and of the launcher.
pub(crate) fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
