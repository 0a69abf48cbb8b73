//! Weights and data from files, at any number of ranks.

use candle_core::{Device, Tensor, safetensors};

use crate::common::{Folder, assert_close, losses};
use crate::fsdp_mlp::{FSDP, SMALL};

#[test]
fn checkpoints_are_kept_without_being_asked_how_often() {
    let folder = Folder::new();
    let dir = folder.argument("checkpoints");
    FSDP.succeed(&[&SMALL[..], &["--steps", "41", "--world-size", "2", "--checkpoint-dir", &dir]].concat());
    let steps = |name: &str| {
        let path = folder.path("checkpoints").join(name).join("checkpoint.json");
        let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        manifest["step"].as_u64().unwrap()
    };
    // Of the checkpoints after steps 20, 40 and 41 the last two are kept.
    assert_eq!(["checkpoint-00000002", "checkpoint-00000003"].map(steps), [40, 41]);
}

#[test]
fn trained_weights_are_gone_on_with_at_any_number_of_ranks() {
    let folder = Folder::new();
    let [data, weights] = ["data", "weights"].map(|name| folder.argument(name));
    let mut generator = sampler::Generator::new(3);
    let x = Tensor::from_vec(generator.randn(48 * 24).unwrap(), (48, 24), &Device::Cpu).unwrap();
    let y = Tensor::new(generator.randint(48, 0, 10).unwrap(), &Device::Cpu).unwrap();
    safetensors::save(&[("x".to_string(), x), ("y".to_string(), y)].into(), &data).unwrap();
    FSDP.succeed(&[&SMALL[..], &["--data", &data, "--steps", "30", "--save", &weights]].concat());
    // All 48 samples in one step, so that every number of ranks has the same global batch.
    let after = |ranks: usize, dtype: &str| {
        let (lines, saved) = (folder.argument("m.jsonl"), folder.argument("saved"));
        let (batch, ranks) = ((48 / ranks).to_string(), ranks.to_string());
        let arguments =
            ["--features", "24", "--hidden", "50", "--data", &data, "--init", &weights, "--steps", "3"];
        let more = ["--world-size", &ranks, "--batch-size", &batch, "--save", &saved, "--metrics", &lines];
        FSDP.succeed(&[&arguments[..], &more, &["--param-dtype", dtype]].concat());
        assert_eq!(losses(lines.as_ref()).len(), 3);
        let saved = safetensors::load(saved, &Device::Cpu).unwrap();
        saved["layer3.weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let alone = after(1, "f32");
    for ranks in [2, 3, 4] {
        let close = after(ranks, "f32");
        // Adam steps by about the learning rate even where a gradient is only nearly zero.
        let far = close.iter().zip(&alone).filter(|(a, b)| (**a - **b).abs() > 1e-5).count();
        assert!(far * 1000 < alone.len(), "{ranks} ranks: {far} of {} differ", alone.len());
    }
    // With 16 bits: within what a few steps can change.
    for dtype in ["f16", "bf16"] {
        let gap = after(2, dtype).iter().zip(&alone).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(gap > 0.0 && gap < 0.01, "{dtype}: {gap}");
    }
    assert_close(&after(1, "f32"), &alone, "the same again");
}
