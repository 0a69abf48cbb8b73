//! Heads that score documents: scores and losses are those of transformers, of packed rows too; folders both ways.

use std::collections::BTreeMap;

use crate::common::{Expected, Trainer, folder, gap};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarMap;
use models::{Cache, CausalLm, FolderConfig, LabelsConfig, ModelConfig, Problem, Weights, save_folder};
use ops::{Documents, Pair, PreferenceConfig, PreferenceLoss, Preferences, RowContext};
use training::build::Builder;
use training::{clip_grad_norm, named_vars};

const FOLDERS: [&str; 6] = ["llama", "qwen3", "qwen2", "gpt2", "mistral", "qwen2-moe"];

fn name_of(family: &str) -> String {
    format!("heads/{family}")
}

fn load(name: &str, vars: &VarMap) -> (CausalLm, Weights) {
    let weights = Weights::folder(&folder(&name_of(name))).unwrap();
    let builder = Builder::new(weights.vars(vars, DType::F32, &Device::Cpu));
    (CausalLm::new(weights.config(), &builder).unwrap(), weights)
}

/// The scores of documents that are padded on the right, as in transformers.
pub(crate) fn scores(model: &CausalLm, tokens: &Tensor) -> Result<Tensor> {
    let labels = model.config().labels.as_ref().unwrap();
    let logits = model.logits(tokens)?;
    let rows = tokens.to_dtype(DType::U32)?.to_vec2::<u32>()?;
    let places = rows.iter().map(|row| labels.scored_place(row));
    Tensor::stack(
        &places.enumerate().map(|(row, place)| logits.i((row, place))).collect::<Result<Vec<_>>>()?,
        0,
    )
}

/// Documents of a batch, two in each row, with their targets.
pub(crate) struct Packed {
    tokens: Tensor,
    targets: Tensor,
    rows: RowContext,
}

impl Packed {
    /// The mean loss of a model.
    pub(crate) fn loss(&self, model: &CausalLm) -> Result<Tensor> {
        self.rows.scope(|| model.loss(&self.tokens, &self.targets))
    }

