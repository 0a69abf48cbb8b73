//! Checkpoints of one layout are resumed in another.

use std::path::Path;
use std::sync::Arc;

use crate::common::{Setup, optimizer, own_batch, step};
use candle_core::DType;
use girandole::checkpoint::CheckpointReader;
use girandole::comm::Local;
use girandole::training::build::RangeReader;
use girandole::training::{Checkpoint, CheckpointConfig, Checkpoints};
use girandole::{DistributedModel, InitialWeights, Layout};

fn open(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 2 }).unwrap()
}

/// Resumes from the latest checkpoint for some steps, and writes one.
fn go_on(setup: Setup, layout: &str, dir: &Path, steps: usize) -> Vec<f64> {
    let layout: Layout = layout.parse().unwrap();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let (mut adam, checkpoints) = (optimizer(&parallel)?, open(dir));
        let mut begin = 0;
        if let Some(contents) = checkpoints.latest().unwrap() {
            let extra = parallel.load_checkpoint(&contents, Some(&mut adam))?;
            assert_eq!(extra["note"], "kept");
            begin = contents.step as usize;
        }
        let all = (begin..begin + steps).map(|number| step(&mut parallel, &mut adam, number));
        let losses = all.collect::<girandole::Result<Vec<f64>>>()?;
        let extra = serde_json::json!({ "note": "kept" });
        let checkpoint = Checkpoint { step: (begin + steps) as u64, extra, ..Checkpoint::default() };
        parallel.save_checkpoint(&checkpoints, Some(&adam), &checkpoint)?;
        Ok(losses)
    });
    ranks.unwrap().remove(0)
}

/// Layouts, and whether sequences are divided as well.
const CHAIN: [(&str, bool); 18] = [
    ("shard=2", false),
    ("tp=4", false),
    ("", false),
    ("pp=2,dp=2", false),
    ("tp=2", true),
    ("pp=2,shard=2", false),
    ("dp=2,shard=2", false),
    ("pp=2,tp=2", true),
    ("pp=2,shard=2,tp=2", false),
    ("tp=2", false),
    ("shard=2,tp=2", true),
    ("shard=2,tp=2", false),
    ("pp=4", false),
    ("cp=2", false),
    ("shard=2,cp=2", false),
    ("pp=2,cp=2,tp=2", true),
    ("dp=2", false),
    ("shard=2,cp=3", false),
];

#[test]
fn a_run_goes_on_in_any_layout() {
    for (dtype, tied, tolerance) in [(DType::F64, true, 1e-10), (DType::F32, false, 1e-4)] {
        let (setup, all, parts) = (
            Setup { dtype, tied, ..Setup::default() },
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let expected = go_on(setup, "", all.path(), 2 * CHAIN.len());
        let one = |(layout, sequence_parallel): &(&str, bool)| {
            go_on(Setup { sequence_parallel: *sequence_parallel, ..setup }, layout, parts.path(), 2)
        };
        let got: Vec<f64> = CHAIN.iter().flat_map(one).collect();
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (layout, _) = CHAIN[step / 2];
            assert!((got - expected).abs() < tolerance, "{layout}, step {step}: {got}, expected {expected}");
        }
    }
}

