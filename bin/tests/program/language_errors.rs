//! Errors of `pretrain` and `finetune`: what cannot be trained is told in one line, before ranks start.

use std::fs;

use crate::common::Girandole;
use crate::language::{FINETUNE, PRETRAIN, SMALL, folder, pretrain};

#[test]
fn what_cannot_be_is_said_before_ranks_start() {
    let (folder, data) = folder();
    let out = folder.argument("out");
    let refuse = |options: &[&str]| PRETRAIN.refuse(&[&["--out", &out], &SMALL[..], options].concat());
    let said = refuse(&["--data", &data, "--mesh", "pp=2,tp=2", "--world-size", "8"]);
    assert!(said.contains("--mesh") && said.contains("pp=2,dp=2,tp=2"), "{said}");
    for (options, rows) in [
        (&["--mesh", "dp=3"][..], "a multiple of 3: 3 ranks have different rows\n"),
        (&["--mesh", "pp=3"], "a multiple of 3: rows are computed in 3 equal parts\n"),
        (
            &["--mesh", "dp=2", "--accumulate", "3"],
            "a multiple of 6: 2 ranks have different rows, each in 3 equal",
        ),
    ] {
        let said = refuse(&[&["--data", &data], options].concat());
        assert!(said.contains("--batch-size: got ") && said.contains(rows), "{said}");
    }
    let said = refuse(&["--data", &data, "--recompute", "9"]);
    assert!(said.contains("--recompute: got 9; the model has 2 blocks: give at most that many"), "{said}");
    assert!(refuse(&["--data", &data, "--dropout", "1"]).contains("from 0 to below 1"));
    let odd = ["--out", &out, "--data", &data, "--mesh", "tp=2", "--sequence-parallel", "--length", "15"];
    let said = PRETRAIN.refuse(&odd);
    assert!(said.contains("--length: got 15; --sequence-parallel divides rows over the 2 ranks"), "{said}");
    assert!(
        refuse(&["--data", &data, "--mesh", "zz=3"])
            .contains("the axes are far, pp, dp, shard, cp, ep and tp")
    );
    let said = PRETRAIN.refuse(&["--out", &out, "--data", &data, "--mesh", "cp=4", "--length", "3"]);
    assert!(said.contains("--length: got 3; --mesh cp=4 divides each row: give 4 or more"), "{said}");
    assert!(refuse(&["--data", "nowhere.txt"]).contains("nowhere.txt"));
    fs::write(folder.path("empty.txt"), "").unwrap();
    assert!(refuse(&["--data", &folder.argument("empty.txt")]).contains("empty.txt"));
    let heads = PRETRAIN.refuse(&["--data", &data, "--out", &out, "--hidden", "30", "--heads", "4"]);
    assert!(heads.contains("--hidden"), "{heads}");
    let said = FINETUNE.refuse(&["--model", &folder.argument("nothing"), "--data", &data, "--out", &out]);
    assert!(said.contains("nothing: No such file"), "{said}");
    pretrain(&folder, &data, &[]);
    let finetune = |options: &[&str]| {
        FINETUNE.refuse(
            &[&["--model", &out, "--data", &data, "--out", &folder.argument("tuned")], options].concat(),
        )
    };
    assert!(finetune(&["--lora-rank", "4", "--lora-targets", "nothing"]).contains("q_proj"));
    assert!(finetune(&["--length", "512"]).contains("--length: got 512; the model has 16 positions"));
    assert!(
        finetune(&["--length", "16", "--mesh", "tp=3", "--batch-size", "9"])
            .contains("cannot be divided over tp=3")
    );
}

