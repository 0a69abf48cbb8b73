//! Damaged checkpoints are refused, the error names the damaged file and the newest intact checkpoint.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use proptest::prelude::*;
use sampler::SamplerState;
use training::{
    Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, Error, FileHash, OptimizerState, Result,
};

fn checkpoint(step: u64) -> Checkpoint {
    let tensor = Tensor::full(step as f32, 50, &Device::Cpu).unwrap();
    let tensors = HashMap::from([("w".to_string(), tensor)]);
    let tensors =
        BTreeMap::from([("model".to_string(), tensors.clone()), ("optimizer".to_string(), tensors)]);
    Checkpoint { step, tensors, sampler: serde_json::json!({ "seed": 3 }), ..Checkpoint::default() }
}

/// A folder to which checkpoints of steps 1 to 3 were saved, the last two of which were kept.
fn three(dir: &Path) -> (Checkpoints, PathBuf) {
    let config = CheckpointConfig { dir: dir.to_path_buf(), ..CheckpointConfig::default() };
    let checkpoints = Checkpoints::open(config).unwrap();
    let folders: Vec<_> = (1..=3).map(|step| checkpoints.save(&checkpoint(step)).unwrap()).collect();
    assert_eq!(checkpoints.list().unwrap(), folders[1..]);
    (checkpoints, folders[2].clone())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 3);
    files
}

/// Checkpoint files have the same permissions as other new files of the user.
#[cfg(unix)]
#[test]
fn files_have_the_mode_of_new_files() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let (_, folder) = three(dir.path());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    fs::write(dir.path().join("new"), "").unwrap();
    for file in files(&folder) {
        assert_eq!(mode(&file), mode(&dir.path().join("new")), "{}", file.display());
    }
}

/// Asserts that loading the latest checkpoint fails and names the file `damaged`, and that the error offers the
/// checkpoint of step `good`, which can be loaded.
fn assert_refused(checkpoints: &Checkpoints, damaged: &Path, good: Option<u64>) {
    let error = checkpoints.load_latest(&Device::Cpu).unwrap_err();
    let message = error.to_string();
    let Error::DamagedCheckpoint { file, good: offered, .. } = error else { panic!("{message}") };
    assert_eq!(file, damaged);
    assert!(message.contains(&*damaged.to_string_lossy()) && !message.contains('\n'), "{message}");
    match good {
        None => assert_eq!(offered.0, None),
        Some(step) => {
            assert!(message.contains(&*offered.0.clone().unwrap().to_string_lossy()), "{message}");
            assert_eq!(checkpoints.load(&offered.0.unwrap(), &Device::Cpu).unwrap().step, step);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_flipped_bit_or_a_cut_is_refused(which in 0usize..3, place in 0.0f64..1.0, bit in 0u8..9) {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoints, folder) = three(dir.path());
        let file = &files(&folder)[which];
        let mut bytes = fs::read(file).unwrap();
        let place = (place * bytes.len() as f64) as usize;
        match bit {
            8 => bytes.truncate(place),
            _ => bytes[place] ^= 1 << bit,
        }
        fs::write(file, bytes).unwrap();
        assert_refused(&checkpoints, file, Some(2));
    }
}

#[test]
fn a_lost_file_and_a_file_that_grew_are_refused() {
    for which in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoints, folder) = three(dir.path());
        let file = &files(&folder)[which];
        let bytes = fs::read(file).unwrap();
        fs::write(file, [&bytes[..], b" "].concat()).unwrap();
        assert_refused(&checkpoints, file, Some(2));
        fs::remove_file(file).unwrap();
        assert_refused(&checkpoints, file, Some(2));
    }
}

#[test]
fn two_damaged_ones_leave_nothing_to_offer() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoints, folder) = three(dir.path());
    for folder in checkpoints.list().unwrap() {
        fs::write(folder.join("model.safetensors"), "").unwrap();
    }
    assert_refused(&checkpoints, &folder.join("model.safetensors"), None);
}

#[test]
fn every_bit_of_the_pointer_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoints, _) = three(dir.path());
    let latest = dir.path().join("latest");
    let whole = fs::read(&latest).unwrap();
    for place in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << bit;
            fs::write(&latest, bytes).unwrap();
            let error = checkpoints.load_latest(&Device::Cpu).unwrap_err();
            assert!(matches!(error, Error::DamagedCheckpoint { .. }), "{error}");
        }
    }
    // Without the pointer the newest checkpoint is loaded.
    fs::remove_file(&latest).unwrap();
    assert_eq!(checkpoints.load_latest(&Device::Cpu).unwrap().unwrap().step, 3);
}

