//! Compares plans of language models with what models hold when they are trained, in threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarMap};
use comm::{Communicator, Local};
use girandole::Layout;
use girandole::expert_parallel::ExpertParallel;
use girandole::trainer::OptimizerConfig;
use models::{CausalLm, Lora, LoraConfig, ModelConfig, Weights};
use ops::{RowKeys, activation_bytes};
use plan::Memory;
use plan::language::{Subject, Training};
use training::build::{Builder, Layers, Recompute, WholeLayers};
use training::{Adam, AdamConfig, Muon, MuonConfig, OptimizerState, StepOptimizer};

const ROWS: usize = 8;
const LENGTH: usize = 16;

fn config(family: &str, tied: bool) -> ModelConfig {
    let text = match family {
        "gpt2" => r#"{"model_type": "gpt2", "vocab_size": 301, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 32,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}"#
            .to_string(),
        family => format!(
            r#"{{"model_type": "{family}", "vocab_size": 301, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 32,
            "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": {tied}, "rope_theta": 10000.0}}"#
        ),
    };
    ModelConfig::from_json(&text).unwrap()
}

/// Mixtral, Qwen3-MoE, DeepSeek V3 or Qwen2-MoE with a dense layer, with so many experts, of which each token uses some.
fn experts(family: &str, count: usize, per_token: usize) -> ModelConfig {
    let own = match family {
        "mixtral" => format!(r#""num_local_experts": {count}, "intermediate_size": 40"#),
        "deepseek_v3" => format!(
            r#""n_routed_experts": {count}, "moe_intermediate_size": 40, "intermediate_size": 80, "n_shared_experts": 2,
               "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
               "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12"#
        ),
        "qwen3_moe" => format!(
            r#""num_experts": {count}, "moe_intermediate_size": 40, "intermediate_size": 80, "head_dim": 16"#
        ),
        _ => format!(
            r#""num_experts": {count}, "moe_intermediate_size": 40, "intermediate_size": 80, "shared_expert_intermediate_size": 56,
               "mlp_only_layers": [1]"#
        ),
    };
    let kv_heads = if family == "deepseek_v3" { 4 } else { 2 };
    let text = format!(
        r#"{{"model_type": "{family}", "vocab_size": 301, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": {kv_heads}, "hidden_act": "silu", "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0, "num_experts_per_tok": {per_token}, {own}}}"#
    );
    ModelConfig::from_json(&text).unwrap()
}

/// What a rank holds after a step, and the bytes that it sent in the step.
struct Held {
    variables: f64,
    gradients: f64,
    optimizer: f64,
    sent: f64,
    count: f64,
}

fn bytes(tensor: &Tensor) -> f64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as f64
}

/// Trains one step and measures each rank.
fn held(model: &ModelConfig, layout: &Layout, training: &Training) -> Vec<Held> {
    let run = |comm| {
        let (mut parallel, tokens) = common::parallel(comm, (model, None), layout, training, None)?;
        let vars = parallel.named_vars();
        let mut adam = Adam::named(vars.clone(), AdamConfig::adamw()).unwrap();
        let before = parallel.stats().bytes_sent;
        let step = parallel.step(&tokens, &tokens).unwrap();
        adam.step(&step.grads)?;
        Ok(Held {
            variables: vars.iter().map(|(_, var)| bytes(var)).sum(),
            gradients: vars.iter().filter_map(|(_, var)| step.grads.get(var).map(bytes)).sum(),
            optimizer: adam.state_bytes() as f64,
            sent: (parallel.stats().bytes_sent - before) as f64,
            count: vars.len() as f64,
        })
    };
    Local::run_shared(layout.ranks(), run).unwrap()
}

/// The largest rank of each stage holds what is planned, except for the single number that stands for a variable of
/// which a rank has no part.
#[test]
fn ranks_hold_what_is_planned() {
    let meshes = [
        "dp=1", "dp=2", "shard=2", "tp=2", "pp=2", "pp=2,shard=2", "pp=2,dp=2", "shard=2,tp=2",
        "dp=2,shard=2", "cp=2", "cp=4", "shard=2,cp=2", "pp=2,cp=2", "pp=2,tp=2",
    ];
    for (mesh, (tied, dtype)) in meshes.iter().flat_map(|mesh| {
        [(false, DType::F32), (true, DType::F32), (true, DType::BF16)].map(|how| (mesh, how))
    }) {
        assert_holds(&config("llama", tied), mesh, dtype);
    }
}

