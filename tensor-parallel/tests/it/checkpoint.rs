//! Checkpoints can be read at a layout other than the one they were written at; at the same layout, training continues
//! bitwise equal.

use std::path::Path;

use crate::common::{Part, batch, bits, on_mesh, sizes, try_on_mesh, values, whole};
use candle_nn::Optimizer;
use comm::{Local, Mesh};
use tensor_parallel::{
    DistributedModel, LanguageModel, LanguageModelConfig, Result, TensorParallel, TensorParallelConfig,
    Weights,
};
use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, OptimizerState};

fn model(
    mesh: &Mesh,
    seed: u64,
    sizes: &LanguageModelConfig,
) -> Result<(TensorParallel<LanguageModel>, Adam)> {
    let make = |builder| LanguageModel::new(builder, sizes);
    let parallel = TensorParallel::new(mesh, &TensorParallelConfig::default(), &Weights::seed(seed), make)?;
    let adam = Adam::named(parallel.named_vars(), AdamConfig::default())?;
    Ok((parallel, adam))
}

fn train(
    parallel: &TensorParallel<LanguageModel>,
    adam: &mut Adam,
    mesh: &Mesh,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let (tokens, next) = batch(&sizes(), step, mesh.axis("dp").unwrap().rank());
        let loss = parallel.model().unwrap().loss(&tokens, &next).unwrap();
        adam.step(&parallel.backward(&loss).unwrap()).unwrap();
    }
}

fn open(folder: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: folder.into(), ..CheckpointConfig::default() }).unwrap()
}

fn same(a: &[Part], b: &[Part]) {
    assert_eq!(a.len(), b.len());
    for ((name, a, _), (other, b, _)) in a.iter().zip(b) {
        assert!((name, bits(a)) == (other, bits(b)), "{name}");
    }
}

/// Returns optimizer state by parameter name, in the shapes of the parts.
fn state(adam: &Adam, field: &str, like: &TensorParallel<LanguageModel>) -> Vec<Part> {
    let all: std::collections::HashMap<_, _> = adam.state().unwrap().into_iter().collect();
    let part = |p: &tensor_parallel::Parameter| {
        (p.name().to_string(), all[&format!("{}.{field}", p.name())].clone(), p.split())
    };
    like.parameters().iter().map(part).collect()
}

#[test]
fn a_run_goes_on_to_the_bit_and_at_other_layouts_with_the_same_weights() {
    for (dp, tp) in [(1, 1), (1, 2), (2, 2), (1, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let written = on_mesh(dp, tp, |mesh| {
            let (parallel, mut adam) = model(mesh, 3, &sizes())?;
            train(&parallel, &mut adam, mesh, 0..3);
            let extra = serde_json::json!({ "of": "the program" });
            let checkpoint = Checkpoint { step: 3, extra, ..Checkpoint::default() };
            parallel.save_checkpoint(&open(folder.path()), Some(&adam), &checkpoint)?;
            let kept = (values(&parallel), state(&adam, "exp_avg", &parallel));
            train(&parallel, &mut adam, mesh, 3..6);
            Ok((kept, values(&parallel)))
        });
        let kept = |of: &dyn Fn(usize) -> Vec<Part>| whole(&(0..tp).map(of).collect::<Vec<_>>());
        let expected = [kept(&|rank| written[rank].0.0.clone()), kept(&|rank| written[rank].0.1.clone())];
        for (other_dp, other_tp) in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)] {
            let read = on_mesh(other_dp, other_tp, |mesh| {
                let (mut parallel, mut adam) = model(mesh, 4, &sizes())?;
                let contents = open(folder.path()).latest()?.unwrap();
                assert_eq!(contents.step, 3);
                assert_eq!(parallel.load_checkpoint(&contents, Some(&mut adam))?["of"], "the program");
                let found = (values(&parallel), state(&adam, "exp_avg", &parallel));
                train(&parallel, &mut adam, mesh, 3..6);
                Ok((found, values(&parallel)))
            });
            for copy in read.chunks(other_tp) {
                let parts =
                    |of: &dyn Fn(usize) -> Vec<Part>| whole(&(0..other_tp).map(of).collect::<Vec<_>>());
                let found = [parts(&|rank| copy[rank].0.0.clone()), parts(&|rank| copy[rank].0.1.clone())];
                for (found, expected) in found.iter().zip(&expected) {
                    for (name, tensor) in found {
                        assert!(
                            bits(tensor) == bits(&expected[name]),
                            "{name}: {dp}x{tp} to {other_dp}x{other_tp}"
                        );
                    }
                }
            }
            if (dp, tp) == (other_dp, other_tp) {
                written.iter().zip(&read).for_each(|(a, b)| same(&a.1, &b.1));
            }
        }
    }
}

