//! A run that is interrupted after a checkpoint goes on as if it had not been.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, VarMap, linear};
use ddp::{Ddp, DdpConfig, DistributedModel, Error, Result};
use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, Sgd, SgdConfig};

use crate::common::{Comm, on_all_ranks, values};

fn model(comm: Comm, features: usize) -> Result<Ddp<Linear>> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(features, 2, vb))
}

fn adam(ddp: &Ddp<Linear>) -> Result<Adam> {
    Ok(Adam::named(ddp.named_vars(), AdamConfig { learning_rate: 0.1, ..AdamConfig::default() })?)
}

/// All ranks have the same rows, so that the number of ranks changes nothing.
fn train(ddp: &Ddp<Linear>, adam: &mut Adam, steps: std::ops::Range<u64>) -> Result<()> {
    for step in steps {
        let loss = ddp.forward(&values(step, &[4, 3], DType::F32))?.sqr()?.mean_all()?;
        adam.step(&ddp.backward(&loss)?)?;
    }
    Ok(())
}

fn weights(ddp: &Ddp<Linear>) -> Vec<f32> {
    let all = ddp.vars().into_iter();
    all.flat_map(|var| var.flatten_all().and_then(|var| var.to_vec1::<f32>()).expect("f32")).collect()
}

fn checkpoints(folder: &tempfile::TempDir) -> Checkpoints {
    let dir = folder.path().join("run");
    Checkpoints::open(CheckpointConfig { dir, ..CheckpointConfig::default() }).expect("a folder")
}

#[test]
fn an_interrupted_run_ends_as_an_undisturbed_one_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let kept = checkpoints(&folder);
    let undisturbed = on_all_ranks(2, |comm| {
        let ddp = model(comm, 3)?;
        let mut adam = adam(&ddp)?;
        train(&ddp, &mut adam, 0..5)?;
        let mine = Tensor::ones(1, DType::F32, &Device::Cpu)?;
        let tensors = [("mine".to_string(), [("x".to_string(), mine)].into())].into();
        let now = Checkpoint { epoch: 1, step: 5, extra: "best".into(), tensors, ..Checkpoint::default() };
        let written = ddp.save_checkpoint(&kept, Some(&adam), &now)?;
        train(&ddp, &mut adam, 5..9)?;
        Ok((written, weights(&ddp)))
    });
    let latest = kept.latest().unwrap().unwrap();
    assert!(undisturbed.iter().all(|(written, _)| *written == latest.folder));
    assert_eq!(latest.files.keys().collect::<Vec<_>>(), ["mine", "rank-00000", "rank-00001"]);
    for ranks in [1, 2, 3] {
        for resumed in on_all_ranks(ranks, |comm| {
            let mut ddp = model(comm, 3)?;
            let mut adam = adam(&ddp)?;
            assert_eq!(ddp.load_checkpoint(&latest, Some(&mut adam))?, "best");
            train(&ddp, &mut adam, latest.step..9)?;
            Ok(weights(&ddp))
        }) {
            let same = resumed.iter().zip(&undisturbed[0].1).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(same, "{ranks} ranks: {resumed:?}, {undisturbed:?}");
        }
    }
}

#[test]
fn what_does_not_fit_changes_nothing_on_any_rank() {
    let folder = tempfile::tempdir().unwrap();
    let kept = checkpoints(&folder);
    on_all_ranks(2, |comm| model(comm, 3)?.save_checkpoint(&kept, None, &Checkpoint::default()));
    let latest = kept.latest().unwrap().unwrap();
    for (message, own) in on_all_ranks(2, |comm| {
        let (mut ddp, before) = {
            let ddp = model(comm, 3)?;
            let before = weights(&ddp);
            (ddp, before)
        };
        let mut adam = adam(&ddp)?;
        let message = ddp.load_checkpoint(&latest, Some(&mut adam)).unwrap_err().to_string();
        Ok((message, weights(&ddp) == before))
    }) {
        assert!(
            message.contains("was written without an optimizer; load it without one") && own,
            "{message}"
        );
    }
    for message in
        on_all_ranks(2, |comm| Ok(model(comm, 4)?.load_checkpoint(&latest, None).unwrap_err().to_string()))
    {
        assert!(message.contains("its weight is [2, 3], and the model's is [2, 4]"), "{message}");
    }
    let damaged = latest.path("rank-00000");
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let found = on_all_ranks(2, |comm| {
        let mut ddp = model(comm, 3)?;
        let mut sgd = Sgd::named(ddp.named_vars(), SgdConfig::default())?;
        Ok(ddp.load_checkpoint(&latest, Some(&mut sgd)).unwrap_err())
    });
    assert!(matches!(&found[1], Error::Strategy(strategy::Error::PeerFailed { rank: 0, .. })), "{found:?}");
    assert!(found.iter().all(|error| error.to_string().contains("cannot be trusted")), "{found:?}");
}
