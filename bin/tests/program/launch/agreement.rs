//! Ranks that are started with different options train nothing, and say which option differs.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Output, Stdio};

use cli::same_options::{JOINT, OWN};
use comm::internal::host_name;

use super::nodes::Nodes;
use crate::common::{Folder, free_port, girandole, text};

/// Sizes of a small language model.
const SMALL: [&str; 10] = ["--layers", "1", "--hidden", "8", "--heads", "2", "--length", "8", "--steps", "2"];

/// Starts the ranks of a job one by one, each with its own arguments, and waits for all.
fn ranks(of_each: &[Vec<&str>]) -> Vec<Output> {
    let port = free_port().to_string();
    let start = |(rank, arguments): (usize, &Vec<&str>)| {
        let mut command = girandole();
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", of_each.len().to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    Nodes(of_each.iter().enumerate().map(start).collect()).end()
}

/// Asserts that all ranks say this, with an exit code for wrong options, and do nothing.
fn refused(of_each: &[Vec<&str>], said: &str) {
    let host = format!(" (host {})", host_name());
    for (rank, output) in ranks(of_each).into_iter().enumerate() {
        let error = text(&output.stderr).replace(&host, "");
        assert_eq!(error, format!("rank {rank}: error: {said}: give all ranks the same\n"), "{of_each:?}");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()), "{of_each:?}");
    }
}

#[test]
fn an_option_that_differs_is_named_by_all_ranks_of_every_command() {
    let fsdp = &["fsdp-mlp", "--features", "8", "--hidden", "8", "--steps", "2"];
    for (common, odd, said) in [
        (&["ddp-mlp", "--epochs", "1"][..], &["--lr", "1"][..], "--lr 1, and rank 0 --lr 0.01"),
        (&["ddp-mlp", "--epochs", "1"], &["--seed", "7"], "--seed 7, and rank 0 --seed 42"),
        (&["ddp-transformer", "--epochs=1"], &["--reshuffle"], "--reshuffle, and rank 0 no --reshuffle"),
        (&["ddp-transformer", "--epochs=1"], &["--mask=none"], "--mask none, and rank 0 --mask document"),
        (
            &["ddp-trainer", "--epochs", "1"],
            &["--batch-size", "8"],
            "--batch-size 8, and rank 0 --batch-size 32",
        ),
        (&["ddp-linear"], &["--keep-total-batch"], "--keep-total-batch, and rank 0 no --keep-total-batch"),
        (fsdp, &["--param-dtype", "f32"], "--param-dtype f32, and rank 0 --param-dtype f16"),
        (&["cifar10", "--epochs", "1"], &["--momentum", "0"], "--momentum 0, and rank 0 --momentum 0.1"),
        (&["tensor-parallel-mlp"], &["--lr", "1"], "--lr 1, and rank 0 --lr 0.001"),
        (&["tensor-parallel-transformer"], &["--seed", "1"], "--seed 1, and rank 0 --seed 42"),
        (&["pipeline-transformer"], &["--split=time"], "--split time, and rank 0 no --split"),
        (&["comm-bench"], &["--sizes", "4K"], "--sizes 4K, and rank 0 --sizes 4K,64K,1M,16M,64M"),
        (&["process-groups"], &["--nodes", "3"], "--nodes 3, and rank 0 --nodes 2"),
    ] {
        refused(&[common.to_vec(), [common, odd].concat()], &format!("rank 1 was given {said}"));
    }
    let folder = Folder::new();
    let saved = folder.argument("w");
    let odd = [&fsdp[..], &["--save", &saved]].concat();
    refused(&[fsdp.to_vec(), odd], &format!("rank 1 was given --save {saved}, and rank 0 no --save"));
    let commands = [vec!["ddp-mlp"], vec!["ddp-trainer"], vec!["ddp-mlp"]];
    refused(&commands, "rank 1 was given the command ddp-trainer, and rank 0 the command ddp-mlp");
    let first = [vec!["ddp-mlp", "--lr", "1"], vec!["ddp-mlp"], vec!["ddp-mlp"]];
    refused(&first, "rank 0 was given --lr 1, and rank 1 --lr 0.01");
}

