//! Causal language model: embedding, blocks and head.

use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_nn::Init;
use ops::tape::add;
use ops::{
    DividedRows, LinearCrossEntropyConfig, PreferenceLoss, RowContext, cross_entropy, embedding, wide_dtype,
};
use training::build::{Builder, Layers, Model, Part, Recompute, Unit, Units, Vocabulary, whole_rows};

use crate::block::{Block, KvCache, Norm, ResidualDropout, rotary_positions};
use crate::labels::{self, Scores};
use crate::names::{self, Names};
use crate::rotary::checked_longest;
use crate::{Family, ModelConfig};

/// Target value of positions without a target.
const IGNORED: i64 = -100;

/// Token embedding, with learned positions for GPT-2.
struct Embedding {
    tokens: Arc<dyn Vocabulary>,
    positions: Option<Tensor>,
    dropped: ResidualDropout,
    layers: Arc<dyn Layers>,
    device: Device,
}

impl Embedding {
    fn new(config: &ModelConfig, names: &Names, part: &Part) -> Result<Self> {
        let part = part.pp(names.base);
        let tokens = part.pp(names.embedding).vocabulary(config.vocab_size, config.hidden_size)?;
        let init = Init::Randn { mean: 0.0, stdev: config.initializer_range };
        let positions = match config.family {
            Family::Gpt2 => {
                let shape = (config.max_len, config.hidden_size);
                Some(part.pp("wpe").whole().get_with_hints(shape, "weight", init)?)
            }
            _ => None,
        };
        let dropped = ResidualDropout::new(config.dropout.embedding, "after_embedding", &part)?;
        let layers = part.layers().clone();
        Ok(Self { tokens, positions, dropped, layers, device: part.whole().device().clone() })
    }

    /// Embeds tokens that follow `offset` earlier ones.
    fn forward_at(&self, tokens: &Tensor, offset: usize) -> Result<Tensor> {
        let (_, len) = tokens.dims2()?;
        let x = self.tokens.embed(tokens)?;
        let Some(table) = &self.positions else { return self.dropped.forward(&x) };
        let (context, rows) = (RowContext::current(), tokens.dim(0)?);
        checked_longest(&context, offset.saturating_add(len), table.dim(0)?)?;
        let own = self.layers.positions(len)?;
        let places = offset + own.start..offset + own.end;
        let positions = match context.positions("the position embedding", rows, places.clone())? {
            Some(positions) => Tensor::from_vec(positions, (rows, own.len()), table.device())?,
            None => {
                let places = places.map(|place| place as u32).collect();
                Tensor::from_vec(places, (1, own.len()), table.device())?.repeat((rows, 1))?
            }
        };
        self.dropped.forward(&add(&x, &embedding(table, &positions)?)?)
    }
}

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.forward_at(tokens, 0)
    }
}

/// Final norm and output head.
struct Head {
    norm: Norm,
    outputs: Outputs,
}

enum Outputs {
    /// Logits of the next token.
    Tokens(Arc<dyn Vocabulary>),
    /// Scores of documents.
    Labels(Scores),
}

impl Head {
    fn new(config: &ModelConfig, names: &Names, part: &Part, shared: Option<&Embedding>) -> Result<Self> {
        let norm = Norm::new(config, &part.pp(names.base).pp(names.norm))?;
        let outputs = match (shared, &config.labels) {
            (_, Some(labels)) => Outputs::Labels(Scores::new(labels, config.hidden_size, &part.pp("score"))?),
            (Some(embedding), None) => Outputs::Tokens(embedding.tokens.clone()),
            (None, None) => {
                Outputs::Tokens(part.pp("lm_head").vocabulary(config.vocab_size, config.hidden_size)?)
            }
        };
        Ok(Self { norm, outputs })
    }
}

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(x)?;
        match &self.outputs {
            Outputs::Tokens(tokens) => tokens.logits(&x),
            Outputs::Labels(scores) => scores.forward(&x),
        }
    }
}

