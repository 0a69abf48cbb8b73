//! A small model, its batches, and a training step.
#![allow(dead_code)]

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::Optimizer;
use girandole::ops::{BalanceLoss, Documents, Pair, PreferenceConfig, PreferenceLoss, Preferences};
use girandole::training::build::{Builder, Model, Unit, Units};
use girandole::training::{Adam, AdamConfig, LossScalerConfig};
use girandole::{
    Batch, DistributedModel, ExpertBalance, InitialWeights, Layout, Parallel, ParallelConfig, Recompute,
    models, pipeline,
};
use models::{CausalLm, LabelsConfig, ModelConfig, Problem, Weights};
use pipeline::ScheduleKind;

pub(crate) const ROWS: usize = 8;
pub(crate) const LEN: usize = 6;

/// Llama with a separate head, or Qwen3, whose head is tied to the embedding. Qwen3 has norms of queries and keys, of
/// whose gradient each rank of `tp` computes a part.
pub(crate) fn config(tied: bool) -> ModelConfig {
    let family = if tied { "qwen3" } else { "llama" };
    let json = format!(
        r#"{{"model_type": "{family}", "head_dim": 4, "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
             "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 16,
             "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": {tied}, "rope_theta": 10000.0}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

/// GPT-2: norms with biases, biases in all layers, learned positions, a head that is tied to the embedding.
pub(crate) fn gpt2() -> ModelConfig {
    let json = r#"{"model_type": "gpt2", "vocab_size": 48, "n_embd": 32, "n_inner": 32, "n_layer": 6, "n_head": 8, "n_positions": 16,
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0}"#;
    ModelConfig::from_json(json).unwrap()
}

/// Mistral: a sliding window, and queries that share keys in pairs.
pub(crate) fn mistral() -> ModelConfig {
    let json = r#"{"model_type": "mistral", "head_dim": 4, "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 16, "sliding_window": 3,
         "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
    ModelConfig::from_json(json).unwrap()
}

/// Qwen2-MoE: experts, of which a rank's rows choose only some, a shared one, and a dense layer among them.
pub(crate) fn experts() -> ModelConfig {
    let json = r#"{"model_type": "qwen2_moe", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 16, "num_experts": 12,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "mlp_only_layers": [2],
         "rms_norm_eps": 1e-5, "initializer_range": 0.2, "rope_theta": 10000.0}"#;
    ModelConfig::from_json(json).unwrap()
}

/// DeepSeek V3: latent attention with values that are narrower than keys, groups of experts, a shared one, and a dense layer.
pub(crate) fn deepseek() -> ModelConfig {
    let json = r#"{"model_type": "deepseek_v3", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
         "num_attention_heads": 8, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
         "max_position_embeddings": 16, "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 3,
         "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": true, "initializer_range": 0.2}"#;
    ModelConfig::from_json(json).unwrap()
}

/// The rows of a step; some targets do not count, a different number in each row.
pub(crate) fn batch(step: usize) -> (Tensor, Tensor) {
    batch_of(step, LEN)
}

/// Like `batch`, with rows of another length.
pub(crate) fn batch_of(step: usize, len: usize) -> (Tensor, Tensor) {
    let token = |i: usize| ((i * 7 + step * 11 + i * i % 5) % 48) as u32;
    let tokens: Vec<u32> = (0..ROWS * len).map(token).collect();
    let targets = (0..ROWS * len).map(|i| match (i / len + i) % 4 {
        0 if i / len != 3 => -100,
        _ => i64::from((token(i) * 3 + 1) % 48),
    });
    let targets: Vec<i64> = targets.collect();
    (
        Tensor::from_vec(tokens, (ROWS, len), &Device::Cpu).unwrap(),
        Tensor::from_vec(targets, (ROWS, len), &Device::Cpu).unwrap(),
    )
}

/// AdamW with weight decay for matrices only.
pub(crate) fn optimizer(parallel: &Parallel<CausalLm>) -> Result<Adam> {
    let config = AdamConfig { learning_rate: 0.01, weight_decay: 0.1, ..AdamConfig::adamw() };
    Ok(Adam::named(parallel.named_vars(), config)?.decaying(|name| parallel.is_matrix(name)))
}