#[test]
fn a_folder_that_cannot_be_used_is_told_in_one_line() {
    let (folder, data) = folder();
    pretrain(&folder, &data, &[]);
    let (model, tuned) = (folder.path("out"), folder.argument("tuned"));
    let refuse = |command: &Girandole, says: &str| {
        let line = command.refuse(&[
            "--model",
            &folder.argument("out"),
            "--data",
            &data,
            "--out",
            &tuned,
            "--length",
            "16",
        ]);
        assert!(line.contains(says), "{line}");
    };
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let with = |from: &str, to: &str| {
        let changed = config.replace(from, to);
        assert_ne!(changed, config);
        fs::write(model.join("config.json"), changed).unwrap();
    };
    with("\"llama\"", "\"mamba\"");
    for command in [&PRETRAIN, &FINETUNE] {
        refuse(command, "model_type \"mamba\" is not supported; supported are ");
        refuse(command, "llama");
    }
    with("\"vocab_size\": 257", "\"vocab_size\": 100");
    refuse(&PRETRAIN, "the vocabulary is 257 tokens for a model of 100; take the model's own tokenizer");
    refuse(&FINETUNE, "model.embed_tokens.weight is of shape [257, 32] and should be of [100, 32]");
    fs::write(model.join("config.json"), "{").unwrap();
    refuse(&FINETUNE, "config.json: ");
    fs::write(model.join("config.json"), &config).unwrap();
    // An incompletely copied file, a file of another kind, and a file that is named by an index but missing.
    let weights = model.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for damaged in [&whole[..whole.len() - 4], &whole[..100], &whole[..3], b"<html>not found</html>"] {
        fs::write(&weights, damaged).unwrap();
        refuse(&FINETUNE, "model.safetensors: no whole safetensors file: ");
    }
    fs::write(&weights, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 495120\n").unwrap();
    refuse(&FINETUNE, "`git lfs pull` gets the file itself");
    fs::remove_file(&weights).unwrap();
    refuse(&FINETUNE, "there is neither model.safetensors nor model.safetensors.index.json");
    let index = "{\"weight_map\": {\"model.norm.weight\": \"model-00001-of-00002.safetensors\"}}";
    fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    refuse(&FINETUNE, "model-00001-of-00002.safetensors");
    fs::remove_file(model.join("config.json")).unwrap();
    refuse(&FINETUNE, "config.json");
    refuse(&PRETRAIN, "config.json");
    assert!(!folder.path("tuned/config.json").exists());
}

/// Nothing of it is allocated: it would need terabytes.
#[test]
fn a_model_without_room_is_refused_before_ranks_start() {
    let (folder, data) = folder();
    let out = folder.argument("out");
    let sizes = ["--layers", "96", "--hidden", "12288", "--heads", "96", "--length", "64"];
    let common = ["--data", &data, "--out", &out, "--mesh", "shard=2", "--batch-size", "8"];
    let said = PRETRAIN.refuse(&[&common[..], &sizes].concat());
    assert!(said.starts_with("error: --mesh: got shard=2; the 2 ranks here need about 3"), "{said}");
    assert!(said.contains(" TB, and this machine has ") && said.contains("--no-memory-check"), "{said}");
    let one = ["--data", &data, "--out", &out, "--batch-size", "8"];
    let said = PRETRAIN.refuse(&[&one[..], &sizes].concat());
    assert!(said.starts_with("error: the memory for this run is not available: it needs about "), "{said}");
    // With enough memory, nothing is printed.
    pretrain(&folder, &data, &["--no-memory-check"]);
}

#[test]
fn a_run_that_is_refused_leaves_no_folder() {
    let (folder, data) = folder();
    let [out, checkpoints, events] = ["new/out", "new/c", "new/t/u"].map(|name| folder.argument(name));
    let missing = folder.argument("missing.txt");
    let own = ["--out", &out, "--checkpoint-dir", &checkpoints, "--tensorboard", &events];
    for (data, more, said) in [
        (&missing, &[][..], format!("error: cannot read {missing}: No such file")),
        (&data, &["--length", "999999"], "error: ".into()),
        (&data, &["--hidden", "31"], "error: --hidden: got 31".into()),
    ] {
        let line = PRETRAIN.refuse(&[&own[..], &["--data", data], more].concat());
        assert!(line.starts_with(&said), "{line}");
        assert!(!folder.path("new").exists(), "{line}");
    }
    // What was there before stays.
    fs::create_dir_all(folder.path("new/out")).unwrap();
    PRETRAIN.refuse(&[&own[..], &["--data", &missing]].concat());
    assert!(folder.path("new/out").exists() && !folder.path("new/c").exists());
}

#[test]
fn a_file_in_place_of_a_models_folder_is_named() {
    let (folder, data) = folder();
    let (file, out) = (folder.argument("x.safetensors"), folder.argument("out"));
    fs::write(&file, "").unwrap();
    for (command, options, has) in [
        ("generate", &["--prompt", "a"][..], "tokenizer.json"),
        ("evaluate", &["--data", &data], "tokenizer.json"),
        ("finetune", &["--data", &data, "--out", &out], "config.json"),
        ("pretrain", &["--data", &data, "--out", &out], "config.json"),
    ] {
        let line = Girandole(command).refuse(&[&["--model", &file], options].concat());
        assert_eq!(line, format!("error: {file}: it is a file: give the folder that has {has}\n"));
    }
}