#[test]
fn a_checkpoint_that_does_not_fit_is_one_error_on_every_rank_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    on_mesh(1, 2, |mesh| {
        let (parallel, mut adam) = model(mesh, 3, &sizes())?;
        train(&parallel, &mut adam, mesh, 0..1);
        parallel.save_checkpoint(&open(folder.path()), Some(&adam), &Checkpoint::default())?;
        Ok(())
    });
    let refused = |sizes: &LanguageModelConfig| {
        try_on_mesh(1, 2, |mesh| {
            let (mut parallel, mut adam) = model(mesh, 4, sizes)?;
            let before = values(&parallel);
            let contents = open(folder.path()).latest()?.unwrap();
            let message = parallel.load_checkpoint(&contents, Some(&mut adam)).unwrap_err().to_string();
            same(&before, &values(&parallel));
            Ok(message)
        })
        .unwrap()
    };
    for (other, part) in [
        (
            LanguageModelConfig { d_ff: 48, ..sizes() },
            "its layers.0.feed_forward.fc1.weight is [40, 16], and the model's is [48, 16]",
        ),
        (LanguageModelConfig { num_layers: 1, ..sizes() }, "it has a parameter layers.1."),
    ] {
        for message in refused(&other) {
            assert!(message.contains(part), "{message}");
        }
    }
    // Flips one bit.
    let file = open(folder.path()).latest().unwrap().unwrap().path("rank-00001");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    for message in refused(&sizes()) {
        assert!(message.contains("rank-00001.safetensors") && message.contains("SHA-256"), "{message}");
    }
}

#[test]
fn an_optimizer_without_names_cannot_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let lines = on_mesh(1, 2, |mesh| {
        let (parallel, _) = model(mesh, 3, &sizes())?;
        let mut unnamed = Adam::new(parallel.vars(), AdamConfig::default())?;
        train(&parallel, &mut unnamed, mesh, 0..1);
        let saved = parallel.save_checkpoint(&open(folder.path()), Some(&unnamed), &Checkpoint::default());
        Ok(saved.unwrap_err().to_string())
    });
    for line in lines {
        assert!(line.contains("`0.") && line.contains("`TensorParallel::named_vars`"), "{line}");
    }
    assert!(open(folder.path()).latest().unwrap().is_none());
}

/// Models, checkpoints and files belong to one position along a mesh's other axes.
#[test]
fn other_axes_have_models_of_their_own() {
    for axes in [
        &[("pp", 2), ("tp", 2)][..],
        &[("pp", 2), ("dp", 2), ("tp", 2)],
        &[("dp", 2), ("pp", 2), ("tp", 1)],
        &[("tp", 2), ("pp", 2), ("dp", 1)],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Local::run_shared(ranks, |comm| {
            let mesh = Mesh::new(comm, axes)?;
            let stage = mesh.axis("pp")?.rank();
            // Different values for each stage.
            let (mut parallel, mut adam) = model(&mesh, 3 + stage as u64, &sizes())?;
            // The first stage trains for more steps.
            for step in 0..3 - stage {
                let (tokens, next) = batch(&sizes(), step, mesh.axis("dp").map_or(0, |dp| dp.rank()));
                let loss = parallel.model()?.loss(&tokens, &next)?;
                adam.step(&parallel.backward(&loss)?)?;
            }
            let checkpoints = open(&folder.path().join(format!("stage-{stage}")));
            parallel.save_checkpoint(&checkpoints, Some(&adam), &Checkpoint::default())?;
            let file = folder.path().join(format!("stage-{stage}.safetensors"));
            parallel.save_full(&file)?;
            let before = values(&parallel);
            let latest = checkpoints.latest().unwrap().unwrap();
            parallel.load_checkpoint(&latest, Some(&mut adam))?;
            same(&before, &values(&parallel));
            Ok((stage, mesh.axis("tp")?.rank(), before))
        });
        let found = found.unwrap();
        for stage in 0..2 {
            let saved = folder.path().join(format!("stage-{stage}.safetensors"));
            let saved = candle_core::safetensors::load(saved, &candle_core::Device::Cpu).unwrap();
            let place = |place| found.iter().find(|(other, tp, _)| (*other, *tp) == (stage, place));
            let parts: Vec<_> = (0..2).map_while(place).map(|(_, _, parts)| parts.clone()).collect();
            for (name, tensor) in whole(&parts) {
                assert!(bits(&tensor) == bits(&saved[&name]), "{name} of stage {stage} of {axes:?}");
            }
        }
    }
}
