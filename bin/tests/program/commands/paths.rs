//! Paths that are not UTF-8.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::common::{Folder, girandole, succeed, text};

#[test]
fn checkpoints_of_several_ranks_can_be_in_any_folder() {
    let commands: [&[&str]; 4] = [
        &["fsdp-mlp", "--features", "24", "--hidden", "50", "--world-size", "2", "--steps"],
        &["tensor-parallel-mlp", "--hidden-size", "16", "--samples", "40", "--batch-size", "20", "--epochs"],
        &["pipeline-transformer", "--epochs"],
        &["ddp-trainer", "--samples", "40", "--epochs"],
    ];
    for command in commands {
        let folder = Folder::new();
        let dir = folder.path("c").join(OsStr::from_bytes(b"ck\xff"));
        let run = |count: &str, more: &[&OsStr]| {
            let mut girandole = girandole();
            girandole.args(command).arg(count).arg("--checkpoint-dir").arg(&dir).args(more);
            text(&succeed(&mut girandole).stderr)
        };
        run("2", &[]);
        let said = run("3", &["--resume".as_ref()]);
        assert!(said.contains("going on from") && dir.join("latest").exists(), "{command:?}: {said}");
        // A checkpoint outside of --checkpoint-dir.
        let from = dir.join("checkpoint-00000002");
        let elsewhere = folder.path("elsewhere");
        let mut girandole = girandole();
        girandole.args(command).arg("4").arg("--checkpoint-dir").arg(&elsewhere).arg("--resume").arg(&from);
        let said = text(&succeed(&mut girandole).stderr);
        let going_on = format!("going on from {} at ", from.display());
        assert!(said.contains(&going_on) && elsewhere.join("latest").exists(), "{command:?}: {said}");
    }
}
