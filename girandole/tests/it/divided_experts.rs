//! Experts that are divided over ranks (`ep`): the same losses, gradients and parameters as in one process, whichever experts the
//! tokens choose.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, Optimizer};
use girandole::comm::Local;
use girandole::models::{CausalLm, GenerateConfig, ModelConfig, Weights, generate};
use girandole::pipeline::ScheduleKind;
use girandole::training::build::{Builder, RangeReader};
use girandole::training::{Checkpoint, CheckpointConfig, Checkpoints, GradientCheckConfig};
use girandole::{DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};

use crate::common::optimizer;

/// The first one, one with what it has left behind, and one more.
const STEPS: usize = 3;

/// Mixtral with 5 experts of 24 inner features, and Qwen2-MoE with 7, of which a token uses so many.
fn config(family: &str, per_token: usize) -> ModelConfig {
    let experts = match family {
        "mixtral" => r#""num_local_experts": 5, "intermediate_size": 24"#,
        _ => {
            r#""num_experts": 7, "moe_intermediate_size": 12, "intermediate_size": 32, "shared_expert_intermediate_size": 8,
               "mlp_only_layers": [1]"#
        }
    };
    let json = format!(
        r#"{{"model_type": "{family}", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 16, "num_experts_per_tok": {per_token},
             "rms_norm_eps": 1e-5, "initializer_range": 0.2, "rope_theta": 10000.0, "tie_word_embeddings": false, {experts}}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

/// Which experts the tokens choose at first.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Choice {
    /// As the weights are drawn.
    Drawn,
    /// All the first ones, since all have equal scores: those of one rank, and nobody the others.
    First,
}

struct Chosen(Arc<dyn RangeReader>);

impl RangeReader for Chosen {
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> candle_core::Result<Tensor> {
        let drawn = self.0.read(name, shape, init, dtype, ranges)?;
        if name.ends_with(".gate.weight") { drawn.zeros_like() } else { Ok(drawn) }
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    family: &'static str,
    per_token: usize,
    choice: Choice,
    rows: usize,
    length: usize,
    micro_batches: usize,
    schedule: ScheduleKind,
}

const PLAIN: Case = Case {
    family: "mixtral",
    per_token: 2,
    choice: Choice::Drawn,
    rows: 8,
    length: 6,
    micro_batches: 1,
    schedule: ScheduleKind::OneFOneB,
};

#[derive(Default)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    gradients: BTreeMap<String, Vec<f64>>,
    parameters: BTreeMap<String, Vec<f64>>,
}

fn build(
    comm: Arc<dyn girandole::comm::Communicator>,
    layout: &Layout,
    case: &Case,
) -> girandole::Result<Parallel<CausalLm>> {
    let config = config(case.family, case.per_token);
    let drawn = Weights::random(&config, 5).unwrap().parts();
    let weights: InitialWeights = match case.choice {
        Choice::Drawn => drawn.into(),
        Choice::First => (Arc::new(Chosen(drawn)) as Arc<dyn RangeReader>).into(),
    };
    let Case { micro_batches, schedule, .. } = *case;
    let settings = ParallelConfig { dtype: DType::F64, micro_batches, schedule, ..ParallelConfig::default() };
    Parallel::new(comm, layout, weights, &settings, move |builder: &Builder| CausalLm::new(&config, builder))
}

/// This rank's rows of a step, and their targets, of which some do not count: all of the last row.
fn rows(parallel: &Parallel<CausalLm>, case: &Case, step: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let token = |at: usize| ((at * 7 + step * 11 + at * at % 5) % 32) as u32;
    let Case { rows, length, .. } = *case;
    let tokens = Tensor::from_iter((0..rows * length).map(token), &Device::Cpu)?.reshape((rows, length))?;
    let target = |at: usize| match at / length + 1 == rows && rows > 2 {
        true => -100,
        false => i64::from(token(at * 3 + 1)),
    };
    let targets = Tensor::from_iter((0..rows * length).map(target), &Device::Cpu)?.reshape((rows, length))?;
    let data = parallel.data_ranks();
    let own = (data.rank()..rows).step_by(data.world_size()).map(|row| row as u32);
    let own = Tensor::from_iter(own, &Device::Cpu)?;
    Ok((tokens.index_select(&own, 0)?, targets.index_select(&own, 0)?))
}

/// Adds this rank's pieces of parameters, or their gradients. Each element must be written once.
fn add(
    whole: &Mutex<Trained>,
    parallel: &Parallel<CausalLm>,
    gradients: Option<&GradStore>,
) -> girandole::Result<()> {
    for piece in parallel.pieces()?.into_iter().filter(|piece| piece.is_first && parallel.copy().number == 0)
    {
        let mut whole = whole.lock().unwrap();
        let (into, values) = match gradients {
            Some(gradients) => (&mut whole.gradients, gradients.get(&piece.var).expect("a gradient").clone()),
            None => (&mut whole.parameters, piece.var.as_detached_tensor()),
        };
        let len = piece.region.dims.iter().product();
        let all = into.entry(piece.name).or_insert_with(|| vec![f64::NAN; len]);
        let values = values.flatten_all()?.to_vec1::<f64>()?;
        let places: Vec<usize> = piece.region.runs.ranges().flatten().collect();
        for (place, value) in places[piece.region.window.clone()].iter().zip(values) {
            assert!(all[*place].is_nan(), "a place is written twice");
            all[*place] = value;
        }
    }
    Ok(())
}

