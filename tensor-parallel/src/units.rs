//! Adapter for models written with [`training::build`]: their layers become tensor-parallel layers.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use comm::autograd;
use ops::tape::{explicit_op1, explicit_op2};
use ops::{LinearCrossEntropyConfig, embedding, wide_dtype};
use training::build::{
    Builder, Division as Wanted, Layers, Linear, LinearConfig, Vocabulary, VocabularyConfig, WholeLayers,
    is_counting,
};

use crate::context::sequence_dim;
use crate::division::Division;
use crate::{
    ColumnConfig, ColumnParallelLinear, Context, RowConfig, RowParallelLinear, ShardBuilder, Shards, Split,
    op, vocab_parallel_cross_entropy, vocab_parallel_log_probs,
};

impl From<ShardBuilder> for Builder {
    /// Divides the layers over the ranks; everything else in the model is whole on every rank. Sequence parallelism is
    /// refused: the input of such models is whole sequences.
    fn from(shards: ShardBuilder) -> Self {
        let vb = WholeBackend { shards: shards.clone(), summed: false }.var_builder("");
        Builder::new(vb).with_layers(Arc::new(Divided::Root(shards)))
    }
}

impl Shards {
    /// Returns the layers for a model that something else builds, such as a pipeline: `builder.with_layers(shards.layers())`.
    pub fn layers(&self) -> Arc<dyn Layers> {
        Arc::new(Divided::Elsewhere(self.clone()))
    }
}

/// Factory of layers that are divided over the ranks.
enum Divided {
    Root(ShardBuilder),
    Elsewhere(Shards),
}

impl Divided {
    /// Returns the builder for the path of `vb`.
    fn at(&self, vb: &VarBuilder<'static>) -> ShardBuilder {
        match (self, vb.prefix()) {
            (Self::Root(shards), prefix) if prefix.is_empty() => shards.clone(),
            (Self::Root(shards), prefix) => shards.pp(prefix),
            (Self::Elsewhere(shards), _) => shards.of(vb.clone()),
        }
    }

    fn context(&self) -> &Context {
        match self {
            Self::Root(shards) => shards.context(),
            Self::Elsewhere(shards) => shards.context(),
        }
    }

    fn check(&self, vb: &VarBuilder<'static>) -> Result<()> {
        let expected = match self {
            Self::Root(shards) => shards.dtype(),
            Self::Elsewhere(_) => vb.dtype(),
        };
        if vb.dtype() != expected {
            bail!(
                "{}: divided models have one dtype: {:?} is asked for, the others are {expected:?}",
                vb.prefix(),
                vb.dtype()
            )
        }
        match self {
            Self::Root(_) if self.context().sequence_parallel() => bail!(
                "models of training::build are divided along the sequence by girandole::Parallel alone: turn sequence_parallel off"
            ),
            _ => Ok(()),
        }
    }
}

impl Layers for Divided {
    fn ranks(&self) -> usize {
        self.context().ranks()
    }

    fn rank(&self) -> usize {
        self.context().rank()
    }

    fn between(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        match self.ranks() > 1 && self.context().sequence_parallel() {
            true => self.of_heads(vb),
            false => vb.clone(),
        }
    }

    fn positions(&self, len: usize) -> Result<Range<usize>> {
        Ok(self.context().positions(len)?)
    }

    fn positions_before(&self, own: usize) -> usize {
        if self.context().sequence_parallel() { self.rank() * own } else { 0 }
    }

