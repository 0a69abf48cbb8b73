//! Test helpers: a dense language model of `training`'s layers, and code to train both models.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Embedding, Init, VarBuilder, VarMap, embedding};
use comm::{Communicator, Local, Mesh};
use ops::{AttentionConfig, LayerNorm, Linear, attention, cross_entropy, gelu, layer_norm, linear};
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{LanguageModelConfig, Result, Split, TensorParallel};
use training::TorchInit;

pub(crate) type Comm = Arc<dyn Communicator>;

/// Small sizes, no two of which are equal.
pub(crate) fn sizes() -> LanguageModelConfig {
    LanguageModelConfig {
        vocab_size: 24,
        d_model: 16,
        num_heads: 4,
        d_ff: 40,
        num_layers: 2,
        max_len: 13,
        ..LanguageModelConfig::default()
    }
}

/// Runs `body` on a mesh of threads.
pub(crate) fn on_mesh<T: Send>(dp: usize, tp: usize, body: impl Fn(&Mesh) -> Result<T> + Sync) -> Vec<T> {
    try_on_mesh(dp, tp, body).unwrap()
}

pub(crate) fn try_on_mesh<T: Send>(
    dp: usize,
    tp: usize,
    body: impl Fn(&Mesh) -> Result<T> + Sync,
) -> comm::Result<Vec<T>> {
    Local::run_shared(dp * tp, |comm| {
        let mesh = Mesh::new(comm, &[("dp", dp), ("tp", tp)])?;
        Ok(body(&mesh)?)
    })
}

/// Returns sequences of tokens and of the tokens that follow them, for one data-parallel rank and one step.
pub(crate) fn batch(sizes: &LanguageModelConfig, step: usize, dp_rank: usize) -> (Tensor, Tensor) {
    let (rows, len) = (3, 12);
    let mut generator = Generator::new((1000 * step + dp_rank) as u64);
    let tokens = generator.randint(rows * (len + 1), 0, sizes.vocab_size as i64).unwrap();
    let tokens = Tensor::from_vec(tokens, (rows, len + 1), &Device::Cpu).unwrap();
    let part = |start| tokens.narrow(1, start, len).unwrap().contiguous().unwrap();
    (part(0), part(1))
}

struct Layer {
    qkv: Linear,
    out: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

/// The model in a single process, of `training`'s layers.
pub(crate) struct Dense {
    pub(crate) vars: VarMap,
    sizes: LanguageModelConfig,
    embedding: Embedding,
    position: Tensor,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Tensor,
}

impl Dense {
    pub(crate) fn new(sizes: &LanguageModelConfig, seed: u64, dtype: DType) -> Self {
        let generator = SharedGenerator::from(Generator::new(seed));
        let vars = VarMap::new();
        let builder = TorchInit::var_builder(&generator, &vars, dtype, &Device::Cpu);
        Self::build(sizes, builder, vars).unwrap()
    }

    fn build(sizes: &LanguageModelConfig, b: VarBuilder<'_>, vars: VarMap) -> candle_core::Result<Self> {
        let (d, hidden) = (sizes.d_model, sizes.hidden());
        let layer = |b: VarBuilder<'_>| {
            Ok(Layer {
                qkv: linear(d, 3 * d, b.pp("attention.qkv"))?,
                out: linear(d, d, b.pp("attention.out"))?,
                norm1: layer_norm(d, 1e-5, b.pp("norm1"))?,
                norm2: layer_norm(d, 1e-5, b.pp("norm2"))?,
                fc1: linear(d, hidden, b.pp("feed_forward.fc1"))?,
                fc2: linear(hidden, d, b.pp("feed_forward.fc2"))?,
            })
        };
        let normal = Init::Randn { mean: 0.0, stdev: 1.0 };
        Ok(Self {
            vars,
            sizes: sizes.clone(),
            embedding: embedding(sizes.vocab_size, d, b.pp("embedding"))?,
            position: b.get_with_hints((sizes.max_len, d), "position.weight", normal)?,
            layers: (0..sizes.num_layers)
                .map(|place| layer(b.pp("layers").pp(place)))
                .collect::<candle_core::Result<_>>()?,
            norm: layer_norm(d, 1e-5, b.pp("norm"))?,
            head: b.get_with_hints(
                (sizes.vocab_size, d),
                "head.weight",
                candle_nn::init::DEFAULT_KAIMING_NORMAL,
            )?,
        })
    }