fn train(layout: &str, case: &Case, steps: usize) -> Trained {
    let (layout, whole): (Layout, Mutex<Trained>) = (layout.parse().unwrap(), Mutex::default());
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut parallel = build(comm, &layout, case)?;
        let mut optimizer = optimizer(&parallel)?;
        let mut told = Vec::new();
        for number in 0..steps {
            let (tokens, targets) = rows(&parallel, case, number)?;
            let mut step = parallel.step(&tokens, &targets)?;
            if number == 0 {
                add(&whole, &parallel, Some(&step.grads))?;
            }
            let norm = parallel.clip_grad_norm(&mut step.grads, 0.5)?;
            optimizer.step(&step.grads)?;
            told.push((step.loss, norm));
        }
        add(&whole, &parallel, None)?;
        Ok(told)
    })
    .unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{layout}: ranks tell other losses or norms");
    let (losses, norms) = ranks[0].iter().copied().unzip();
    Trained { losses, norms, ..whole.into_inner().unwrap() }
}

fn assert_equal(what: &str, got: &Trained, expected: &Trained) {
    let close = |got: &[f64], expected: &[f64], of: &str| {
        assert_eq!(got.len(), expected.len(), "{what}: {of}");
        for (a, b) in got.iter().zip(expected) {
            assert!((a - b).abs() < 1e-10, "{what}: {of}: {a}, expected {b}");
        }
    };
    close(&got.losses, &expected.losses, "losses");
    close(&got.norms, &expected.norms, "norms");
    for (got, expected) in [(&got.gradients, &expected.gradients), (&got.parameters, &expected.parameters)] {
        assert!(got.keys().eq(expected.keys()), "{what}");
        expected.iter().for_each(|(name, expected)| close(&got[name], expected, name));
    }
}

#[test]
fn whichever_experts_the_tokens_choose() {
    let qwen = Case { family: "qwen2_moe", ..PLAIN };
    let one_token = Case { rows: 4, length: 1, ..PLAIN };
    for case in [
        PLAIN,
        qwen,
        Case { micro_batches: 2, ..PLAIN },
        Case { choice: Choice::First, ..PLAIN },
        Case { choice: Choice::First, per_token: 1, ..qwen },
        // Each token uses all experts.
        Case { per_token: 5, ..PLAIN },
        Case { per_token: 1, ..one_token },
        Case { choice: Choice::First, per_token: 1, ..one_token },
    ] {
        let expected = train("", &case, STEPS);
        if case.choice == Choice::First {
            let is_chosen = |name: &str| expected.gradients[name].iter().any(|value| *value != 0.0);
            let of = |expert: usize| match case.family {
                "mixtral" => format!("model.layers.2.block_sparse_moe.experts.{expert}.w2.weight"),
                _ => format!("model.layers.2.mlp.experts.{expert}.down_proj.weight"),
            };
            assert!(is_chosen(&of(0)) && !is_chosen(&of(4)), "{case:?}");
        }
        for layout in [
            "ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2", "pp=2,ep=2", "pp=2,ep=4", "shard=2,ep=2",
            "dp=2,shard=2,ep=2", "shard=2,ep=2,tp=2", "shard=2,cp=2,ep=2",
        ] {
            let parts = layout.parse::<Layout>().unwrap();
            if parts.cp > case.length || case.rows < parts.data_ranks() * case.micro_batches {
                continue;
            }
            assert_equal(&format!("{layout}, {case:?}"), &train(layout, &case, STEPS), &expected);
        }
    }
}

/// Backward of a stage exchanges as its forward does, also where weights' gradients are computed later.
#[test]
fn whatever_the_schedule_of_stages() {
    for case in [
        Case { micro_batches: 2, ..PLAIN },
        Case { micro_batches: 2, choice: Choice::First, per_token: 1, family: "qwen2_moe", ..PLAIN },
    ] {
        let expected = train("", &case, STEPS);
        for schedule in ScheduleKind::ALL {
            let case = Case { schedule, ..case };
            for layout in
                ["pp=2,ep=2", "pp=2,dp=2,ep=2", "pp=2,shard=2,ep=2", "pp=2,ep=2,tp=2", "pp=2,cp=2,ep=2"]
            {
                assert_equal(&format!("{layout}, {case:?}"), &train(layout, &case, STEPS), &expected);
            }
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused_on_every_rank() {
    let said = |layout: &str, json: Option<&str>| {
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let built = match json {
                None => build(comm, &layout, &PLAIN),
                Some(json) => {
                    let config = ModelConfig::from_json(json).unwrap();
                    let weights = Weights::random(&config, 5).unwrap().parts();
                    let build = move |builder: &Builder| CausalLm::new(&config, builder);
                    Parallel::new(comm, &layout, weights, &ParallelConfig::default(), build)
                }
            };
            Ok(built.map(drop).unwrap_err().to_string())
        });
        // With RUST_BACKTRACE candle adds one.
        said.unwrap().into_iter().map(|said: String| said.lines().next().unwrap_or_default().to_string())
    };
    for line in said("ep=6", None) {
        assert!(line.contains("5 experts cannot be divided over 6 ranks: give ep at most 5"), "{line}");
    }
    let dense = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-5}"#;
    for line in said("dp=2,ep=2", Some(dense)) {
        assert!(
            line.contains("the axis ep of the layout") && line.contains("this model has no experts"),
            "{line}"
        );
    }
}