    fn of_heads(&self, vb: &VarBuilder<'static>) -> VarBuilder<'static> {
        let summed = self.ranks() > 1;
        WholeBackend { shards: self.at(&vb.root()), summed }.var_builder(&vb.prefix())
    }

    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Tensor> {
        self.check(vb)?;
        let split = match config.division {
            _ if self.ranks() == 1 => return WholeLayers.weight(vb, config),
            Wanted::Whole => return WholeLayers.weight(&self.between(vb), config),
            Wanted::Outputs => Split::Rows { groups: config.groups },
            Wanted::Inputs => Split::Columns,
        };
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let builder = self.at(vb).frozen(config.frozen);
        Ok(builder.get((config.outputs, config.inputs), "weight", init, split)?)
    }

    fn vector(
        &self,
        vb: &VarBuilder<'static>,
        name: &str,
        init: Init,
        config: &LinearConfig,
    ) -> Result<Tensor> {
        self.check(vb)?;
        match config.division {
            _ if self.ranks() == 1 => WholeLayers.vector(vb, name, init, config),
            Wanted::Whole | Wanted::Inputs => WholeLayers.vector(&self.between(vb), name, init, config),
            Wanted::Outputs => {
                let (builder, split) =
                    (self.at(vb).frozen(config.frozen), Split::Rows { groups: config.groups });
                Ok(builder.get(config.outputs, name, init, split)?)
            }
        }
    }

    fn skip_weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<()> {
        match self {
            Self::Elsewhere(shards) if !is_counting() => {
                let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
                let shape = (config.outputs, config.inputs).into();
                Ok(shards.skip(&format!("{}.weight", vb.prefix()), shape, init, vb.dtype())?)
            }
            _ => self.weight(vb, config).map(drop),
        }
    }

    fn divide(&self, x: &Tensor) -> Result<Tensor> {
        let context = self.context();
        Ok(match context.sequence_parallel() {
            _ if self.ranks() == 1 => x.clone(),
            true => autograd::all_gather(x, sequence_dim(x.dims())?, context.comm())?,
            false => autograd::copy_to_group(x, context.comm())?,
        })
    }

    fn combine(&self, part: &Tensor) -> Result<Tensor> {
        let context = self.context();
        Ok(match context.sequence_parallel() {
            _ if self.ranks() == 1 => part.clone(),
            true => autograd::reduce_scatter(part, context.check_sequence(part.dims())?, context.comm())?,
            false => autograd::reduce_from_group(part, context.comm())?,
        })
    }

    fn gather(&self, x: &Tensor) -> Result<Tensor> {
        if self.ranks() == 1 { Ok(x.clone()) } else { Ok(self.context().gather_sequence(x)?) }
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> Result<Linear> {
        self.check(vb)?;
        let &LinearConfig { inputs, outputs, bias, division, groups, frozen } = config;
        let builder = || self.at(vb).frozen(frozen);
        if self.ranks() == 1 {
            return WholeLayers.linear(vb, config);
        }
        Ok(match division {
            Wanted::Whole => return WholeLayers.linear(&self.between(vb), config),
            Wanted::Outputs => {
                let config = ColumnConfig { bias, groups, ..ColumnConfig::default() };
                Linear::new(ColumnParallelLinear::new(inputs, outputs, &config, &builder())?)
            }
            Wanted::Inputs => {
                let config = RowConfig { bias, ..RowConfig::default() };
                Linear::new(RowParallelLinear::new(inputs, outputs, &config, &builder())?)
            }
        })
    }

    fn vocabulary(&self, vb: &VarBuilder<'static>, config: &VocabularyConfig) -> Result<Arc<dyn Vocabulary>> {
        self.check(vb)?;
        if self.ranks() == 1 {
            return WholeLayers.vocabulary(vb, config);
        }
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let &VocabularyConfig { tokens, features, frozen } = config;
        let builder = self.at(vb).frozen(frozen);
        let weight = builder.parameter((tokens, features), "weight", init, Division::VOCABULARY)?;
        Ok(Arc::new(Table { weight, tokens, context: self.context().clone() }))
    }
}

/// Embedding table of which each rank has the vectors of some tokens.
struct Table {
    weight: Tensor,
    tokens: usize,
    context: Context,
}

impl Vocabulary for Table {
    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(op::embedding(tokens, (&self.weight, self.tokens), &self.context)?)
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.context.gather_shares(&op::column(x, &self.weight, None, &self.context)?, self.tokens)?)
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, config: &LinearCrossEntropyConfig) -> Result<Tensor> {
        if config.label_smoothing != 0.0 {
            bail!("label smoothing is not there where the vocabulary is divided over ranks")
        }
        let (rows, targets) = counted(targets, config.ignore_index)?;
        let (x, context) = self.selected(x, rows.as_ref())?;
        if targets.elem_count() == 0 {
            // The mean over nothing is NaN, as with an undivided vocabulary.
            return x.to_dtype(wide_dtype(x.dtype()))?.sum_all()? + f64::NAN;
        }
        Ok(vocab_parallel_cross_entropy(&self.own_logits(&x, &context)?, &targets, &context)?)
    }

