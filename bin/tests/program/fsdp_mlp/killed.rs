//! A rank that is killed in the middle of a step.

use rustix::process::{Signal, kill_process};

use crate::common::{Folder, Session, all_name_the_culprit, losses, text};
use crate::fsdp_mlp::FSDP;

#[test]
fn all_others_name_it() {
    for (ranks, which) in [("2", 1), ("3", 0), ("4", 2)] {
        let folder = Folder::new();
        let lines = folder.argument("m.jsonl");
        let size = ["--features", "64", "--hidden", "256", "--steps", "1000000", "--world-size", ranks];
        let mut session = Session::start(&FSDP, &[&size[..], &["--metrics", &lines]].concat());
        session.until("steps", || std::fs::metadata(&lines).is_ok_and(|file| file.len() > 0));
        let victim = session.ranks()[which];
        kill_process(victim, Signal::KILL).unwrap();
        let output = session.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("error: rank {which} (pid ")) && said.contains("SIGKILL"), "{said}");
        for other in (0..ranks.parse::<usize>().unwrap()).filter(|rank| *rank != which) {
            let own = said.lines().find(|line| line.starts_with(&format!("rank {other}: error: ")));
            assert!(own.is_some_and(|line| line.contains(&format!("rank {which} "))), "rank {other}: {said}");
        }
    }
}

/// Also if the failure is found inside the model: an error in a layer's communication is passed through candle.
#[test]
fn all_others_name_one_that_is_killed_or_stopped() {
    let size = ["--features", "64", "--hidden", "256", "--steps", "1000000"];
    let hybrid = ["--sharding", "hybrid-shard", "--shard-ranks", "2"];
    all_name_the_culprit(&FSDP, &[&size[..], &hybrid].concat(), 5, 6);
}

/// The metrics have each step once, and the weights equal those of an undisturbed run.
#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let folder = Folder::new();
    let [dir, lines, whole_lines] =
        ["checkpoints", "m.jsonl", "whole.jsonl"].map(|name| folder.argument(name));
    let [saved, whole] = ["saved", "whole"].map(|name| folder.argument(name));
    let size = ["--features", "24", "--hidden", "50", "--world-size", "3"];
    let keep = ["--checkpoint-dir", &dir, "--checkpoint-every", "5", "--resume", "--metrics", &lines];
    let run = [&size[..], &keep].concat();
    for which in 0..3 {
        let before = std::fs::read(folder.path("checkpoints/latest")).ok();
        let mut session = Session::start(&FSDP, &[&run[..], &["--steps", "1000000"]].concat());
        session
            .until("a checkpoint more", || std::fs::read(folder.path("checkpoints/latest")).ok() != before);
        session.kill(which + 1);
    }
    let manifest = |dir: &std::path::Path| {
        let latest = std::fs::read_to_string(dir.join("latest")).unwrap();
        let json =
            std::fs::read(dir.join(latest.split_once(' ').unwrap().0).join("checkpoint.json")).unwrap();
        serde_json::from_slice::<serde_json::Value>(&json).unwrap()
    };
    let kept = manifest(&folder.path("checkpoints"))["step"].as_u64().unwrap();
    let steps = (kept + 7).to_string();
    let resumed = FSDP.succeed(&[&run[..], &["--steps", &steps, "--save", &saved]].concat());
    assert!(text(&resumed.stderr).contains(&format!("going on from {dir} at step {kept}")), "{resumed:?}");
    FSDP.succeed(&[&size[..], &["--steps", &steps, "--save", &whole, "--metrics", &whole_lines]].concat());
    assert!(
        std::fs::read(saved).unwrap() == std::fs::read(whole).unwrap(),
        "other weights after {steps} steps"
    );
    assert_eq!(losses(lines.as_ref()), losses(whole_lines.as_ref()));
    // Also on fewer ranks.
    let fewer =
        ["--features", "24", "--hidden", "50", "--world-size", "2", "--checkpoint-dir", &dir, "--resume"];
    let more = (kept + 9).to_string();
    let fewer = FSDP.succeed(&[&fewer[..], &["--steps", &more]].concat());
    assert!(text(&fewer.stderr).contains("it was made with world size 3"), "{fewer:?}");
    let line = FSDP.refuse(&["--checkpoint-dir", &dir, "--resume", "--features", "24", "--hidden", "51"]);
    assert!(line.starts_with("error: --hidden: got 51; the run in"), "{line}");
}