#[test]
fn a_run_goes_on_from_what_was_kept() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { dir: dir.path().join("a/b"), keep: 1 };
    let weight = Var::new(&[1f64, 2.], &Device::Cpu)?;
    let named = || [("w".to_string(), weight.clone())];
    let mut adam = Adam::named(named(), AdamConfig::adamw())?;
    adam.backward_step(&weight.sqr()?.sum_all()?)?;
    let sampler = SamplerState { dataset_len: 10, seed: u64::MAX, shuffle: true, epoch: 3, consumed: 4 };
    let model = HashMap::from([("w".to_string(), weight.as_tensor().clone())]);
    let optimizer = adam.state()?.into_iter().collect();
    let saved = Checkpoint {
        epoch: 3,
        step: 1,
        sampler: serde_json::to_value(&sampler).unwrap(),
        extra: serde_json::json!({ "accuracy": 0.5 }),
        tensors: [("model".to_string(), model), ("optimizer".to_string(), optimizer)].into(),
    };
    let folder = Checkpoints::open(config.clone())?.save(&saved)?;
    let loaded = Checkpoints::open(config)?.load_latest(&Device::Cpu)?.unwrap();
    assert_eq!(serde_json::from_value::<SamplerState>(loaded.sampler).unwrap(), sampler);
    assert_eq!(loaded.extra["accuracy"], 0.5);
    assert_eq!(loaded.tensors["model"]["w"].to_vec1::<f64>()?, weight.to_vec1::<f64>()?);
    Adam::named(named(), AdamConfig::adamw())?.load_state(&loaded.tensors["optimizer"])?;
    // The manifest can be read by other programs.
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("checkpoint.json")).unwrap()).unwrap();
    assert_eq!(json["step"], 1);
    assert_eq!(json["tensors"]["model"]["sha256"].as_str().unwrap().len(), 64);
    Ok(())
}

#[test]
fn what_makes_no_sense_is_refused() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { dir: dir.path().to_path_buf(), keep: 0 };
    assert!(Checkpoints::open(config.clone()).unwrap_err().to_string().contains("keep"));
    let checkpoints = Checkpoints::open(CheckpointConfig { keep: 1, ..config })?;
    assert!(checkpoints.load_latest(&Device::Cpu)?.is_none());
    for name in ["", "../model", "a/b", "a.b", "é"] {
        let tensors = HashMap::from([("w".to_string(), Tensor::zeros(1, DType::F32, &Device::Cpu)?)]);
        let bad = Checkpoint { tensors: [(name.to_string(), tensors)].into(), ..Checkpoint::default() };
        assert!(matches!(checkpoints.save(&bad), Err(Error::InvalidName { .. })), "{name}");
    }
    assert!(checkpoints.list()?.is_empty());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error =
        Checkpoints::open(CheckpointConfig { dir: file.join("run"), keep: 1 }).unwrap_err().to_string();
    assert!(error.contains("file/run") && !error.contains('\n'), "{error}");
    Ok(())
}

/// An invalid file with a valid hash.
#[test]
fn a_file_of_another_kind_is_refused_whatever_its_hash() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoints, _) = three(dir.path());
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/tensor-file/beyond-64-bits");
    let files = BTreeMap::from([("model".to_string(), FileHash::of(&made).unwrap())]);
    let draft = checkpoints.begin().unwrap();
    // The unfinished folder as the process that writes the file leaves it.
    let unfinished = dir.path().join(format!("{}checkpoint-{:08}", Checkpoints::UNFINISHED, draft.number()));
    fs::copy(made, unfinished.join("model.safetensors")).unwrap();
    let folder = draft.commit(&Checkpoint::default(), files).unwrap();
    let file = checkpoints.contents(&folder).unwrap().path("model");
    assert_refused(&checkpoints, &file, Some(3));
    assert!(training::load_tensors(&file, &Device::Cpu).is_err());
}

/// For example, one of several writing processes did not write its file, or wrote to a folder that the others do not
/// share.
#[test]
fn a_checkpoint_of_which_a_file_is_missing_is_not_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoints, _) = three(dir.path());
    let before = checkpoints.latest().unwrap().unwrap().folder;
    let hash = FileHash { bytes: 8, sha256: "of nothing".into() };
    let error =
        checkpoints.begin().unwrap().commit(&Checkpoint::default(), [("model".to_string(), hash)].into());
    assert!(error.unwrap_err().to_string().contains("model.safetensors"));
    assert_eq!(checkpoints.latest().unwrap().unwrap().folder, before);
}