/// Each token uses all experts, so that equally many go to each rank, as the plan assumes.
#[test]
fn ranks_hold_the_experts_that_are_planned() {
    for mesh in [
        "dp=2", "shard=2", "tp=2", "pp=2", "ep=2", "ep=4", "dp=2,ep=2", "shard=2,ep=2", "dp=2,shard=2,ep=2",
        "ep=2,tp=2", "pp=2,ep=2", "pp=2,shard=2,ep=2", "cp=2,ep=2",
    ] {
        for (family, dtype) in
            [("mixtral", DType::F32), ("qwen2_moe", DType::F32), ("qwen3_moe", DType::BF16)]
        {
            assert_holds(&experts(family, 4, 4), mesh, dtype);
        }
    }
    // The last rank has three of five.
    let five = Subject::new(experts("mixtral", 5, 2), None);
    let training = Training { batch_size: ROWS, length: LENGTH, ..Training::default() };
    let [all, most] = ["dp=1", "ep=2"].map(|mesh| five.estimate(&training, &mesh.parse().unwrap()).unwrap());
    assert_eq!(all.most().parameters - most.most().parameters, (4 * 4 * 2 * 3 * 48 * 40) as f64);
}

/// Asserts that each rank holds and sends what is planned.
fn assert_holds(model: &ModelConfig, mesh: &str, dtype: DType) {
    let (layout, tied) = (mesh.parse::<Layout>().unwrap(), model.tied);
    let training = Training { batch_size: ROWS, length: LENGTH, dtype, ..Training::default() };
    let cost = Subject::new(model.clone(), None).estimate(&training, &layout).unwrap();
    let held = held(model, &layout, &training);
    let each = layout.ranks() / layout.pp;
    for stage in &cost.stages {
        let ranks = &held[stage.stage * each..(stage.stage + 1) * each];
        let most = |of: fn(&Held) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        let what = format!("{mesh}, stage {}", stage.stage);
        let element = dtype.size_in_bytes() as f64;
        let slack = if layout.shard > 1 { most(|held| held.count) * element } else { 0.0 };
        let close = |planned: f64, held: f64, times: f64| {
            assert!((planned - held).abs() <= times * slack, "{what}: {planned} planned, {held} held");
        };
        let Memory { parameters, gradients, optimizer, .. } = stage.memory;
        // In a pipeline, variables are whole, and the optimizer has shards of them.
        let variables = if layout.pp > 1 { gradients } else { parameters };
        close(variables, most(|held| held.variables), 1.0);
        close(gradients, most(|held| held.gradients), 1.0);
        close(optimizer, most(|held| held.optimizer), 2.0 * 4.0 / element);
        // The group of a tied embedding and head is not in these statistics. Losses and target counts are, but not
        // in the plan; they are few in models of real sizes. Small 16-bit sums are sent in 32 bits.
        let sent = most(|held| held.sent);
        if dtype == DType::F32 && !(tied && layout.pp > 1) {
            let most_off = 0.03 * sent + 4096.0;
            assert!((stage.sent - sent).abs() <= most_off, "{what}: {} planned, {sent} sent", stage.sent);
        }
    }
}

/// A model with matrices so large that they are not packed with others to be cut into shards, for two ranks of `tp`.
fn wide() -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
    ModelConfig::from_json(text).unwrap()
}

/// Takes a step of Muon; returns for each rank the bytes of the optimizer's state, and those that it sends for whole matrices.
fn held_by_muon(model: &ModelConfig, layout: &Layout, training: &Training) -> Vec<(f64, f64)> {
    let optimizer = OptimizerConfig::muon(MuonConfig::default());
    let run = |comm| {
        let (mut parallel, tokens) = common::parallel(comm, (model, None), layout, training, None)?;
        let is_hidden = |name: &str| parallel.is_matrix(name) && optimizer.needs_whole(name);
        let mut matrices = parallel.whole_matrices(is_hidden).unwrap();
        let mut muon = Muon::named(parallel.named_vars(), is_hidden, MuonConfig::default()).unwrap();
        let step = parallel.step(&tokens, &tokens).unwrap();
        let before = matrices.stats().bytes_sent;
        muon.step_whole(&step.grads, 1.0, &mut matrices)?;
        let sent = matrices.stats().bytes_sent - before;
        let state = muon.state().unwrap();
        let numbers = state.iter().filter(|(name, _)| !name.ends_with(".step"));
        Ok((numbers.map(|(_, tensor)| bytes(tensor)).sum(), sent as f64))
    };
    Local::run_shared(layout.ranks(), run).unwrap()
}