/// The model and how it is trained.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) schedule: ScheduleKind,
    pub(crate) dtype: DType,
    pub(crate) tied: bool,
    pub(crate) recompute: Recompute,
    pub(crate) loss_scale: Option<LossScalerConfig>,
    pub(crate) sequence_parallel: bool,
    /// Use GPT-2 in place of the other two models.
    pub(crate) gpt2: bool,
    /// Use Mistral in place of the others.
    pub(crate) mistral: bool,
    /// Use Qwen2-MoE in place of the others.
    pub(crate) experts: bool,
    /// Use DeepSeek V3 in place of the others, and move the corrections of its experts.
    pub(crate) deepseek: bool,
    /// Length of rows.
    pub(crate) len: usize,
    pub(crate) dropout: f64,
    /// Whether rows are packed: each has documents of other lengths.
    pub(crate) packed: bool,
    /// The loss of pairs of answers, if rows have those.
    pub(crate) pairs: Option<PreferenceLoss>,
    /// How experts are balanced.
    pub(crate) balance: Option<BalanceLoss>,
    pub(crate) micro_batches: Option<usize>,
    /// What documents are scored for, in place of the next token; rows are then packed.
    pub(crate) problem: Option<Problem>,
    /// Number of groups of `far` with which the run is to go on.
    pub(crate) far_groups: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            schedule: ScheduleKind::OneFOneB,
            dtype: DType::F64,
            tied: true,
            recompute: Recompute::None,
            loss_scale: None,
            sequence_parallel: false,
            gpt2: false,
            mistral: false,
            experts: false,
            deepseek: false,
            len: LEN,
            dropout: 0.0,
            packed: false,
            pairs: None,
            balance: None,
            micro_batches: None,
            problem: None,
            far_groups: 1,
        }
    }
}

impl Setup {
    /// Builds the model, from random weights unless others are given.
    pub(crate) fn parallel(
        &self,
        comm: Arc<dyn girandole::comm::Communicator>,
        layout: &Layout,
        weights: Option<InitialWeights>,
    ) -> girandole::Result<Parallel<CausalLm>> {
        let weights = weights.unwrap_or_else(|| self.weights());
        let (settings, build) = self.parts(layout)?;
        Parallel::new(comm, layout, weights, &settings, build)
    }

    /// Builds the model on a rank that joins a running job.
    pub(crate) fn joining(
        &self,
        comm: Arc<dyn girandole::comm::Communicator>,
        layout: &Layout,
    ) -> girandole::Result<Parallel<CausalLm>> {
        let (settings, build) = self.parts(layout)?;
        Parallel::joining(comm, layout, self.weights(), &settings, build)
    }

    fn config(&self) -> ModelConfig {
        let config = match (self.deepseek, self.experts, self.mistral, self.gpt2) {
            (true, ..) => deepseek(),
            (_, true, ..) => experts(),
            (_, _, true, _) => mistral(),
            (.., true) => gpt2(),
            _ => config(self.tied),
        };
        let config = config.with_dropout(self.dropout).unwrap();
        let Some(problem) = self.problem else { return config };
        config.with_labels(labels(problem)).unwrap().with_dropout(self.dropout).unwrap()
    }

    fn weights(&self) -> InitialWeights {
        Weights::random(&self.config(), 7).unwrap().parts().into()
    }

    fn parts(
        &self,
        layout: &Layout,
    ) -> Result<(ParallelConfig, impl Fn(&Builder) -> Result<CausalLm> + Send + Sync + 'static)> {
        let config = self.config();
        let whole = Layout { far: layout.far.max(self.far_groups), ..*layout };
        let rows = ROWS / whole.data_ranks();
        let most = if rows.is_multiple_of(2) { 2 } else { 1 };
        let micro_batches = self.micro_batches.unwrap_or(most);
        let counting = config.experts.as_ref().map(|experts| ExpertBalance::counting(experts.count));
        let settings = ParallelConfig {
            dtype: self.dtype,
            micro_batches,
            example: Some(Tensor::zeros((rows / micro_batches, self.len), DType::U32, &Device::Cpu)?),
            schedule: self.schedule,
            recompute: self.recompute,
            loss_scale: self.loss_scale,
            sequence_parallel: self.sequence_parallel,
            seed: 3,
            far_groups: self.far_groups,
            balance: counting.map(|counting| ExpertBalance {
                loss: self.balance,
                coefficient: 0.5,
                bias: self.deepseek.then_some(0.01),
                ..counting
            }),
            ..ParallelConfig::default()
        };
        Ok((settings, move |builder: &Builder| CausalLm::new(&config, builder)))
    }
}