    pub(crate) fn of(expected: &Expected, step: usize, labels: &LabelsConfig) -> Result<Self> {
        let tokens = expected.get("tokens").i(step)?.to_dtype(DType::U32)?.to_vec2::<u32>()?;
        let lengths = expected.get("lengths").i(step)?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
        let of_labels = expected.get("labels").i(step)?;
        let (len, count) = (2 * tokens[0].len(), labels.names.len());
        let (mut all, mut classes, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for pair in [0, 2, 4] {
            let (mut row, mut class, mut number) =
                (vec![0; len], vec![-100i64; len], vec![f32::NAN; len * count]);
            let mut first = 0;
            for document in pair..pair + 2 {
                let own = &tokens[document][..lengths[document] as usize];
                let place = first + labels.scored_place(own);
                row[first..first + own.len()].copy_from_slice(own);
                match labels.problem {
                    Problem::SingleLabel => class[place] = of_labels.i(document)?.to_scalar()?,
                    _ => number[place * count..(place + 1) * count]
                        .copy_from_slice(&of_labels.i(document)?.to_vec1::<f32>()?),
                }
                first += own.len();
            }
            all.extend(row);
            classes.extend(class);
            numbers.extend(number);
        }
        let device = &Device::Cpu;
        let documents = Documents::new(lengths.chunks(2).map(<[u32]>::to_vec))?;
        Ok(Self {
            tokens: Tensor::from_vec(all, (3, len), device)?,
            targets: match labels.problem {
                Problem::SingleLabel => Tensor::from_vec(classes, (3, len), device)?,
                _ => Tensor::from_vec(numbers, (3, len, count), device)?,
            },
            rows: RowContext { documents: Some(documents), ..RowContext::default() },
        })
    }
}

#[test]
fn scores_are_transformers() -> Result<()> {
    for name in FOLDERS {
        let (model, _) = load(name, &VarMap::new());
        let expected = Expected::of(&name_of(name));
        let found = gap(&scores(&model, &expected.get("tokens").i(0)?)?, expected.get("logits"));
        assert!(found < 1e-5, "{name}: {found} off");
    }
    Ok(())
}

#[test]
fn training_on_packed_documents_is_transformers() -> Result<()> {
    for name in FOLDERS {
        let vars = VarMap::new();
        let (model, weights) = load(name, &vars);
        let labels = weights.config().labels.clone().unwrap();
        let expected = Expected::of(&name_of(name));
        let mut trainer = Trainer::new(named_vars(&vars), |name| weights.shapes()[name].len() > 1);
        let mut losses = Vec::new();
        for step in 0..expected.losses().len() {
            let loss = Packed::of(&expected, step, &labels)?.loss(&model)?;
            let mut grads = ops::backward(&loss)?;
            let all: Vec<_> = named_vars(&vars).into_iter().map(|(_, var)| var).collect();
            assert!(all.iter().all(|var| grads.get(var).is_some()), "{name}");
            clip_grad_norm(&mut grads, &all, 1.0)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        let gap = losses.iter().zip(expected.losses()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(losses.len() == 20 && gap < 1e-5, "{name}: {gap} off");
    }
    Ok(())
}

/// The pairs of a step, each in a row, of whose six documents the first three are chosen.
pub(crate) fn pairs_of(expected: &Expected, step: usize, labels: &LabelsConfig) -> Result<Packed> {
    let tokens = expected.get("tokens").i(step)?.to_dtype(DType::U32)?.to_vec2::<u32>()?;
    let lengths = expected.get("lengths").i(step)?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
    let (len, mut all, mut targets, mut of_rows) = (2 * tokens[0].len(), Vec::new(), Vec::new(), Vec::new());
    for pair in [[0, 3], [1, 4], [2, 5]] {
        let (mut row, mut target) = (Vec::new(), vec![-100i64; len]);
        for document in pair {
            let own = &tokens[document][..lengths[document] as usize];
            target[row.len() + labels.scored_place(own)] = 0;
            row.extend(own);
        }
        of_rows.push(pair.map(|document| lengths[document]).to_vec());
        row.resize(len, 0);
        all.extend(row);
        targets.extend(target);
    }
    let config = PreferenceConfig { loss: PreferenceLoss::Reward, ..PreferenceConfig::default() };
    let rows = RowContext {
        documents: Some(Documents::new(of_rows)?),
        preferences: Some(Preferences::new(config, vec![vec![Pair::default()]; 3])?),
        ..RowContext::default()
    };
    Ok(Packed {
        tokens: Tensor::from_vec(all, (3, len), &Device::Cpu)?,
        targets: Tensor::from_vec(targets, (3, len), &Device::Cpu)?,
        rows,
    })
}

/// Of a reward model: `-ln sigmoid(chosen - rejected)`.
#[test]
fn rewards_of_pairs_are_trls() -> Result<()> {
    let vars = VarMap::new();
    let (model, weights) = load("reward", &vars);
    let (expected, labels) = (Expected::of("heads/reward"), weights.config().labels.clone().unwrap());
    assert_eq!((labels.names.len(), labels.problem), (1, Problem::Regression));
    let mut trainer = Trainer::new(named_vars(&vars), |name| weights.shapes()[name].len() > 1);
    for (step, of_trl) in expected.losses().into_iter().enumerate() {
        let pairs = pairs_of(&expected, step, &labels)?;
        let loss = pairs.loss(&model)?;
        let gap = (loss.to_scalar::<f32>()? - of_trl).abs();
        assert!(gap < 1e-5, "step {step}: {gap} off");
        // Each record has the rewards of its pair.
        let found = pairs.rows.preferences.unwrap().results();
        let mean =
            found.iter().map(|pair| (1.0 + (pair.rewards[1] - pair.rewards[0]).exp()).ln()).sum::<f64>();
        assert!((mean / 3.0 - f64::from(of_trl)).abs() < 1e-5);
        let mut grads = ops::backward(&loss)?;
        let all: Vec<_> = named_vars(&vars).into_iter().map(|(_, var)| var).collect();
        clip_grad_norm(&mut grads, &all, 1.0)?;
        trainer.step(&grads)?;
    }
    Ok(())
}

/// A loss of pairs is for one kind of head.
#[test]
fn losses_of_pairs_know_their_head() -> Result<()> {
    let (expected, labels) = (
        Expected::of("heads/reward"),
        LabelsConfig { names: vec!["0".into()], problem: Problem::Regression, pad_token: Some(59) },
    );
    let pairs = pairs_of(&expected, 0, &labels)?;
    let line = pairs.loss(&load("llama", &VarMap::new()).0).unwrap_err().to_string();
    assert!(line.contains("pairs need a head with one score") && line.contains("has 3"), "{line}");
    let weights = Weights::folder(&folder("llama")).unwrap();
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let line = pairs.loss(&CausalLm::new(weights.config(), &builder)?).unwrap_err().to_string();
    assert!(line.contains("this model predicts tokens"), "{line}");
    let dpo = Preferences::new(PreferenceConfig::default(), vec![vec![Pair::default()]; 3])?;
    let pairs = Packed { rows: RowContext { preferences: Some(dpo), ..pairs.rows.clone() }, ..pairs };
    let line = pairs.loss(&load("reward", &VarMap::new()).0).unwrap_err().to_string();
    assert!(line.contains("by PreferenceLoss::Reward alone"), "{line}");
    Ok(())
}

/// The folder of a language model with a head that is drawn from the seed alone, and saved for transformers.
#[test]
fn a_language_model_gets_a_head() -> Result<()> {
    for base in ["llama-tied", "gpt2", "mistral"] {
        let names = ["ham", "spam"].map(String::from).to_vec();
        let labels = LabelsConfig { names, problem: Problem::SingleLabel, pad_token: Some(3) };
        let weights = |seed: u64| Weights::with_new_head(&folder(base), &labels).unwrap().with_seed(seed);
        let values = |weights: &Weights| -> BTreeMap<String, Vec<f32>> {
            let builder = weights.tensors(DType::F32, &Device::Cpu);
            let value = |(name, dims): (&String, &Vec<usize>)| {
                let tensor = builder.get(dims.as_slice(), name).unwrap().flatten_all().unwrap();
                (name.clone(), tensor.to_vec1().unwrap())
            };
            weights.shapes().iter().map(value).collect()
        };
        let [one, same, other] = [values(&weights(1)), values(&weights(1)), values(&weights(2))];
        assert!(one == same && one["score.weight"] != other["score.weight"], "{base}");
        let of_base = Weights::folder(&folder(base)).unwrap();
        let differs = |name: &&String| one[*name] != other[*name] || !of_base.shapes().contains_key(*name);
        assert_eq!(one.keys().filter(differs).collect::<Vec<_>>(), ["score.weight"]);

        // Saved and read again.
        let (vars, out) = (VarMap::new(), tempfile::tempdir().unwrap());
        let builder = Builder::new(weights(1).vars(&vars, DType::F32, &Device::Cpu));
        CausalLm::new(weights(1).config(), &builder)?;
        save_folder(out.path(), weights(1).config(), &named_vars(&vars), &FolderConfig::default()).unwrap();
        let again = Weights::folder(out.path()).unwrap();
        assert_eq!((again.config().labels.as_ref(), values(&again) == one), (Some(&labels), true), "{base}");
        let line = Weights::with_new_head(out.path(), &labels).unwrap_err().to_string();
        assert!(line.contains("the model is one that scores ham, spam; its head"), "{line}");
    }
    Ok(())
}

#[test]
fn wrong_labels_are_named() {
    let json = std::fs::read_to_string(folder("heads/llama").join("config.json")).unwrap();
    let said = |change: &[(&str, &str)]| {
        let changed = change.iter().fold(json.clone(), |json, (from, to)| {
            assert!(json.contains(from), "{from}");
            json.replace(from, to)
        });
        ModelConfig::from_json(&changed).map(|config| config.labels.map(|labels| labels.names))
    };
    let line = |change: &[(&str, &str)]| said(change).unwrap_err().to_string();
    let names = said(&[]).unwrap().unwrap();
    assert_eq!(names, ["angry", "calm", "glad"]);
    // Without names it has as many as transformers takes it to have.
    assert_eq!(said(&[("\"id2label\"", "\"prefix\"")]).unwrap().unwrap(), ["LABEL_0", "LABEL_1"]);
    let all = [
        (vec![("\"0\": \"angry\"", "\"7\": \"angry\"")], "it must have a name for each id from 0 on"),
        (vec![("\"1\": \"calm\"", "\"1\": \"angry\"")], "a name is angry twice"),
        (
            vec![("single_label_classification", "token_classification")],
            "supported are single_label_classification, multi_",
        ),
        (
            vec![("\"use_cache\"", "\"num_labels\": 4, \"use_cache\"")],
            "id2label names 3 labels: give the same number",
        ),
    ];
    for (change, expected) in &all {
        let line = line(change);
        assert!(line.contains(expected) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn a_head_for_labels_predicts_no_tokens() -> Result<()> {
    let (model, _) = load("qwen3", &VarMap::new());
    let tokens = Tensor::new(&[[1u32, 2]], &Device::Cpu)?;
    let line = model.next_logits(&tokens, &mut Cache::new()).unwrap_err().to_string();
    assert!(line.contains("the model scores documents for labels, and predicts no tokens"), "{line}");
    let line = model.loss(&tokens, &tokens.to_dtype(DType::F32)?).unwrap_err().to_string();
    assert!(line.contains("got [1, 2] of F32; give [1, 2] of integers"), "{line}");
    Ok(())
}