/// In bf16 the checkpoint also has what parameters have no room for: a run that goes on has the same bits.
#[test]
fn a_run_in_bf16_goes_on_to_the_bit() {
    for layout in ["", "dp=2", "shard=2", "tp=2", "pp=2", "pp=2,shard=2"] {
        let setup = Setup { dtype: DType::BF16, ..Setup::default() };
        let (all, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let expected = go_on(setup, layout, all.path(), 6);
        let got = [go_on(setup, layout, parts.path(), 3), go_on(setup, layout, parts.path(), 3)].concat();
        assert_eq!(got, expected, "{layout}");
        let values = |dir: &Path| {
            let mut saved = CheckpointReader::open(&open(dir).latest().unwrap().unwrap()).unwrap();
            let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
            let wide = |name: &String| saved.whole(name).unwrap().to_dtype(DType::F32).unwrap();
            let all =
                names.iter().map(wide).map(|value| value.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            all.collect::<Vec<_>>()
        };
        assert!(values(parts.path()) == values(all.path()), "{layout}");
    }
}

#[test]
fn copies_of_the_model_share_the_writing() {
    for (layout, writers) in [("dp=4", 4), ("pp=2,dp=2", 4), ("dp=3,tp=2", 6), ("shard=2", 2)] {
        let (setup, dir) = (Setup::default(), tempfile::tempdir().unwrap());
        go_on(setup, layout, dir.path(), 1);
        let contents = open(dir.path()).latest().unwrap().unwrap();
        let written = contents.files.keys().map(|name| {
            let tensors =
                girandole::training::load_tensors(&contents.path(name), &candle_core::Device::Cpu).unwrap();
            let of_floats = tensors.values().filter(|tensor| tensor.dtype().is_float());
            of_floats.map(candle_core::Tensor::elem_count).sum::<usize>()
        });
        let written: Vec<usize> = written.collect();
        assert_eq!(written.len(), writers, "{layout}");
        if !layout.contains("pp") && !layout.contains("tp") {
            // Parameters and two means of each, as evenly as three can be cut in whole elements.
            let (least, most) = (written.iter().min().unwrap(), written.iter().max().unwrap());
            assert!(most - least <= 3, "{layout}: {written:?}");
        }
    }
}

#[test]
fn a_checkpoint_is_a_source_of_weights() {
    let (setup, dir) = (Setup::default(), tempfile::tempdir().unwrap());
    go_on(setup, "pp=2,shard=2,tp=2", dir.path(), 3);
    let evaluate = |layout: &str, from: bool| {
        let layout: Layout = layout.parse().unwrap();
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let contents = open(dir.path()).latest().unwrap().unwrap();
            let mut parallel = match from {
                true => {
                    let source: Arc<dyn RangeReader> = CheckpointReader::open(&contents)?.into();
                    setup.parallel(comm, &layout, Some(InitialWeights::from(source)))?
                }
                false => setup.parallel(comm, &layout, None)?,
            };
            if !from {
                parallel.load_checkpoint(&contents, None)?;
            }
            let (tokens, targets) = own_batch(&parallel, 9)?;
            Ok(parallel.evaluate(&tokens, &targets)?.loss)
        });
        ranks.unwrap().remove(0)
    };
    let expected = evaluate("", false);
    for layout in ["", "shard=2", "tp=2", "shard=2,tp=2", "pp=2", "pp=2,shard=2"] {
        assert!((evaluate(layout, true) - expected).abs() < 1e-10, "{layout}");
    }
}

#[test]
fn what_is_damaged_or_of_another_model_is_refused() {
    let (setup, dir) = (Setup::default(), tempfile::tempdir().unwrap());
    go_on(setup, "shard=2", dir.path(), 1);
    let load = |setup: Setup| {
        let loaded = Local::run_shared(2, |comm| {
            let mut parallel = setup.parallel(comm, &"tp=2".parse()?, None)?;
            let contents = open(dir.path()).latest().unwrap().unwrap();
            Ok(parallel.load_checkpoint(&contents, None).map(drop).map_err(|error| error.to_string()))
        });
        loaded.unwrap()
    };
    assert!(load(setup).into_iter().all(|loaded| loaded.is_ok()));
    for said in load(Setup { tied: false, ..setup }) {
        let said = said.unwrap_err();
        assert!(said.contains("that is not trained here: it is of another model"), "{said}");
    }
    let folder = open(dir.path()).latest().unwrap().unwrap().folder;
    let file = folder.join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert!(load(setup).into_iter().all(|loaded| loaded.unwrap_err().contains("rank-00001")));
}
