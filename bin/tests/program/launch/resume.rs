//! Restarts of a job that was given a checkpoint to begin with (`--resume=CHECKPOINT`).

use std::process::{Command, Output};

use crate::common::{Folder, free_port, girandole, succeed, text};

/// Five steps per epoch on one rank, with a checkpoint after each epoch.
const SHORT: [&str; 7] = ["ddp-trainer", "--samples", "10", "--batch-size", "2", "--lr", "0.01"];

/// Returns the only rank of a job, as torchrun starts it; `time` is the number of restarts so far.
fn started(job: &str, time: usize, arguments: &[&str]) -> Command {
    let port = free_port();
    let mut command = girandole();
    command.env("RANK", "0").env("WORLD_SIZE", "1").env("TORCHELASTIC_RUN_ID", job);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RESTART_COUNT", time.to_string()).env("TORCHELASTIC_MAX_RESTARTS", "3");
    command.args(SHORT).args(arguments);
    command
}

#[test]
fn it_begins_there_again_until_it_has_written_one_itself() {
    let folder = Folder::new();
    let dir = folder.argument("c");
    let keep = ["--checkpoint-dir", &dir, "--epochs"];
    succeed(girandole().args(SHORT).args(keep).args(["2", "--world-size", "1"]));
    let run = |job: &str, time: usize, epochs: &str| {
        let arguments = [&keep[..], &[epochs, "--resume=checkpoint-00000001"]].concat();
        text(&succeed(&mut started(job, time, &arguments)).stderr)
    };
    let at = |epoch: usize| format!("going on from {dir} at epoch {epoch}, batch 0 (step {})", 5 * epoch);
    // The first start has no steps beyond the checkpoint.
    let said = run("a", 0, "1");
    assert!(said.contains(&at(1)), "{said}");
    // So the second one has no checkpoint of its own either; it writes the third checkpoint.
    let said = run("a", 1, "3");
    assert!(said.contains(&at(1)), "{said}");
}

#[test]
fn it_goes_on_from_its_own_and_from_no_other_job_s() {
    let folder = Folder::new();
    let dir = folder.argument("c");
    let run = |job: &str, time: usize, epochs: &str, asked: &str| {
        let asked = format!("--resume={asked}");
        let arguments = ["--checkpoint-dir", &dir, "--epochs", epochs, &asked];
        text(&succeed(&mut started(job, time, &arguments)).stderr)
    };
    let from = |folder: &str, epoch: usize| {
        format!("going on from {folder} at epoch {epoch}, batch 0 (step {})", 5 * epoch)
    };
    run("first", 0, "2", "latest");
    let kept = folder.path("kept");
    std::fs::rename(folder.path("c/checkpoint-00000001"), &kept).unwrap();
    let kept = kept.to_str().unwrap();
    // It writes the checkpoint of epoch 2, and the restart resumes from that.
    assert!(run("a", 0, "2", kept).contains(&from(kept, 1)));
    assert!(run("a", 1, "3", kept).contains(&from(&dir, 2)));
    assert!(run("a", 2, "4", kept).contains(&from(&dir, 3)));
    // Another job of the same command must not use it.
    assert!(run("b", 1, "1", kept).contains(&from(kept, 1)));
    assert!(run("b", 2, "1", kept).contains(&from(kept, 1)));
    // With --resume=latest, the latest is used.
    assert!(run("b", 1, "4", "latest").contains(&from(&dir, 4)));
    // A job of the same name that is started for the first time.
    assert!(run("a", 0, "1", kept).contains(&from(kept, 1)));
    assert!(run("a", 1, "1", kept).contains(&from(kept, 1)));
}

/// Runs `launch` with two ranks that may be restarted once.
fn launched(arguments: &[&str]) -> Output {
    let launch = ["launch", "--nproc-per-node", "2", "--max-restarts", "1", "--", "girandole"];
    girandole().args(launch).args(arguments).output().unwrap()
}

#[test]
fn a_checkpoint_that_cannot_be_gone_on_from_is_not_tried_again() {
    let fsdp = ["fsdp-mlp", "--features", "24", "--hidden", "50", "--steps"];
    let trainer = ["ddp-trainer", "--samples", "20", "--batch-size", "2", "--epochs"];
    for (command, file) in [(fsdp, "rank-00001.safetensors"), (trainer, "rank-00000.safetensors")] {
        let folder = Folder::new();
        let dir = folder.argument("c");
        let keep = ["2", "--checkpoint-dir", &dir];
        succeed(girandole().args(command).args(keep).args(["--world-size", "2"]));
        let last = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let last = last.filter(|path| path.is_dir()).max().unwrap().join(file);
        let bytes = std::fs::read(&last).unwrap();
        std::fs::write(&last, &bytes[..bytes.len() - 1]).unwrap();
        for (resume, part) in
            [("--resume", file), ("--resume=checkpoint-00000009", "there is no such folder")]
        {
            let output = launched(&[&command[..], &keep, &[resume]].concat());
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{resume}: {said}");
            assert!(said.contains(part) && !said.contains("start again"), "{resume}: {said}");
        }
    }
}