    fn log_probs(&self, x: &Tensor, targets: &Tensor, ignored: i64) -> Result<Tensor> {
        let (dims, all) = (targets.dims(), targets.elem_count());
        let (rows, targets) = counted(targets, Some(ignored))?;
        if targets.elem_count() == 0 {
            let none = Tensor::zeros(dims, wide_dtype(x.dtype()), x.device())?;
            // Also of the weight, which others of its unit may wait for.
            return explicit_op2("log_probs", [x, &self.weight], none, |of, _| {
                let [x, weight] = of.map(|tensor| tensor.zeros_like().map(|zero| Some(zero.detach())));
                Ok([x?, weight?])
            });
        }
        let (x, context) = self.selected(x, rows.as_ref())?;
        let found = vocab_parallel_log_probs(&self.own_logits(&x, &context)?, &targets, &context)?;
        let Some(rows) = rows else { return found.reshape(dims) };
        let placed =
            Tensor::zeros(all, found.dtype(), found.device())?.index_add(&rows, &found.detach(), 0)?;
        explicit_op1("log_probs", [&found], placed.reshape(dims)?, move |_, gradient| {
            Ok([Some(gradient.detach().flatten_all()?.index_select(&rows, 0)?)])
        })
    }
}

impl Table {
    /// The rows that count, `None` if that is all of them, and the context in which logits are computed of them.
    fn selected(&self, x: &Tensor, rows: Option<&Tensor>) -> Result<(Tensor, Context)> {
        let Some(rows) = rows else { return Ok((x.clone(), self.context.clone())) };
        // They may belong to any rank's part of the sequence.
        let features = x.dims().last().copied().unwrap_or(1);
        let all = self.context.gather_sequence(x)?.reshape(((), features))?;
        Ok((embedding(&all, rows)?, self.context.without_sequence_parallelism()))
    }

    /// This rank's classes of the logits of all rows, in f32 or f64.
    fn own_logits(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let own = op::column(x, &self.weight, None, context)?;
        let classes = own.dims().last().copied().unwrap_or(1);
        own.to_dtype(wide_dtype(own.dtype()))?.reshape(((), classes))
    }
}

/// Returns the rows whose targets are not ignored, `None` if that is all of them, and their targets.
fn counted(targets: &Tensor, ignored: Option<i64>) -> Result<(Option<Tensor>, Tensor)> {
    let targets = targets.flatten_all()?.to_dtype(DType::I64)?;
    let numbers = targets.to_vec1::<i64>()?;
    if !numbers.iter().any(|target| Some(*target) == ignored) {
        return Ok((None, targets));
    }
    let rows = (0u32..).zip(&numbers).filter(|(_, target)| Some(**target) != ignored).map(|(row, _)| row);
    let rows = Tensor::from_iter(rows, targets.device())?;
    let targets = targets.index_select(&rows, 0)?;
    Ok((Some(rows), targets))
}

/// `VarBuilder` backend of parameters that every rank holds whole.
struct WholeBackend {
    shards: ShardBuilder,
    /// Whether each rank computes only a part of the gradient.
    summed: bool,
}

impl WholeBackend {
    fn var_builder(self, prefix: &str) -> VarBuilder<'static> {
        let (dtype, device) = (self.shards.dtype(), self.shards.device().clone());
        let root = VarBuilder::from_backend(Box::new(self), dtype, device);
        if prefix.is_empty() { root } else { root.pp(prefix) }
    }
}

impl SimpleBackend for WholeBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let division = Division { summed: self.summed, ..Split::Whole.into() };
        Ok(self.shards.clone().of_dtype(name, dtype)?.parameter(shape, name, init, division)?)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}