#[test]
fn options_that_are_equal_or_a_ranks_own_may_be_written_in_any_way() {
    let folder = Folder::new();
    fs::write(folder.path("r.toml"), "lr = 0.5\n").unwrap();
    let [recipe, save, metrics] = ["r.toml", "w.safetensors", "m.jsonl"].map(|name| folder.argument(name));
    let common = ["ddp-mlp", "--epochs", "1"];
    let own = ["--lr", "5e-1", "--save", &save, "--metrics", &metrics, "--timeout", "299"];
    let outputs = ranks(&[
        [&common[..], &own].concat(),
        [&common[..], &["--recipe", &recipe, "--num-workers", "1"]].concat(),
    ]);
    for output in outputs {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(folder.path("w.safetensors").exists());
    let odd = [[&common[..], &["--lr", "0.4"]].concat(), [&common[..], &["--recipe", &recipe]].concat()];
    refused(&odd, "rank 1 was given --lr 0.5, and rank 0 --lr 0.4");
}

#[test]
fn files_may_lie_elsewhere_and_must_have_the_same_content() {
    let folder = Folder::new();
    let texts = ["to be or not to be, that is the question", "to be or not to be, that is the answer!!"];
    fs::write(folder.path("a.txt"), texts[0]).unwrap();
    fs::write(folder.path("same.txt"), texts[0]).unwrap();
    fs::write(folder.path("b.txt"), texts[1]).unwrap();
    let [a, same, b, out] = ["a.txt", "same.txt", "b.txt", "out"].map(|name| folder.argument(name));
    let of = |data: &[&str]| -> Vec<String> {
        let own = ["pretrain", "--out", &out, "--overwrite", "--batch-size", "2"];
        own.iter().chain(&SMALL).chain(data).map(|word| word.to_string()).collect()
    };
    let both = |one: &[&str], other: &[&str]| {
        let all = [of(one), of(other)];
        ranks(&all.each_ref().map(|words| words.iter().map(String::as_str).collect()))
    };
    for output in both(&["--data", &a], &["--data", &same]) {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    for (one, other, option) in [
        (vec!["--data", &a], vec!["--data", &b], "--data"),
        (vec!["--data", &a, "--evaluate", &a], vec!["--data", &a, "--evaluate", &b], "--evaluate"),
    ] {
        for output in both(&one, &other) {
            let said = text(&output.stderr).replace(&format!(" (host {})", host_name()), "");
            let begin = format!("error: rank 1 was given {option} {b} of 41 tokens with SHA-256 ");
            assert!(said.contains(&begin), "{said}");
            assert!(
                said.contains(&format!(", and rank 0 {option} {a} of 41 tokens with SHA-256 ")),
                "{said}"
            );
            assert_eq!(said.lines().count(), 1, "{said}");
            assert_eq!(output.status.code(), Some(2));
        }
    }
    let weights = |name: &str, seed: &'static str| {
        let path = folder.argument(name);
        let own = ["ddp-mlp", "--epochs", "1", "--seed", seed, "--save", &path];
        assert!(girandole().args(own).output().unwrap().status.success());
        path
    };
    let [first, second] = [weights("1.safetensors", "1"), weights("2.safetensors", "2")];
    let outputs = ranks(&[vec!["ddp-mlp", "--init", &first], vec!["ddp-mlp", "--init", &second]]);
    for output in outputs {
        let said = text(&output.stderr);
        assert!(said.contains(&format!("was given --init {second} of ")), "{said}");
        assert_eq!(output.status.code(), Some(2));
    }
}

#[test]
fn a_file_that_is_missing_is_told_before_the_other_ranks_come() {
    let folder = Folder::new();
    let [missing, out] = ["missing", "out"].map(|name| folder.argument(name));
    for arguments in [&["ddp-mlp", "--init", &missing][..], &["pretrain", "--data", &missing, "--out", &out]]
    {
        let mut command = girandole();
        command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", free_port().to_string()).args(arguments).args(["--timeout", "5"]);
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert!(said.contains(&format!("cannot read {missing}: No such file")), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn options_that_are_not_compared_exist() {
    let commands = bin::commands();
    let options = commands.get_subcommands().flat_map(|command| command.get_arguments());
    let known: BTreeSet<&str> = options.filter_map(|option| option.get_long()).collect();
    for name in OWN.iter().chain(&JOINT) {
        assert!(known.contains(name), "{name}");
    }
}