/// Returns this rank's rows of a step.
pub(crate) fn own_batch(parallel: &Parallel<CausalLm>, step: usize) -> Result<(Tensor, Tensor)> {
    own_batch_of(parallel, step, LEN)
}

/// Like `own_batch`, with rows of another length.
pub(crate) fn own_batch_of(
    parallel: &Parallel<CausalLm>,
    step: usize,
    len: usize,
) -> Result<(Tensor, Tensor)> {
    let (data, (tokens, targets)) = (parallel.data_ranks(), batch_of(step, len));
    // Rows are assigned to ranks in turn, as in the trainer.
    let own: Vec<u32> = (data.rank()..ROWS).step_by(data.world_size()).map(|row| row as u32).collect();
    let own = Tensor::new(&own[..], &Device::Cpu)?;
    let part = |all: &Tensor| all.index_select(&own, 0);
    Ok((part(&tokens)?, part(&targets)?))
}

/// The lengths of the documents of a step's rows; the last place of some is unused.
pub(crate) fn documents_of(step: usize, len: usize) -> Vec<Vec<u32>> {
    let of_row = |row: usize| {
        let (first, unused) = ((row * 3 + step) % len, usize::from(row % 3 == 1));
        let second = (len - first - unused).min(1 + row % 2);
        let lengths = [first, second, len - first - second - unused];
        lengths.into_iter().filter(|len| *len > 0).map(|len| len as u32).collect()
    };
    (0..ROWS).map(of_row).collect()
}

/// Three labels, or one number, which two ranks do not divide.
pub(crate) fn labels(problem: Problem) -> LabelsConfig {
    let count = if problem == Problem::Regression { 1 } else { 3 };
    LabelsConfig { names: (0..count).map(|id| id.to_string()).collect(), problem, pad_token: None }
}

/// The labels of a row's documents, at the last place of each; some documents, and one row, have none.
fn scored(row: usize, step: usize, lengths: &[u32], problem: Problem) -> Vec<(u32, Vec<f32>)> {
    let (mut end, mut all) = (0, Vec::new());
    for (document, len) in lengths.iter().enumerate() {
        end += len;
        let number = row * 5 + document * 3 + step;
        if row == 3 || (document + row) % 4 == 2 {
            continue;
        }
        let numbers = match problem {
            Problem::SingleLabel => vec![(number % 3) as f32],
            Problem::MultiLabel => (0..3).map(|label| ((number + label) % 2) as f32).collect(),
            Problem::Regression => vec![(number % 7) as f32 / 3.0 - 1.0],
        };
        all.push((end - 1, numbers));
    }
    all
}

/// Like `own_batch`, for a setup.
pub(crate) fn own_rows(parallel: &Parallel<CausalLm>, step: usize, setup: &Setup) -> Result<Batch> {
    let batch = Batch::from(own_batch_of(parallel, step, setup.len)?);
    if let Some(loss) = setup.pairs {
        return own_pairs(parallel, step, batch, loss);
    }
    if !setup.packed && setup.problem.is_none() {
        return Ok(batch);
    }
    let (data, all) = (parallel.data_ranks(), documents_of(step, setup.len));
    let own = all.into_iter().enumerate().skip(data.rank()).step_by(data.world_size());
    let (rows, own): (Vec<usize>, Vec<Vec<u32>>) = own.unzip();
    if let Some(problem) = setup.problem {
        let scored: Vec<_> =
            rows.iter().zip(&own).map(|(row, lengths)| scored(*row, step, lengths, problem)).collect();
        let targets = labels(problem).targets(&scored, setup.len, &Device::Cpu)?;
        return Ok(Batch { targets, documents: Some(Documents::new(own)?), ..batch });
    }
    let ignored = Tensor::full(-100i64, (1, 1), &Device::Cpu)?;
    for (row, lengths) in own.iter().enumerate().filter(|(_, row)| row.iter().sum::<u32>() < setup.len as u32)
    {
        let (row, used) = (batch.targets.narrow(0, row, 1)?, lengths.iter().sum::<u32>() as usize);
        row.slice_set(&ignored, 1, used)?;
    }
    Ok(Batch { documents: Some(Documents::new(own)?), ..batch })
}

