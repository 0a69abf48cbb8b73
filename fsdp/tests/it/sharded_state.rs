//! State that is saved at one number of ranks can be resumed at any other, with the same result.

use std::path::Path;

use crate::common::{
    Alone, Comm, INPUTS, Mlp, OUTPUTS, assert_close, full_tensors, numbers, on_all_ranks, parameters, start,
    values,
};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, VarBuilder, linear, loss};
use fsdp::{DistributedModel, Fsdp, FsdpConfig, Result, ShardingStrategy};
use proptest::prelude::*;
use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, OptimizerState};

const STEPS: usize = 4;
/// Samples of all ranks together, whatever the number of ranks.
const BATCH: usize = 12;

fn batch(step: usize, rank: usize, world_size: usize) -> (Tensor, Tensor) {
    let part =
        |tensor: Tensor| tensor.narrow(0, rank * BATCH / world_size, BATCH / world_size).expect("a part");
    let seed = 70 + step as u64;
    (part(values(seed, &[BATCH, INPUTS], DType::F64)), part(values(seed + 50, &[BATCH, OUTPUTS], DType::F64)))
}

fn adam() -> AdamConfig {
    AdamConfig { learning_rate: 0.01, ..AdamConfig::default() }
}

fn steps(fsdp: &Fsdp<Mlp>, optimizer: &mut Adam, from: usize, rank: usize, ranks: usize) -> Result<()> {
    for step in from..from + STEPS {
        let (x, y) = batch(step, rank, ranks);
        let grads = fsdp.backward(&loss::mse(&fsdp.forward(&x)?, &y)?)?;
        optimizer.step(&grads)?;
    }
    Ok(())
}

fn checkpoints(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.to_path_buf(), ..CheckpointConfig::default() })
        .expect("a folder")
}

fn fsdp(comm: Comm, config: &FsdpConfig) -> Result<(Fsdp<Mlp>, Adam)> {
    let fsdp = Mlp::fsdp(comm, 1, DType::F64, config)?;
    let optimizer = Adam::named(fsdp.named_vars(), adam())?;
    Ok((fsdp, optimizer))
}

fn first_half(dir: &Path, ranks: usize, config: &FsdpConfig) {
    on_all_ranks(ranks, |comm| {
        let rank = comm.rank();
        let (fsdp, mut optimizer) = fsdp(comm, config)?;
        steps(&fsdp, &mut optimizer, 0, rank, ranks)?;
        let extra = serde_json::json!({ "note": "of the user's" });
        let checkpoint = Checkpoint { step: STEPS as u64, extra, ..Checkpoint::default() };
        let folder = fsdp.save_checkpoint(&checkpoints(dir), Some(&optimizer), &checkpoint)?;
        assert!(folder.ends_with("checkpoint-00000001"), "{folder:?}");
        Ok(())
    });
}

fn second_half(dir: &Path, ranks: usize, config: &FsdpConfig) -> Vec<f64> {
    let ends = on_all_ranks(ranks, |comm| {
        let rank = comm.rank();
        let (mut fsdp, mut optimizer) = fsdp(comm, config)?;
        let contents = checkpoints(dir).latest()?.expect("a checkpoint");
        assert_eq!(contents.step, STEPS as u64);
        let extra = fsdp.load_checkpoint(&contents, Some(&mut optimizer))?;
        assert_eq!(extra["note"], "of the user's");
        steps(&fsdp, &mut optimizer, STEPS, rank, ranks)?;
        parameters(&fsdp)
    });
    ends[0].clone()
}

/// Trains in a single process without interruption; returns the parameters half-way and at the end.
fn alone() -> candle_core::Result<(Vec<f64>, Vec<f64>)> {
    let model = Alone::new(1, DType::F64)?;
    let mut optimizer = Adam::new(model.list(), adam())?;
    let mut half = vec![];
    for step in 0..2 * STEPS {
        if step == STEPS {
            half = model.values();
        }
        let (x, y) = batch(step, 0, 1);
        optimizer.backward_step(&loss::mse(&model.forward(&x)?, &y)?)?;
    }
    Ok((half, model.values()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]
    #[test]
    fn a_run_goes_on_at_another_number_of_ranks(
        ranks in prop_oneof![Just((1, 3)), Just((2, 2)), Just((3, 1)), Just((4, 2)), Just((2, 4)), Just((3, 4)), Just((4, 3))],
        pack in prop_oneof![Just((0, 20)), Just((20, usize::MAX)), Just((30, 30))],
        strategies in (0usize..3, 0usize..3),
    ) {
        let kinds = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];
        let config = |pack_elements, kind: usize| {
            FsdpConfig { pack_elements, strategy: kinds[kind], ..FsdpConfig::default() }
        };
        let folder = tempfile::tempdir().expect("a folder");
        first_half(folder.path(), ranks.0, &config(pack.0, strategies.0));
        let (half, end) = alone().expect("one process trains");
        let contents = checkpoints(folder.path()).latest().expect("whole").expect("there");
        let mut full = full_tensors(&contents).expect("readable");
        full.sort_by_key(|(name, _)| name.clone());
        assert_close(&numbers(full.iter().map(|(_, tensor)| tensor)), &half, 1e-9);
        assert_close(&second_half(folder.path(), ranks.1, &config(pack.1, strategies.1)), &end, 1e-9);
    }
}

