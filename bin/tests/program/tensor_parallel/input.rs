//! Wrong options: rejected in one line, before anything is done.

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, refuse_with};
use crate::tensor_parallel::{MLP, TRANSFORMER};

#[test]
fn layouts_that_are_none() {
    for (arguments, part) in [
        (&["--tp", "3", "--world-size", "4"][..], "--tp: got 3; it does not divide 4 ranks (--world-size)"),
        (&["--dp", "3", "--world-size", "4"], "--dp: got 3; it does not divide 4 ranks"),
        (&["--dp", "2", "--tp", "4", "--world-size", "4"], "--tp: got 4; with --dp 2 that is not 4 ranks"),
        (&["--tp", "0"], "1 or more"),
        (&["--tp", "99999999"], "--world-size: got 99999999"),
        (
            &["--tp", "8", "--hidden-size", "1"],
            "--hidden-size: got 1; the first layer has four times as many outputs",
        ),
        (&["--batch-size", "5", "--sequence-parallel"], "--batch-size: got 5; it is divided over 2"),
        (
            &["--samples", "33", "--sequence-parallel"],
            "--samples: got 33; with --sequence-parallel each batch is divided over 2 ranks (--tp), but the last batch of an epoch has 1: ",
        ),
    ] {
        let line = MLP.refuse(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn ranks_that_somebody_else_has_started_are_not_counted_anew() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NODELIST", "localhost")];
    let mpi =
        [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")];
    for scheduler in [slurm, mpi] {
        let mut command = MLP.command();
        command.envs(scheduler).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29500");
        let (line, code) = refuse_with(&mut command, &["--tp", "3"]);
        let told = "error: --tp: got 3; it does not divide 4 ranks (--world-size)\n";
        assert_eq!((line.as_str(), code), (told, 2), "{scheduler:?}");
    }
}

#[test]
fn data_of_which_a_batch_cannot_be_divided() {
    let folder = Folder::new();
    let data = folder.argument("data.safetensors");
    let zeros = || Tensor::zeros((5, 16), DType::F32, &Device::Cpu).unwrap();
    let tensors = [("x".to_string(), zeros()), ("y".to_string(), zeros())].into();
    safetensors::save(&tensors, &data).unwrap();
    let arguments = ["--hidden-size", "16", "--tp", "2", "--batch-size", "4", "--data", &data];
    let line = MLP.refuse(&[&arguments[..], &["--sequence-parallel"]].concat());
    let expected =
        format!("error: {data}: tensor `x`: it has 5 samples; with --sequence-parallel each batch");
    assert!(line.starts_with(&expected) && line.contains("the last batch of an epoch has 1: "), "{line}");
    MLP.succeed(&arguments);
}

#[test]
fn sizes_that_do_not_go_together() {
    for (arguments, part) in [
        (&["--num-heads", "3"][..], "--d-model: got 128; it is split over 3 heads (--num-heads)"),
        (
            &["--num-heads", "4", "--tp", "8"],
            "--num-heads: got 4; it is divided over 8 tensor-parallel ranks (--tp)",
        ),
        (&["--vocab-size", "1"], "--vocab-size: got 1; it is divided over 2 tensor-parallel ranks"),
        (&["--d-ff", "9"], "--d-ff: got 9; it is divided over 2"),
        (&["--length", "1"], "--length: got 1; the next token is predicted from those before it"),
        (&["--length", "66"], "--length: got 66; the model takes rows of up to 65 tokens with --max-len 64"),
        (
            &["--length", "32", "--sequence-parallel"],
            "--length: got 32; with --sequence-parallel all its tokens except one",
        ),
        (&["--dropout", "2"], "give a number from 0 to 1"),
    ] {
        let line = TRANSFORMER.refuse(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}
