//! Wrong options and files: rejected before anything is done.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, losses, text};
use crate::ddp_transformer::TRANSFORMER;

#[test]
fn sizes_that_do_not_go_together() {
    for (arguments, part) in [
        (
            &["--d-model", "10"][..],
            "--d-model: got 10; it is split over 4 heads (--num-heads): give a multiple",
        ),
        (&["--d-model", "9", "--num-heads", "3"], "--d-model: got 9; positions are encoded in pairs"),
        (&["--length", "1"], "--length: got 1; the next token is predicted from those before it"),
        (
            &["--length", "102"],
            "--length: got 102; the model takes rows of up to 101 tokens with --max-len 100",
        ),
        (
            &["--samples", "101"],
            "--samples: got 101; row i holds token i, and there are 100 tokens (--vocab-size)",
        ),
        (&["--dropout", "1.5"], "give a number from 0 to 1"),
        (&["--dropout", "NaN"], "give a number from 0 to 1"),
        (&["--num-layers", "0"], "1 or more"),
        (&["--mask", "none of them"], "[possible values: document, causal, none]"),
        (&["--vocab-size", "99999999999999999999"], "--vocab-size"),
        (&["--samples", "5", "--data", "x"], "--samples"),
    ] {
        let line = TRANSFORMER.refuse(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
    for option in ["--vocab-size", "--num-layers", "--d-ff", "--d-model"] {
        for much in ["1000000000000", "18446744073709551612"] {
            let line = TRANSFORMER.refuse(&[option, much]);
            assert!(line.contains("memory") || line.contains("make the model smaller"), "{line}");
        }
    }
}

fn save(folder: &Folder, name: &str, tensor: &Tensor) -> String {
    let path = folder.argument("data.safetensors");
    safetensors::save(&[(name.to_string(), tensor.clone())].into(), &path).unwrap();
    path
}

#[test]
fn data_that_does_not_fit() {
    let folder = Folder::new();
    let tokens = |rows: &[[i64; 3]]| Tensor::from_vec(rows.concat(), (rows.len(), 3), &Device::Cpu).unwrap();
    for (name, tensor, part) in [
        ("x", tokens(&[[1, 2, 3]]), "has no tensor `tokens`"),
        (
            "tokens",
            tokens(&[[1, 2, 3]]).to_dtype(DType::F32).unwrap(),
            "`tokens` is F32 [1, 3], expected I64 [*, *]",
        ),
        (
            "tokens",
            tokens(&[[1, 2, 3], [4, 100, 6]]),
            "row 1 has token 100; with --vocab-size 100 there are 0 to 99",
        ),
        ("tokens", tokens(&[[1, 2, 3], [4, -1, 6]]), "row 1 has token -1"),
        ("tokens", tokens(&[]), "it has no rows"),
        (
            "tokens",
            tokens(&[[1, 2, 3]]).narrow(1, 0, 1).unwrap().contiguous().unwrap(),
            "its rows have 1 tokens",
        ),
    ] {
        let line = TRANSFORMER.refuse(&["--data", &save(&folder, name, &tensor)]);
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[test]
fn a_run_takes_given_tokens() {
    let folder = Folder::new();
    let rows = Tensor::new(&[[1i64, 20, 3], [4, 5, 60], [7, 8, 9]], &Device::Cpu).unwrap();
    let (data, lines) = (save(&folder, "tokens", &rows), folder.argument("m.jsonl"));
    let output = TRANSFORMER.succeed(&["--data", &data, "--epochs", "1", "--metrics", &lines]);
    assert!(
        text(&output.stdout).contains("\ntensor([ 1, 20,  3])\ntensor([ 4,  5, 60])\ntensor([7, 8, 9])\n")
    );
    assert_eq!(losses(lines.as_ref()).len(), 1);
}

#[test]
fn weights_of_other_sizes_are_refused() {
    let folder = Folder::new();
    let saved = folder.argument("w.safetensors");
    TRANSFORMER.succeed(&["--epochs", "1", "--save", &saved]);
    let line = TRANSFORMER.refuse(&["--init", &saved, "--d-ff", "32"]);
    assert!(line.contains("`layers.0.ffn.fc1.bias` is F32 [24], expected F32 [32]"), "{line}");
    let line = TRANSFORMER.refuse(&["--init", &saved, "--num-layers", "1"]);
    assert!(line.contains("has a tensor `layers.1."), "{line}");
}