/// Causal language model (next-token prediction), of any [`Family`].
///
/// It is a chain of units: the embedding, each block, the head. Parameters have the names of transformers; GPT-2's
/// `Conv1D` weights are `(outputs, inputs)` here, and transposed in files.
///
/// [Dropout](ModelConfig::dropout) is active only within [`RowKeys::scope`](ops::RowKeys::scope), which
/// `girandole::Parallel` opens around each forward pass of a step. In a scope of [`Documents`](ops::Documents) rows are
/// packed: the logits are those of each document alone, which may have as many tokens as the model has positions.
pub struct CausalLm {
    config: ModelConfig,
    embedding: Unit<Embedding>,
    blocks: Vec<Unit<Block>>,
    head: Unit<Head>,
}

/// Key-value cache of the tokens that a model has processed, so that only new tokens are computed.
#[derive(Debug, Default)]
pub struct Cache {
    blocks: Vec<KvCache>,
}

impl Cache {
    /// Returns an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.blocks.first().map_or(0, KvCache::len)
    }

    /// Returns true if no token has been processed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CausalLm {
    /// Builds the model, in the layout of the builder.
    ///
    /// # Errors
    /// Sizes that the number of ranks does not divide; errors of the builder.
    pub fn new(config: &ModelConfig, builder: &Builder) -> Result<Self> {
        let names = names::of(config.family);
        let name = |part: &str| format!("{}.{part}", names.base);
        let embedding = builder.unit(&name(names.embedding), |part| Embedding::new(config, &names, part))?;
        let positions = rotary_positions(config);
        let block = |layer: usize| {
            builder.unit(&name(&format!("{}.{layer}", names.blocks)), |part| {
                let part = part.pp(names.base).pp(names.blocks).pp(layer);
                Block::new(config, layer, positions.as_ref(), &part)
            })
        };
        let blocks = (0..config.num_layers).map(block).collect::<Result<_>>()?;
        // What a recomputed head would spare is what the loss takes: the logits.
        let last = builder.clone().recomputing(Recompute::None);
        let name = if config.labels.is_some() { "score" } else { "lm_head" };
        let head = match config.tied {
            true => {
                last.unit_sharing(name, &embedding, |part, shared| Head::new(config, &names, part, shared))?
            }
            false => last.unit(name, |part| Head::new(config, &names, part, None))?,
        };
        Ok(Self { config: config.clone(), embedding, blocks, head })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the device of the embedding; `None` if the embedding is in another process.
    pub fn device(&self) -> Option<&Device> {
        self.embedding.module().map(|embedding| &embedding.device)
    }

    /// Returns the input of the head, for all positions.
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(tokens)?;
        self.blocks.iter().try_fold(x, |x, block| block.forward(&x))
    }

    /// Returns the logits of the next token at each position; of a model with [labels](ModelConfig::labels) the scores of each
    /// position, of which that at [`LabelsConfig::scored_place`](crate::LabelsConfig::scored_place) is its document's.
    ///
    /// # Shapes
    /// Tokens `(batch, length)`, of u8, u32 or i64, to `(batch, length, vocab_size)`, or `(batch, length, labels)`.
    ///
    /// # Errors
    /// A token outside the vocabulary, a row that is too long; failures of communication.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.hidden(tokens)?)
    }

    /// Returns the mean cross-entropy over `targets`, ignoring targets of -100, without holding the logits of all
    /// positions at once. In a scope of [`Preferences`](ops::Preferences) it is the mean loss of their pairs. Of a model with
    /// [labels](ModelConfig::labels), the mean loss of its [`Problem`](crate::Problem) over
    /// the documents: the target of each is at the place whose score counts, and those of all others are -100 or NaN.
    ///
    /// # Shapes
    /// Both `(batch, length)`: a target is the token that follows the one at its position, or an index of a label; of several
    /// labels and of numbers targets are f32 `(batch, length, labels)`. The loss has no dimensions.
    ///
    /// # Errors
    /// As [`logits`](Self::logits); a target outside the vocabulary.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.last_unit_loss(&self.hidden(tokens)?, targets)
    }

    /// Returns the logits of the token after the last of `tokens`, which follow those in the cache and are added to it.
    ///
    /// In a scope of [`DividedRows`](ops::DividedRows), `tokens` are this rank's places of the first tokens. Each rank gets the
    /// logits after the whole rows and all keys and values in the cache, and goes on outside of that scope.
    ///
    /// # Shapes
    /// Tokens `(batch, length)`, the same batch for all calls with one cache, to `(batch, vocab_size)`.
    ///
    /// # Cost
    /// Computes the new tokens only, with attention to all tokens. Of divided rows each rank sends its keys and values of each
    /// block to each other rank.
    ///
    /// # Errors
    /// As [`logits`](Self::logits); no tokens; divided rows after other tokens; a model with [labels](ModelConfig::labels).
    pub fn next_logits(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let (_, len) = tokens.dims2()?;
        if len == 0 {
            bail!("no tokens to continue: give one at least")
        }
        if self.config.labels.is_some() {
            bail!("the model scores documents for labels, and predicts no tokens")
        }
        let (offset, divided) = (cache.len(), RowContext::current().divided);
        if divided.is_some() && offset > 0 {
            bail!(
                "divided rows after {offset} tokens: divide the first tokens, and give later ones outside of that scope"
            )
        }
        let all = offset.saturating_add(divided.as_ref().map_or(len, DividedRows::len));
        if all > self.config.max_len {
            let longest = self.config.max_len;
            bail!("rows of {all} tokens are longer than the model's {longest} positions")
        }
        cache.blocks.resize_with(self.blocks.len(), KvCache::new);
        whole_rows(|| {
            let mut x = self.embedding.run(|embedding| embedding.forward_at(tokens, offset))?;
            for (block, kept) in self.blocks.iter().zip(&mut cache.blocks) {
                x = block.run(|block| block.forward_with(&x, Some(kept)))?;
            }
            let last = match &divided {
                Some(rows) => rows.last_of(&x)?,
                None => x.narrow(1, len - 1, 1)?.contiguous()?,
            };
            self.head.forward(&last)?.squeeze(1)
        })
    }
}

