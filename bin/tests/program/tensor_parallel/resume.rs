//! Runs that are killed and resumed, in the same layout and in others.

use candle_core::{Device, safetensors};
use rustix::process::{Signal, kill_process};

use crate::common::{Folder, Session, assert_close, girandole, kill_and_resume, losses, refuse_with, text};
use crate::tensor_parallel::{MLP, SMALL_MLP, SMALL_TRANSFORMER, TRANSFORMER};

/// Without the epochs, and with a number of samples that is not a multiple of the batch size.
fn transformer(more: &[&'static str]) -> Vec<&'static str> {
    [&SMALL_TRANSFORMER[..10], &["--samples", "20", "--batch-size", "6"], more].concat()
}

#[test]
fn a_transformer_that_is_killed_ends_as_one_that_nobody_disturbs() {
    let options = ["--tp", "2", "--dp", "2", "--sequence-parallel", "--dropout", "0.1"];
    kill_and_resume(&TRANSFORMER, &transformer(&options));
    kill_and_resume(&TRANSFORMER, &transformer(&["--tp", "2", "--world-size", "2"]));
}

#[test]
fn an_mlp_that_is_killed_ends_as_one_that_nobody_disturbs() {
    let options = ["--samples", "40", "--batch-size", "8", "--hidden-size", "12", "--tp", "3"];
    kill_and_resume(&MLP, &options);
}

#[test]
fn a_run_goes_on_with_its_layers_divided_otherwise() {
    let folder = Folder::new();
    let whole = folder.argument("whole.jsonl");
    let run = |more: &[&str]| text(&TRANSFORMER.succeed(&[&transformer(&[])[..], more].concat()).stderr);
    run(&["--tp", "1", "--dp", "1", "--epochs", "4", "--metrics", &whole]);
    for (then, now) in [("1", "4"), ("2", "4"), ("4", "2"), ("2", "1")] {
        let folder = Folder::new();
        let (dir, lines, saved) =
            (folder.argument("c"), folder.argument("m.jsonl"), folder.argument("w.safetensors"));
        let keep = ["--checkpoint-dir", &dir, "--checkpoint-every", "3", "--metrics", &lines, "--dp", "1"];
        run(&[&keep[..], &["--tp", then, "--epochs", "2"]].concat());
        let said = run(&[&keep[..], &["--tp", now, "--epochs", "4", "--save", &saved, "--resume"]].concat());
        assert_eq!(said, format!("note: going on from {dir} at epoch 2, batch 0 (step 8)\n"));
        assert_close(&losses(lines.as_ref()), &losses(whole.as_ref()), &format!("--tp {then}, then {now}"));
        assert!(safetensors::load(&saved, &Device::Cpu).unwrap().contains_key("head.weight"));
    }
}

#[test]
fn other_copies_share_what_is_left_of_the_data() {
    let folder = Folder::new();
    let (dir, lines) = (folder.argument("c"), folder.argument("m.jsonl"));
    let keep = ["--checkpoint-dir", &dir, "--metrics", &lines];
    TRANSFORMER.succeed(&[&transformer(&["--tp", "1", "--dp", "2", "--epochs", "2"])[..], &keep].concat());
    let more = transformer(&["--tp", "2", "--dp", "1", "--epochs", "3", "--resume"]);
    let said = text(&TRANSFORMER.succeed(&[&more[..], &keep].concat()).stderr);
    assert!(said.contains("at epoch 2, batch 0 (step 4); it was made with 2 data-parallel ranks"), "{said}");
    // Two batches per epoch on each of two copies, then four on one.
    assert_eq!(losses(lines.as_ref()).len(), 2 * 2 + 4);
}

#[test]
fn what_does_not_go_on() {
    let folder = Folder::new();
    let dir = folder.argument("c");
    let run = |more: &[&'static str]| [&transformer(more)[..], &["--checkpoint-dir", &dir]].concat();
    TRANSFORMER.succeed(&run(&["--epochs", "1"]));
    let line = TRANSFORMER.refuse(&run(&["--epochs", "2"]));
    assert!(line.contains("it holds checkpoints of an earlier run; give --resume"), "{line}");
    for (option, value, then) in [
        ("--max-len", "32", "64"),
        ("--num-layers", "1", "2"),
        ("--seed", "7", "42"),
        ("--dropout", "0.5", "0"),
    ] {
        let line = TRANSFORMER.refuse(&run(&["--epochs", "2", "--resume", option, value]));
        assert!(
            line.starts_with(&format!("error: {option}: got {value}; the run in {dir} began with {then}")),
            "{line}"
        );
    }
    let line = MLP.refuse(&[&SMALL_MLP[..], &["--checkpoint-dir", &dir, "--resume"]].concat());
    assert!(
        line.contains("of the command tensor-parallel-transformer, and this is tensor-parallel-mlp"),
        "{line}"
    );
    // The error names the damaged part.
    let part = folder.path("c/checkpoint-00000001/rank-00001.safetensors");
    let bytes = std::fs::read(&part).unwrap();
    std::fs::write(&part, &bytes[..bytes.len() - 1]).unwrap();
    let (line, code) = refuse_with(&mut TRANSFORMER.command(), &run(&["--epochs", "2", "--resume"]));
    let told = format!("error: `{}` cannot be trusted: ", part.display());
    assert!(line.starts_with(&told) && line.ends_with("no other checkpoint before it is whole\n"), "{line}");
    assert_eq!(code, 2);
}

#[test]
fn a_rest_of_the_data_that_cannot_be_divided_is_told_before_the_first_step() {
    let folder = Folder::new();
    let dir = folder.argument("c");
    let sizes = ["--hidden-size", "16", "--samples", "24", "--batch-size", "6"];
    let run = [&sizes[..], &["--tp", "2", "--sequence-parallel", "--checkpoint-dir", &dir]].concat();
    MLP.succeed(&[&run[..], &["--checkpoint-every", "1"]].concat());
    // Of 24 samples 6 are left, 3 for each of two copies.
    let resumed = [&run[..], &["--resume=checkpoint-00000003", "--dp"]].concat();
    let told = "--dp: got 2; with --sequence-parallel each batch is divided over 2 ranks (--tp), but the last batch of the 6 samples \
                left in the epoch would have 3: continue with --dp 1\n";
    let (line, code) = refuse_with(&mut MLP.command(), &[&resumed[..], &["2"]].concat());
    assert_eq!((line.as_str(), code), (format!("error: {told}").as_str(), 2));
    let mut launched = girandole();
    launched.args([
        "launch",
        "--nproc-per-node",
        "4",
        "--",
        env!("CARGO_BIN_EXE_girandole"),
        "tensor-parallel-mlp",
    ]);
    let output = launched.args(&resumed).arg("2").output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains(told), "{said}");
    MLP.succeed(&[&resumed[..], &["1"]].concat());
}

#[test]
fn a_rank_that_is_killed_is_named() {
    for which in [0, 3] {
        let folder = Folder::new();
        let lines = folder.argument("m.jsonl");
        let options = transformer(&["--tp", "2", "--dp", "2", "--epochs", "1000000"]);
        let mut session = Session::start(&TRANSFORMER, &[&options[..], &["--metrics", &lines]].concat());
        session.until("steps", || std::fs::metadata(&lines).is_ok_and(|file| file.len() > 0));
        kill_process(session.ranks()[which], Signal::KILL).unwrap();
        let output = session.end();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(&format!("rank {which} (pid ")) && said.contains("killed by signal SIGKILL"),
            "{said}"
        );
        let others = (0..4).filter(|rank| *rank != which);
        others.for_each(|rank| assert!(said.contains(&format!("rank {rank}")), "{rank}: {said}"));
    }
}