/// Makes pairs of the rows of a batch: none to two of them in a row, of several lengths.
fn own_pairs(
    parallel: &Parallel<CausalLm>,
    step: usize,
    batch: Batch,
    loss: PreferenceLoss,
) -> Result<Batch> {
    let data = parallel.data_ranks();
    let (mut documents, mut pairs, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    for (own, tokens) in batch.input.to_vec2::<u32>()?.iter().enumerate() {
        let row = own * data.world_size() + data.rank();
        let lengths: &[u32] = match (row + step) % 5 {
            0 => &[3, 3],
            1 => &[2, 4, 3, 2],
            2 => &[6, 5],
            3 => &[],
            _ => &[2, 2, 4, 4],
        };
        let mut of_row = vec![-100i64; tokens.len()];
        let mut begin = 0;
        for (number, len) in lengths.iter().map(|len| *len as usize).enumerate() {
            if loss == PreferenceLoss::Reward {
                // The score of a document's last place is its reward.
                of_row[begin + len - 1] = 0;
                begin += len;
                continue;
            }
            let is_prompt =
                |place: usize| len > 2 && place == begin && (number % 2 == 1 || loss != PreferenceLoss::Orpo);
            for place in (begin..begin + len - 1).filter(|place| !is_prompt(*place)) {
                of_row[place] = i64::from(tokens[place + 1]);
            }
            begin += len;
        }
        targets.extend(of_row);
        let answers = |pair: &[u32]| [0, 1].map(|which| u32::from(pair[which] > 2));
        let (reference, margin) = ([-3.0 - row as f64, -4.5], 0.25 * row as f64 - 0.5);
        let pair = |pair: &[u32]| Pair { answers: answers(pair), reference, margin };
        pairs.push(lengths.chunks(2).map(pair).collect());
        documents.push(lengths.to_vec());
    }
    let config = PreferenceConfig {
        loss,
        beta: 0.3,
        label_smoothing: 0.1,
        centering: 0.05,
        ..PreferenceConfig::default()
    };
    Ok(Batch {
        targets: Tensor::from_vec(targets, batch.targets.shape(), &Device::Cpu)?,
        documents: Some(Documents::new(documents)?),
        preferences: Some(Preferences::new(config, pairs)?),
        ..batch
    })
}

pub(crate) fn step(
    parallel: &mut Parallel<CausalLm>,
    optimizer: &mut Adam,
    number: usize,
) -> girandole::Result<f64> {
    step_of(parallel, optimizer, number, &Setup::default())
}

/// Like `step`, for a setup.
pub(crate) fn step_of(
    parallel: &mut Parallel<CausalLm>,
    optimizer: &mut Adam,
    number: usize,
    setup: &Setup,
) -> girandole::Result<f64> {
    let mut step = parallel.step_batch(&own_rows(parallel, number, setup)?)?;
    parallel.clip_grad_norm(&mut step.grads, 0.5)?;
    optimizer.step(&step.grads)?;
    parallel.move_corrections()?;
    Ok(step.loss + step.balance_loss.unwrap_or(0.0))
}

/// A chain of units of one kind, with the mean squared error.
pub(crate) struct Chain<B: Module>(pub(crate) Vec<Unit<B>>);

impl<B: Module + Send + Sync + 'static> Units for Chain<B> {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl<B: Module + Send + Sync + 'static> Model for Chain<B> {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        candle_nn::loss::mse(output, targets)
    }
}