    pub(crate) fn logits(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.embedding.forward(tokens)?;
        let mut x = x.broadcast_add(&self.position.narrow(0, 0, tokens.dim(1)?)?)?;
        let d = self.sizes.d_model;
        for layer in &self.layers {
            let qkv = layer.qkv.forward(&layer.norm1.forward(&x)?)?;
            let part = |place: usize| qkv.narrow(2, place * d, d);
            let (heads, mask) = (self.sizes.num_heads, self.sizes.mask);
            let mixed = attention(&part(0)?, &part(1)?, &part(2)?, &AttentionConfig::new(heads, mask))?;
            x = (&x + layer.out.forward(&mixed)?)?;
            let fed = layer.fc2.forward(&gelu(&layer.fc1.forward(&layer.norm2.forward(&x)?)?)?)?;
            x = (x + fed)?;
        }
        self.norm.forward(&x)?.broadcast_matmul(&self.head.t()?)
    }

    /// Returns the mean loss over the batches of all data-parallel ranks, as one batch.
    pub(crate) fn loss(&self, step: usize, dp: usize) -> Tensor {
        let (tokens, next): (Vec<_>, Vec<_>) = (0..dp).map(|rank| batch(&self.sizes, step, rank)).unzip();
        let (tokens, next) = (Tensor::cat(&tokens, 0).unwrap(), Tensor::cat(&next, 0).unwrap());
        cross_entropy(&self.logits(&tokens).unwrap(), &next, None).unwrap()
    }

    pub(crate) fn named_vars(&self) -> Vec<(String, candle_core::Var)> {
        let mut vars: Vec<_> =
            self.vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        vars
    }

    pub(crate) fn values(&self) -> BTreeMap<String, Tensor> {
        self.named_vars().into_iter().map(|(name, var)| (name, copied(&var))).collect()
    }

    pub(crate) fn gradients(&self, gradients: &GradStore) -> BTreeMap<String, Tensor> {
        let vars = self.named_vars().into_iter();
        vars.map(|(name, var)| (name, copied(gradients.get(&var).unwrap()))).collect()
    }
}

pub(crate) fn copied(tensor: &Tensor) -> Tensor {
    tensor.force_contiguous().unwrap().detach()
}

/// Name, this rank's part, and how it is divided.
pub(crate) type Part = (String, Tensor, Split);

pub(crate) fn values<M>(parallel: &TensorParallel<M>) -> Vec<Part> {
    let part = |p: &tensor_parallel::Parameter| (p.name().to_string(), copied(p.var()), p.split());
    parallel.parameters().iter().map(part).collect()
}

pub(crate) fn gradients<M>(parallel: &TensorParallel<M>, gradients: &GradStore) -> Vec<Part> {
    let part = |p: &tensor_parallel::Parameter| {
        let gradient = gradients.get(p.var()).unwrap_or_else(|| panic!("{} has no gradient", p.name()));
        (p.name().to_string(), copied(gradient), p.split())
    };
    parallel.parameters().iter().map(part).collect()
}

/// Combines the parts of the tensor-parallel ranks; parameters that all ranks hold whole must be bitwise equal.
pub(crate) fn whole(ranks: &[Vec<Part>]) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for (place, (name, first, split)) in ranks[0].iter().enumerate() {
        let parts: Vec<&Tensor> = ranks.iter().map(|rank| &rank[place].1).collect();
        let tensor = match *split {
            Split::Whole => {
                parts.iter().for_each(|part| assert_eq!(bits(part), bits(first), "{name}"));
                first.clone()
            }
            Split::Columns => Tensor::cat(&parts, 1).unwrap(),
            Split::Rows { groups } => {
                // Ranks may have different numbers of rows if there is a single group.
                let rows = |part: &Tensor| part.dim(0).unwrap() / groups;
                let group = |group: usize| {
                    parts.iter().map(move |part| part.narrow(0, group * rows(part), rows(part)).unwrap())
                };
                Tensor::cat(&(0..groups).flat_map(group).collect::<Vec<_>>(), 0).unwrap()
            }
        };
        all.insert(name.clone(), tensor);
    }
    all
}

pub(crate) fn bits(tensor: &Tensor) -> Vec<u64> {
    let wide = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    wide.into_iter().map(f64::to_bits).collect()
}

/// Returns the distance of two tensors, relative to the norm of the second.
pub(crate) fn gap(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.dims(), expected.dims());
    let norm = |t: &Tensor| {
        t.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
    };
    norm(&(got - expected).unwrap()) / norm(expected).max(1e-30)
}