/// Muon's state is one number for each element of a hidden matrix; what it sends beside the model's traffic is planned in the mean of a
/// stage's ranks.
#[test]
fn muon_holds_and_sends_what_is_planned() {
    let meshes = ["dp=1", "dp=2", "dp=3", "tp=2", "pp=2", "pp=2,shard=2", "pp=2,dp=2", "dp=2,tp=2", "cp=2"];
    let meshes = meshes.map(|mesh| (mesh, config("llama", true), DType::F32));
    let others = [
        ("dp=2", config("llama", true), DType::BF16),
        ("shard=2", wide(), DType::BF16),
        ("shard=2", wide(), DType::F32),
        ("shard=2,tp=2", wide(), DType::F32),
        ("dp=2", experts("mixtral", 4, 4), DType::F32),
        ("ep=2", experts("mixtral", 4, 4), DType::F32),
        ("dp=2,ep=2", experts("mixtral", 4, 4), DType::F32),
        ("pp=2,ep=2", experts("mixtral", 4, 4), DType::F32),
    ];
    for (mesh, model, dtype) in meshes.into_iter().chain(others) {
        let layout: Layout = mesh.parse().unwrap();
        let rows = if layout.dp == 3 { 9 } else { ROWS };
        let adam = Training { batch_size: rows, length: LENGTH, dtype, ..Training::default() };
        let muon = Training { optimizer: plan::Optimizer::Muon, ..adam.clone() };
        let subject = Subject::new(model.clone(), None);
        let [of_adam, of_muon] = [&adam, &muon].map(|training| subject.estimate(training, &layout).unwrap());
        let held = held_by_muon(&model, &layout, &muon);
        let each = layout.ranks() / layout.pp;
        for (of_adam, of_muon) in of_adam.stages.iter().zip(&of_muon.stages) {
            let ranks = &held[of_muon.stage * each..(of_muon.stage + 1) * each];
            let what = format!("{mesh} {dtype:?}, stage {}", of_muon.stage);
            let (planned, most) =
                (of_muon.memory.optimizer, ranks.iter().map(|(state, _)| *state).fold(0.0, f64::max));
            // Shards are cut where they end: the two norms of a block may be on one rank, and pieces have a few elements more.
            let slack = if layout.shard > 1 { 0.01 * most } else { 0.0 };
            assert!((planned - most).abs() <= slack, "{what}: {planned} planned, {most} held");
            let mean = ranks.iter().map(|(_, sent)| *sent).sum::<f64>() / each as f64;
            let planned = of_muon.sent - of_adam.sent;
            // A barrier sends a byte in each round.
            assert!((planned - mean).abs() <= 32.0, "{what}: {planned} planned, {mean} sent");
        }
    }
}

/// Equal to the bytes of the autograd graph, except for norm weights that are converted to 32 bits.
#[test]
fn forward_keeps_what_is_planned() {
    for (family, tied) in [
        ("llama", false),
        ("llama", true),
        ("mistral", false),
        ("qwen2", false),
        ("qwen3", true),
        ("gpt2", true),
    ] {
        let model = config(family, tied);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (planned, told) = forward_keeps(&model, dtype, Recompute::None);
            let most_off = if dtype == DType::BF16 { 5e-3 * told } else { 8.0 };
            assert!((planned - told).abs() <= most_off, "{family} {dtype:?}: {planned} planned, {told} told");
            if dtype == DType::BF16 {
                continue;
            }
            for recompute in [Recompute::Units, Recompute::Selective] {
                // In backward, one block is recomputed in addition to what is kept, from a copy of its input.
                let (planned, kept) = forward_keeps(&model, dtype, recompute);
                let output = (ROWS * LENGTH * model.hidden_size * dtype.size_in_bytes()) as f64;
                let held = kept + (told - kept) / model.num_layers as f64 + 2.0 * output;
                let what = format!("{family} {dtype:?} {recompute:?}");
                assert!((planned - held).abs() <= 8.0, "{what}: {planned} planned, {held} held");
            }
        }
    }
}

/// The plan leaves out only numbers by expert, such as how many tokens each has.
#[test]
fn forward_keeps_of_experts_what_is_planned() {
    for family in ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"] {
        let model = experts(family, 5, 2);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (planned, told) = forward_keeps(&model, dtype, Recompute::None);
            assert!(
                (planned - told).abs() <= 0.01 * told,
                "{family} {dtype:?}: {planned} planned, {told} told"
            );
        }
    }
}

/// Rows that came from other ranks are kept for backward, as products are. Each token uses all experts, as above.
#[test]
fn selective_recomputation_keeps_the_rows_that_are_planned() {
    for family in ["mixtral", "qwen3_moe"] {
        let model = experts(family, 4, 4);
        let layout: Layout = "ep=2".parse().unwrap();
        let told = |recompute| {
            let run = |comm: Arc<dyn Communicator>| {
                let layers = ExpertParallel::new(comm).layers(Arc::new(WholeLayers));
                Ok(kept(&model, DType::F32, recompute, (ROWS / 2, layers)))
            };
            Local::run_shared(2, run).unwrap()[0]
        };
        let recompute = Recompute::Selective;
        let training = Training { batch_size: ROWS, length: LENGTH, recompute, ..Training::default() };
        let cost = Subject::new(model.clone(), None).estimate(&training, &layout).unwrap();
        let (planned, kept, all) = (cost.most().activations, told(recompute), told(Recompute::None));
        // In backward, one block is recomputed in addition to what is kept, from a copy of its input.
        let output = (ROWS / 2 * LENGTH * model.hidden_size * 4) as f64;
        let held = kept + (all - kept) / model.num_layers as f64 + 2.0 * output;
        assert!((planned - held).abs() <= 0.01 * held, "{family}: {planned} planned, {held} held");
    }
}