#[test]
fn full_files_are_read_and_written_at_any_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let (first, second) = (folder.path().join("first.safetensors"), folder.path().join("second.safetensors"));
    let other = start(9, DType::F64);
    candle_core::safetensors::save(&other, &first).expect("written");
    for ranks in 1..=4 {
        for pack_elements in [0, 20, usize::MAX] {
            let config = FsdpConfig { pack_elements, ..FsdpConfig::default() };
            on_all_ranks(ranks, |comm| {
                let (fsdp, _) = fsdp(comm, &config)?;
                fsdp.load_full(&first)?;
                fsdp.save_full(&second)
            });
            let written = candle_core::safetensors::load(&second, &Device::Cpu).expect("read");
            assert_eq!(written.len(), other.len());
            for (name, tensor) in &other {
                assert_eq!(numbers([tensor]), numbers([&written[name]]), "{name}");
                assert_eq!(tensor.dims(), written[name].dims());
            }
        }
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

/// Returns the error on rank 0 of two; checks that every rank fails, without changes.
fn refused(act: impl Fn(&mut Fsdp<Mlp>) -> Result<()> + Sync) -> String {
    let lines = on_all_ranks(2, |comm| {
        let (mut fsdp, mut optimizer) = fsdp(comm.clone(), &FsdpConfig::default())?;
        let before = parameters(&fsdp)?;
        let line = act(&mut fsdp).expect_err("refused").to_string();
        assert_eq!(parameters(&fsdp)?, before, "nothing has changed");
        steps(&fsdp, &mut optimizer, 0, comm.rank(), 2)?;
        Ok(line)
    });
    assert!(lines.iter().all(|line| !line.contains('\n')), "{lines:?}");
    lines[0].clone()
}

#[test]
fn files_that_do_not_fit_are_refused_and_training_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let save = |change: &dyn Fn(&mut std::collections::HashMap<String, Tensor>)| {
        let mut tensors = start(2, DType::F64);
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, &path).expect("written");
    };
    let load = |fsdp: &mut Fsdp<Mlp>| fsdp.load_full(&path);
    assert!(refused(load).contains("cannot read"));
    save(&|tensors| drop(tensors.remove("l1.bias")));
    assert!(refused(load).contains("has no tensor `l1.bias` (F64 [7])"));
    save(&|tensors| drop(tensors.insert("l1.bias".into(), values(1, &[8], DType::F64))));
    assert!(refused(load).contains("tensor `l1.bias` is F64 [8], expected F64 [7]"));
    save(&|tensors| drop(tensors.insert("more".into(), values(1, &[8], DType::F64))));
    assert!(refused(load).contains("has a tensor `more` (F64 [8]) that the model has not"));
    save(&|_| ());
    let whole = std::fs::read(&path).expect("there");
    std::fs::write(&path, &whole[..whole.len() - 1]).expect("written");
    assert!(refused(load).contains("and by its header"));
    std::fs::write(&path, [255; 20]).expect("written");
    assert!(refused(load).contains("is not a whole safetensors file"));
    let nowhere = folder.path().join("no folder").join("w.safetensors");
    assert!(refused(|fsdp| fsdp.save_full(&nowhere)).contains("cannot write"));
}

#[test]
fn checkpoints_that_are_damaged_or_of_another_model_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    first_half(folder.path(), 3, &FsdpConfig::default());
    let checkpoints = checkpoints(folder.path());
    let contents = checkpoints.latest().expect("whole").expect("there");
    let other = on_all_ranks(2, |comm| {
        let vb = VarBuilder::from_tensors(start(1, DType::F64), DType::F64, &Device::Cpu);
        let mut fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
            units.pp("l0").unit(|vb| linear(INPUTS, 9, vb))
        })?;
        Ok(fsdp.load_checkpoint(&contents, None).expect_err("another model").to_string())
    });
    assert!(other[0].contains("it is of another model"), "{}", other[0]);
    let file = contents.path("rank-00001");
    let mut bytes = std::fs::read(&file).expect("there");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(&file, &bytes).expect("written");
    let line = refused(|fsdp| fsdp.load_checkpoint(&contents, None).map(drop));
    assert!(line.contains("rank-00001.safetensors") && line.contains("SHA-256"), "{line}");
    std::fs::remove_file(&file).expect("there");
    let line = refused(|fsdp| fsdp.load_checkpoint(&contents, None).map(drop));
    assert!(line.contains("rank-00001.safetensors"), "{line}");
    let plain = Checkpoint { step: 1, ..Checkpoint::default() };
    let plain = checkpoints.contents(&checkpoints.save(&plain).expect("saved")).expect("whole");
    let line = refused(|fsdp| fsdp.load_checkpoint(&plain, None).map(drop));
    assert!(line.contains("it is no checkpoint of a model in any layout"), "{line}");
}

