//! A Transformer of your own in every layout: `cargo run --release -p girandole --example own_transformer -- pp=2,tp=2`
//!
//! The heads of attention are divided over the ranks of `tp`, and the head of the model is its embedding once more.

mod common;

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::Init;
use girandole::launch::RankContext;
use girandole::ops::{AttentionConfig, AttentionMask, RmsNorm, attention, columns, cross_entropy, rms_norm};
use girandole::training::build::{
    Builder, Division, Linear, LinearConfig, Model, Part, Unit, Units, Vocabulary,
};
use girandole::training::{Adam, AdamConfig};
use girandole::{DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};

const TOKENS: usize = 40;
const LENGTH: usize = 16;
const FEATURES: usize = 32;
const HEADS: usize = 4;

struct Embedding {
    table: Arc<dyn Vocabulary>,
    positions: Tensor,
}

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.table.embed(tokens)?.broadcast_add(&self.positions)
    }
}

struct Block {
    norms: [RmsNorm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    attention: AttentionConfig,
}

impl Block {
    fn new(part: &Part) -> Result<Self> {
        let linear = |name: &str, config: LinearConfig| part.pp(name).linear(&config);
        let norm = |name: &str| rms_norm(FEATURES, 1e-5, part.pp(name).whole());
        // Three layers in one: each rank has its heads of the queries, of the keys and of the values.
        let qkv = LinearConfig { groups: 3, ..LinearConfig::new(FEATURES, 3 * FEATURES, Division::Outputs) };
        let heads = part.share("heads of attention", HEADS)?;
        Ok(Self {
            norms: [norm("norm1")?, norm("norm2")?],
            qkv: linear("qkv", qkv)?,
            out: linear("out", LinearConfig::new(FEATURES, FEATURES, Division::Inputs))?,
            up: linear("up", LinearConfig::new(FEATURES, 4 * FEATURES, Division::Outputs))?,
            down: linear("down", LinearConfig::new(4 * FEATURES, FEATURES, Division::Inputs))?,
            attention: AttentionConfig::new(heads, AttentionMask::Causal),
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.norms[0].forward(x)?)?;
        let width = qkv.dim(2)? / 3;
        let part = |place: usize| columns(&qkv, place * width..(place + 1) * width);
        let x = (x + self.out.forward(&attention(&part(0)?, &part(1)?, &part(2)?, &self.attention)?)?)?;
        &x + self.down.forward(&self.up.forward(&self.norms[1].forward(&x)?)?.gelu()?)?
    }
}

struct Head {
    table: Arc<dyn Vocabulary>,
    norm: RmsNorm,
}

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The table's vectors are as long as embeddings; logits are small at the start.
        self.table.logits(&(self.norm.forward(x)? * (FEATURES as f64).powf(-0.5))?)
    }
}

struct Transformer {
    embedding: Unit<Embedding>,
    blocks: Vec<Unit<Block>>,
    head: Unit<Head>,
}

impl Transformer {
    fn new(builder: &Builder) -> Result<Self> {
        let table = |part: &Part| part.pp("embedding").vocabulary(TOKENS, FEATURES);
        let embedding = builder.unit("embedding", |part| {
            let init = Init::Randn { mean: 0.0, stdev: 0.1 };
            let positions = part.whole().get_with_hints((LENGTH, FEATURES), "positions", init)?;
            Ok(Embedding { table: table(part)?, positions })
        })?;
        let block = |number: usize| {
            let name = format!("blocks.{number}");
            builder.unit(&name, |part| Block::new(&part.pp(&name)))
        };
        let blocks = (0..4).map(block).collect::<Result<_>>()?;
        let head = builder.unit_sharing("head", &embedding, |part, embedding| {
            let norm = rms_norm(FEATURES, 1e-5, part.pp("head.norm").whole())?;
            // In a pipeline the last stage has a copy of its own, which `ties` keeps equal.
            let table = match embedding {
                Some(embedding) => embedding.table.clone(),
                None => part.pp("head").vocabulary(TOKENS, FEATURES)?,
            };
            Ok(Head { table, norm })
        })?;
        Ok(Self { embedding, blocks, head })
    }
}

impl Units for Transformer {
    fn units(&self) -> Vec<&dyn Module> {
        let blocks = self.blocks.iter().map(|block| block as &dyn Module);
        [&self.embedding as &dyn Module]
            .into_iter()
            .chain(blocks)
            .chain([&self.head as &dyn Module])
            .collect()
    }
}

impl Model for Transformer {
    fn output_loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy(&logits.reshape(((), TOKENS))?, &targets.flatten_all()?, None)
    }

    fn ties(&self) -> Vec<(String, String)> {
        vec![("embedding.weight".into(), "head.weight".into())]
    }
}

/// Rows that count in steps of their own, and the token after each.
fn rows() -> Result<(Tensor, Tensor)> {
    let row = |row: usize| (0..=LENGTH).map(move |place| ((7 * row + (1 + row % 5) * place) % TOKENS) as i64);
    let all = Tensor::from_iter((0..24).flat_map(row), &Device::Cpu)?.reshape((24, LENGTH + 1))?;
    let tokens = all.narrow(1, 0, LENGTH)?.contiguous()?.to_dtype(DType::U32)?;
    Ok((tokens, all.narrow(1, 1, LENGTH)?.contiguous()?))
}

fn train(context: RankContext, layout: &Layout) -> girandole::Result<()> {
    let (comm, config) = (Arc::new(context.connect()?), ParallelConfig::default());
    let mut model = Parallel::new(comm, layout, InitialWeights::seed(42), &config, Transformer::new)?;
    let adam = AdamConfig { learning_rate: 0.01, ..AdamConfig::default() };
    let mut optimizer = Adam::named(model.named_vars(), adam)?;
    let (tokens, targets) = rows()?;
    let (ranks, rank) = (layout.data_ranks(), model.data_ranks().rank());
    let (tokens, targets) = (tokens.chunk(ranks, 0)?[rank].clone(), targets.chunk(ranks, 0)?[rank].clone());
    for number in 0..=60 {
        let mut step = model.step(&tokens, &targets)?;
        model.clip_grad_norm(&mut step.grads, 1.0)?;
        optimizer.step_scaled(&step.grads, 1.0)?;
        if number % 20 == 0 && model.mesh().world().rank() == 0 {
            eprintln!("step {number}: loss {:.6}", step.loss);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    common::run_in_layout(train)
}