/// Returns bytes of activations: planned, and in the autograd graph.
fn forward_keeps(model: &ModelConfig, dtype: DType, recompute: Recompute) -> (f64, f64) {
    let training = Training { batch_size: ROWS, length: LENGTH, dtype, recompute, ..Training::default() };
    let cost = Subject::new(model.clone(), None).estimate(&training, &Layout::default()).unwrap();
    (cost.most().activations, kept(model, dtype, recompute, (ROWS, Arc::new(WholeLayers))))
}

/// Returns bytes of activations in the autograd graph.
fn kept(
    model: &ModelConfig,
    dtype: DType,
    recompute: Recompute,
    (rows, layers): (usize, Arc<dyn Layers>),
) -> f64 {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let weights = Weights::random(model, 1).unwrap().vars(&vars, dtype, &device);
    let lm = CausalLm::new(model, &Builder::new(weights).with_layers(layers).recomputing(recompute)).unwrap();
    let tokens = Tensor::zeros((rows, LENGTH), DType::U32, &device).unwrap();
    let loss = RowKeys::new(0, 0, 0..rows).scope(|| lm.loss(&tokens, &tokens)).unwrap();
    let told = activation_bytes(&loss, []) as f64;
    // The loss keeps the gradient of its weight, which the plan counts as a gradient, if it is one: in 16 bits the
    // loss's weight is a copy.
    let of_head = match dtype {
        DType::BF16 => 0,
        dtype => model.vocab_size * model.hidden_size * dtype.size_in_bytes(),
    };
    told - of_head as f64
}

#[test]
fn adapters_alone_are_trained() {
    let model = config("llama", false);
    let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &model).unwrap();
    let adapters: usize = lora.shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
    let subject = Subject::new(model.clone(), Some(lora));
    let whole: usize = Weights::random(&model, 1)
        .unwrap()
        .shapes()
        .values()
        .map(|dims| dims.iter().product::<usize>())
        .sum();
    assert_eq!(subject.parameters().unwrap(), ((whole + adapters) as u64, adapters as u64));
    let training = Training { batch_size: ROWS, length: LENGTH, ..Training::default() };
    let memory = subject.estimate(&training, &Layout::default()).unwrap().most();
    assert_eq!((memory.gradients, memory.optimizer), (4.0 * adapters as f64, 8.0 * adapters as f64));
    assert_eq!(memory.parameters, 4.0 * (whole + adapters) as f64);
}

#[test]
fn what_cannot_be_is_ruled_out_with_the_reason() {
    let subject = Subject::new(config("llama", false), None);
    let training = Training { batch_size: 4, length: LENGTH, ..Training::default() };
    let of = |mesh: &str| subject.estimate(&training, &mesh.parse().unwrap()).unwrap_err().to_string();
    assert_eq!(of("dp=8"), "8 copies are more than the 4 rows of a step");
    assert_eq!(
        of("pp=4,dp=2"),
        "the 4 rows of a step cannot be divided over 2 ranks with 4 micro-batches each"
    );
    assert!(of("tp=3").contains("tp=3") || of("tp=3").contains("3 tensor-parallel ranks"), "{}", of("tp=3"));
    assert!(of("pp=8").contains('8'), "{}", of("pp=8"));
    let layouts = plan::language::layouts(8, 256, 0);
    assert_eq!(layouts.len(), 20);
    let compared = subject.compare(&training, &layouts).unwrap();
    let ruled_out: usize = compared.ruled_out.iter().map(|reason| reason.names.len()).sum();
    assert_eq!(compared.costs.len() + ruled_out, layouts.len());
    assert!(compared.costs.is_sorted_by(|a, b| a.most().total() <= b.most().total()));
}

/// The plan allocates nothing: this model would need terabytes.
#[test]
fn a_large_model_is_planned_at_once() {
    let text = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 500000.0}"#;
    let subject = Subject::new(ModelConfig::from_json(text).unwrap(), None);
    assert_eq!(subject.parameters().unwrap().0, 405_853_388_800);
    let training = Training { batch_size: 1024, length: 8192, ..Training::default() };
    let cost = subject.estimate(&training, &"pp=16,shard=64,tp=8".parse().unwrap()).unwrap();
    assert!(cost.most().parameters > 4.0 * 405e9 / 128.0 && cost.stages.len() == 16);
}