#[test]
fn an_optimizer_of_another_kind_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    first_half(folder.path(), 2, &FsdpConfig::default());
    let contents = checkpoints(folder.path()).latest().expect("whole").expect("there");
    let line = refused(|fsdp| {
        let mut sgd = training::Sgd::named(
            fsdp.named_vars(),
            training::SgdConfig { momentum: 0.9, ..Default::default() },
        )?;
        let optimizer: &mut dyn OptimizerState = &mut sgd;
        fsdp.load_checkpoint(&contents, Some(optimizer)).map(drop)
    });
    assert!(line.contains("exp_avg"), "{line}");
}

#[test]
fn an_optimizer_without_names_cannot_be_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let (fsdp, _) = fsdp(comm, &FsdpConfig::default())?;
        let mut unnamed = Adam::new(fsdp.vars(), adam())?;
        steps(&fsdp, &mut unnamed, 0, rank, 2)?;
        let saved = fsdp.save_checkpoint(&checkpoints(folder.path()), Some(&unnamed), &Checkpoint::default());
        Ok(saved.expect_err("refused").to_string())
    });
    for line in lines {
        assert!(line.contains("`0.") && line.contains("make it from `Fsdp::named_vars`"), "{line}");
    }
    assert!(checkpoints(folder.path()).latest().expect("no error").is_none());
}

#[test]
fn a_load_forgets_what_was_accumulated_and_gathered() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        let folder = tempfile::tempdir().expect("a folder");
        let full = folder.path().join("full.safetensors");
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        on_all_ranks(2, |comm| {
            let rank = comm.rank();
            let (mut fsdp, mut optimizer) = fsdp(comm, &config)?;
            let checkpoints = checkpoints(&folder.path().join("kept"));
            fsdp.save_checkpoint(&checkpoints, None, &Checkpoint::default())?;
            fsdp.save_full(&full)?;
            let (x, y) = batch(0, rank, 2);
            let pass = |fsdp: &Fsdp<Mlp>| -> Result<(f64, Vec<f64>)> {
                let loss = loss::mse(&fsdp.forward(&x)?, &y)?;
                let grads = fsdp.backward(&loss)?;
                let vars = fsdp.vars();
                let all = numbers(vars.iter().map(|var| grads.get(var).expect("a gradient")));
                Ok((loss.to_scalar()?, all))
            };
            let expected = pass(&fsdp)?;
            for whole in [false, true] {
                steps(&fsdp, &mut optimizer, 0, rank, 2)?;
                fsdp.backward_no_sync(&(fsdp.forward(&x)? * f64::NAN)?.sum_all()?)?;
                match whole {
                    true => fsdp.load_full(&full)?,
                    false => {
                        fsdp.load_checkpoint(&checkpoints.latest()?.expect("one"), None)?;
                    }
                }
                assert_eq!(fsdp.memory().gradients.live, 0, "{strategy:?}");
                assert_eq!(pass(&fsdp)?, expected, "{strategy:?}");
            }
            // Saving and reading the parameters keeps accumulated gradients.
            fsdp.backward_no_sync(&loss::mse(&fsdp.forward(&x)?, &y)?)?;
            fsdp.save_checkpoint(&checkpoints, None, &Checkpoint::default())?;
            parameters(&fsdp)?;
            let twice: Vec<f64> = expected.1.iter().map(|x| 2.0 * x).collect();
            assert_close(&pass(&fsdp)?.1, &twice, 1e-12);
            Ok(())
        });
    }
}

#[test]
fn a_manifest_of_shapes_beyond_all_bounds_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    first_half(folder.path(), 2, &FsdpConfig::default());
    let checkpoints = checkpoints(folder.path());
    let written = checkpoints.latest().expect("whole").expect("there");
    let read =
        |name: &String| candle_core::safetensors::load(written.path(name), &Device::Cpu).expect("read");
    let tensors: Vec<_> = written.files.keys().map(|name| (name, read(name))).collect();
    let problem = "its parts of l0.weight are not the whole";
    for dims in [
        serde_json::json!([1u64 << 40, 1u64 << 40]),
        serde_json::json!([u64::MAX]),
        serde_json::json!([0, 1u64 << 63, 4]),
        serde_json::json!([1u64 << 62]),
    ] {
        let draft = checkpoints.begin().expect("begun");
        let mut files = std::collections::BTreeMap::new();
        for (name, tensors) in &tensors {
            files.insert((*name).clone(), draft.write(name, tensors).expect("written"));
        }
        let mut extra = written.extra.clone();
        extra["parameters"]["l0.weight"]["dims"] = dims.clone();
        let changed = Checkpoint { extra, ..Checkpoint::default() };
        let contents = checkpoints.contents(&draft.commit(&changed, files).expect("saved")).expect("whole");
        let line = refused(|fsdp| fsdp.load_checkpoint(&contents, None).map(drop));
        assert!(line.contains(problem), "{dims}: {line}");
        let line = full_tensors(&contents).expect_err("refused").to_string();
        assert!(line.contains(problem), "{dims}: {line}");
    }
}