/// Each layout goes on from the checkpoint of the one before, and its whole file is that of one process.
#[test]
fn checkpoints_go_on_with_another_number_of_ranks() {
    let go_on = |layout: &str, dir: &Path, steps: usize| {
        let layout: Layout = layout.parse().unwrap();
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = build(comm, &layout, &PLAIN)?;
            let mut adam = optimizer(&parallel)?;
            let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 2 }).unwrap();
            let mut begin = 0;
            if let Some(contents) = checkpoints.latest().unwrap() {
                parallel.load_checkpoint(&contents, Some(&mut adam))?;
                begin = contents.step as usize;
            }
            let mut losses = Vec::new();
            for number in begin..begin + steps {
                let (tokens, targets) = rows(&parallel, &PLAIN, number)?;
                let mut step = parallel.step(&tokens, &targets)?;
                parallel.clip_grad_norm(&mut step.grads, 0.5)?;
                adam.step(&step.grads)?;
                losses.push(step.loss);
            }
            let checkpoint = Checkpoint { step: (begin + steps) as u64, ..Checkpoint::default() };
            parallel.save_checkpoint(&checkpoints, Some(&adam), &checkpoint)?;
            parallel.save_full(dir.join("whole.safetensors"))?;
            Ok(losses)
        });
        let whole = candle_core::safetensors::load(dir.join("whole.safetensors"), &Device::Cpu).unwrap();
        (ranks.unwrap().remove(0), whole)
    };
    let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for layout in [
        "ep=2", "", "dp=2,ep=2", "tp=2", "ep=4", "shard=2", "ep=2,tp=2", "pp=2,ep=2", "cp=2,ep=2",
        "pp=2,shard=2,ep=2", "shard=2,ep=2", "pp=2", "shard=2,ep=2,tp=2", "dp=2,shard=2,ep=2",
    ] {
        let (expected, whole) = go_on("", one.path(), 2);
        let (got, all) = go_on(layout, many.path(), 2);
        for (a, b) in got.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-10, "{layout}: {a}, expected {b}");
        }
        assert_eq!(all.len(), whole.len(), "{layout}");
        for (name, expected) in &whole {
            let gap = (&all[name] - expected).unwrap().abs().unwrap().max_all().unwrap();
            assert!(gap.to_scalar::<f64>().unwrap() < 1e-10, "{layout}: {name}");
        }
    }
}

/// Evaluation, the check of gradients and the number of parameters are those of one process.
#[test]
fn what_a_run_asks_of_a_model_is_the_same() {
    let ask = |layout: &str| {
        let layout: Layout = layout.parse().unwrap();
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = build(comm, &layout, &PLAIN)?;
            let batch = rows(&parallel, &PLAIN, 0)?;
            let step = parallel.step(&batch.0, &batch.1)?;
            let check =
                parallel.check_gradient(&batch.clone().into(), &step, &GradientCheckConfig::default())?;
            Ok((parallel.evaluate(&batch.0, &batch.1)?, check.lost.len(), check.parameters))
        });
        let ranks = ranks.unwrap();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{layout}: {ranks:?}");
        ranks[0].clone()
    };
    let (expected, lost, parameters) = ask("");
    assert_eq!(lost, 0);
    for layout in [
        "ep=2", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2", "pp=2,ep=2", "pp=2,shard=2,ep=2", "shard=2,ep=2",
        "shard=2,cp=2,ep=2",
    ] {
        let (got, lost, count) = ask(layout);
        assert_eq!((got.targets, lost, count), (expected.targets, 0, parameters), "{layout}");
        assert!((got.loss - expected.loss).abs() < 1e-10, "{layout}");
    }
}

/// All ranks have the same row, and exchange its tokens nevertheless.
#[test]
fn a_text_is_the_same() {
    let write = |layout: &str| {
        let layout: Layout = layout.parse().unwrap();
        let tokens = Local::run_shared(layout.ranks(), |comm| {
            let parallel = build(comm, &layout, &PLAIN)?;
            let config = GenerateConfig { max_new_tokens: 8, ..GenerateConfig::default() };
            let model = parallel.model()?;
            let tokens = generate(model.unwrap(), &[1, 7, 9], &config, |_| ControlFlow::Continue(()));
            Ok(tokens.map_err(girandole::Error::from)?)
        });
        tokens.unwrap()
    };
    let expected = write("").remove(0);
    for layout in ["ep=2", "ep=4", "shard=2,ep=2", "ep=2,tp=2"] {
        assert!(write(layout).iter().all(|tokens| *tokens == expected), "{layout}");
    }
}
