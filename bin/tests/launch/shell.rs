//! `launch` of a shell script.

use std::process::Command;

use crate::common::girandole;

/// `launch` of a shell script on so many ranks.
pub(crate) fn shell(ranks: usize, script: &str) -> Command {
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]);
    command
}