impl Units for CausalLm {
    fn units(&self) -> Vec<&dyn Module> {
        let blocks = self.blocks.iter().map(|block| block as &dyn Module);
        std::iter::once(&self.embedding as &dyn Module)
            .chain(blocks)
            .chain([&self.head as &dyn Module])
            .collect()
    }
}

impl Model for CausalLm {
    fn output_loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let classes = logits.dim(D::Minus1)?;
        // A mean in bf16 would have only 8 bits of precision.
        let logits = logits.to_dtype(wide_dtype(logits.dtype()))?;
        cross_entropy(&logits.reshape(((), classes))?, &targets.flatten_all()?, Some(IGNORED))
    }

    fn last_unit_loss(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let preferences = RowContext::current().preferences;
        self.head.run(|head| {
            let x = head.norm.forward(x)?;
            match (&head.outputs, &preferences) {
                (Outputs::Tokens(tokens), None) => {
                    tokens.loss(&x, targets, &LinearCrossEntropyConfig::default())
                }
                (Outputs::Tokens(_), Some(pairs)) if pairs.config().loss == PreferenceLoss::Reward => {
                    bail!("a reward is the score of a head with one label, and this model predicts tokens")
                }
                (Outputs::Tokens(tokens), Some(pairs)) => {
                    pairs.loss(&tokens.log_probs(&x, targets, IGNORED)?, targets, IGNORED)
                }
                (Outputs::Labels(scores), _) => scores.loss(&x, targets),
            }
        })
    }

    fn evaluate_last_unit(&self, x: &Tensor, targets: &Tensor) -> Result<(Tensor, Vec<f64>)> {
        if self.config.labels.is_none() {
            return Ok((self.last_unit_loss(x, targets)?, Vec::new()));
        }
        let mut sums = Vec::new();
        let loss = self.head.run(|head| match &head.outputs {
            Outputs::Labels(scores) => {
                let (loss, own) = scores.evaluate(&head.norm.forward(x)?, targets)?;
                sums = own;
                Ok(loss)
            }
            Outputs::Tokens(_) => bail!("a head for tokens in place of one for labels"),
        })?;
        Ok((loss, sums))
    }

    fn count(targets: &Tensor) -> Result<usize> {
        if targets.dtype().is_float() {
            return Ok(labels::scored(targets)?.len());
        }
        let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        Ok(targets.iter().filter(|target| **target != IGNORED).count())
    }

    fn ties(&self) -> Vec<(String, String)> {
        self.config.ties()
    }

    fn divides_sequences() -> bool {
        true
    }
}

impl std::fmt::Debug for CausalLm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CausalLm({}, {} blocks)", self.config.family, self.blocks.len())
    }
}
