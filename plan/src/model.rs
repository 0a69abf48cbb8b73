//! Model sizes: what each unit of a model holds, computes, keeps for backward and sends.

use std::borrow::Cow;

/// Part of a model that is not split over stages. Sizes are in elements, per sample (row) where they depend on the
/// batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Unit {
    /// Elements of each parameter that tensor parallelism divides.
    pub(crate) divided: Vec<u64>,
    /// Elements of each parameter that every tensor-parallel rank holds whole.
    pub(crate) whole: Vec<u64>,
    /// Elements of buffers, which are not trained; data parallelism keeps them equal on all ranks.
    pub(crate) buffers: u64,
    /// Parts that sharded data parallelism gathers one after the other.
    pub(crate) parts: Vec<Part>,
    /// Operations of a forward pass per sample, in the divided part.
    pub(crate) flops: u64,
    /// Activations kept for backward in the divided part.
    pub(crate) kept_divided: u64,
    /// The part of `kept_divided` and `kept_whole` that operations keep internally, in at least 32 bits.
    pub(crate) kept_inside: u64,
    /// Activations kept for backward between the divided parts.
    pub(crate) kept_between: u64,
    /// Activations that every tensor-parallel rank keeps whole, for example those of a loss that each computes.
    pub(crate) kept_whole: u64,
    /// Bytes of integers that operations keep per sample: classes, tokens.
    pub(crate) kept_bytes: u64,
    /// Activations whose number does not depend on the samples: the loss.
    pub(crate) kept_once: u64,
    /// Additional activations kept with sequence parallelism: gathered inputs.
    pub(crate) kept_gathered: u64,
    /// Elements that sequence parallelism gathers in forward without a gradient: the data, if this is the first unit.
    pub(crate) gathered: u64,
    /// All-reduces in forward: elements per sample of each.
    pub(crate) forward: Vec<u64>,
    /// All-reduces in backward: elements per sample of each.
    pub(crate) backward: Vec<u64>,
    /// How many of the forward all-reduces sequence parallelism does not change; they come last.
    pub(crate) small: usize,
    /// Elements of the output to the next unit, per sample.
    pub(crate) output: u64,
}

/// Part of a unit that is gathered at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Part {
    /// Elements of each parameter tensor.
    pub(crate) tensors: Vec<u64>,
    /// Elements of its output per sample, of which a copy is kept.
    pub(crate) output: u64,
}

/// A model as a sequence of units.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Name of the model.
    pub name: String,
    /// Its units, in order.
    pub(crate) units: Vec<Unit>,
    /// What a sample is, for display.
    pub(crate) sample: String,
    /// Numbers of heads and widths that must be divisible by the number of tensor-parallel ranks.
    pub(crate) divisors: Vec<(&'static str, u64)>,
    /// Sizes of a transformer. Its vocabulary need not be divisible: then the first ranks have one token more.
    pub(crate) sizes: Option<TransformerSizes>,
    /// Length of a sample, which sequence parallelism divides; 0 if samples have no length and the batch is divided
    /// instead.
    pub(crate) length: u64,
}

/// Sizes of a transformer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransformerSizes {
    /// Number of tokens in the vocabulary.
    pub vocab_size: u64,
    /// Number of features of a token.
    pub d_model: u64,
    /// Number of attention heads.
    pub num_heads: u64,
    /// Width of the feed-forward layers.
    pub d_ff: u64,
    /// Number of blocks.
    pub num_layers: u64,
    /// Maximum length of a row.
    pub max_len: u64,
    /// Number of tokens of a row in training.
    pub length: u64,
    /// Whether it has learned positions, a final norm and no bias of the head, as in `tensor-parallel-transformer`; the
    /// tutorials' model has sinusoidal positions, no final norm, and a bias.
    pub is_modern: bool,
    /// Whether there is dropout, whose outputs are kept.
    pub has_dropout: bool,
}

impl Part {
    /// Returns the number of parameters.
    pub(crate) fn parameters(&self) -> u64 {
        self.tensors.iter().sum()
    }

    /// Returns the number of parameters in tensors of fewer than `limit` elements.
    pub(crate) fn of_small(&self, limit: u64) -> u64 {
        self.tensors.iter().filter(|elements| **elements < limit).sum()
    }
}

/// Bytes of a row's class, as losses keep it.
const CLASS_BYTES: u64 = size_of::<Option<usize>>() as u64;
/// Bytes of a token, as a divided embedding keeps it.
const TOKEN_BYTES: u64 = size_of::<u32>() as u64;

/// Loss of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpLoss {
    /// The mean squared error as one operation, `ops::mse`: nothing but its result is kept.
    Squares,
    /// Cross-entropy of classes: probabilities are kept.
    Classes,
}

impl Unit {
    /// Returns the number of parameters.
    pub(crate) fn parameters(&self) -> u64 {
        self.tensors().sum()
    }

    /// Returns the elements of each parameter.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = u64> {
        self.divided.iter().chain(&self.whole).copied()
    }

    /// Returns the activations kept for backward without tensor parallelism.
    pub(crate) fn kept(&self) -> u64 {
        self.kept_divided + self.kept_between + self.kept_whole
    }

    /// Returns the bytes kept in addition to the activations of so many samples, in `parts` micro-batches with a loss
    /// each.
    pub(crate) fn kept_apart(&self, samples: u64, parts: u64, element: u64) -> f64 {
        self.kept_bytes as f64 * samples as f64 + (self.kept_once * parts * element) as f64
    }
}

impl Model {
    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        self.sum(Unit::parameters)
    }

    /// Returns the operations of a forward pass per sample.
    pub fn flops(&self) -> u64 {
        self.sum(|unit| unit.flops)
    }

    /// Returns the sum over units.
    pub(crate) fn sum(&self, of: impl Fn(&Unit) -> u64) -> u64 {
        self.units.iter().map(of).sum()
    }

    /// Returns the bytes kept in addition to the activations of so many samples, in `parts` micro-batches with a loss
    /// each.
    pub(crate) fn kept_apart(&self, samples: u64, parts: u64, element: u64) -> f64 {
        self.units.iter().map(|unit| unit.kept_apart(samples, parts, element)).sum()
    }

    /// MLP with layers of these sizes; `has_function` if there are activation functions between them. Each two layers
    /// are one unit, which tensor parallelism divides at the hidden size.
    pub fn mlp(name: &str, sizes: &[u64], has_function: bool, loss: MlpLoss) -> Self {
        let mut units: Vec<Unit> = Vec::new();
        let mut divisors = Vec::new();
        let part =
            |inputs: u64, outputs: u64| Part { tensors: vec![inputs * outputs, outputs], output: outputs };
        for (place, three) in sizes.windows(3).enumerate().step_by(2) {
            let &[inputs, hidden, outputs] = three else { continue };
            let is_last = place + 3 == sizes.len();
            let functions = u64::from(has_function);
            divisors.push(("the hidden size", hidden));
            units.push(Unit {
                divided: vec![inputs * hidden, hidden, hidden * outputs],
                whole: vec![outputs],
                parts: vec![part(inputs, hidden), part(hidden, outputs)],
                flops: 2 * (inputs * hidden + hidden * outputs),
                kept_divided: (1 + functions) * hidden,
                kept_between: outputs * if is_last { 1 } else { 1 + functions },
                kept_gathered: inputs,
                gathered: if place == 0 { inputs } else { 0 },
                forward: vec![outputs],
                // The data needs no gradient.
                backward: if place == 0 { vec![] } else { vec![inputs] },
                output: outputs,
                ..Unit::default()
            });
        }
        if let (0, Some(&[inputs, outputs])) = (sizes.len() % 2, sizes.last_chunk::<2>()) {
            units.push(Unit {
                whole: vec![inputs * outputs, outputs],
                parts: vec![part(inputs, outputs)],
                flops: 2 * inputs * outputs,
                kept_between: outputs,
                output: outputs,
                ..Unit::default()
            });
        }
        if let Some(last) = units.last_mut() {
            match loss {
                MlpLoss::Squares => last.kept_once = 1,
                MlpLoss::Classes => {
                    last.kept_whole = last.output;
                    last.kept_inside += last.output;
                    (last.kept_bytes, last.kept_once) = (CLASS_BYTES, 1);
                }
            }
        }
        Self { name: name.into(), units, sample: "samples".into(), divisors, sizes: None, length: 0 }
    }

    /// Transformer that predicts the next token.
    pub fn transformer(name: &str, sizes: &TransformerSizes) -> Self {
        let &TransformerSizes {
            vocab_size: vocab,
            d_model: d,
            num_layers,
            max_len,
            length,
            is_modern,
            has_dropout,
            ..
        } = sizes;
        let activations = length * d;
        // Which tokens are in this rank's part of an embedding that may be divided.
        let of_parts = if is_modern { length } else { 0 };
        let positions = max_len * d;
        let mut units = vec![Unit {
            divided: vec![vocab * d],
            kept_between: activations,
            kept_whole: of_parts,
            kept_inside: of_parts,
            kept_bytes: TOKEN_BYTES * of_parts,
            forward: vec![activations],
            output: activations,
            ..Unit::default()
        }];
        let mut position = Unit { kept_between: activations, output: activations, ..Unit::default() };
        match is_modern {
            true => {
                position.whole = vec![positions];
                position.kept_between += activations * u64::from(has_dropout);
            }
            false => position.buffers = positions,
        }
        units.push(position);
        units.extend((0..num_layers).map(|_| Self::layer(sizes)));
        units.push(Self::head(sizes));
        for unit in &mut units {
            let part = Part { tensors: unit.tensors().collect(), output: unit.output };
            unit.parts.extend((!part.tensors.is_empty()).then_some(part));
        }
        let divisors = vec![
            ("the heads of attention", sizes.num_heads),
            ("the width of the feed-forward layers", sizes.d_ff),
        ];
        let sample = format!("rows of {length} tokens");
        Self { name: name.into(), units, sample, divisors, sizes: Some(*sizes), length }
    }

    /// Returns the model with a vocabulary that the ranks divide equally, so that every rank has as much as the first
    /// one has of this model.
    pub(crate) fn in_parts(&self, ranks: u64) -> Cow<'_, Self> {
        match self.sizes {
            Some(sizes) if !sizes.vocab_size.is_multiple_of(ranks) => {
                let vocab_size = sizes.vocab_size.next_multiple_of(ranks);
                Cow::Owned(Self::transformer(&self.name, &TransformerSizes { vocab_size, ..sizes }))
            }
            _ => Cow::Borrowed(self),
        }
    }

    /// Final norm, if there is one, output head, and loss.
    fn head(sizes: &TransformerSizes) -> Unit {
        let &TransformerSizes { vocab_size: vocab, d_model: d, length, is_modern, .. } = sizes;
        let activations = length * d;
        // Row sums of a loss whose classes may be divided.
        let of_parts = if is_modern { length } else { 0 };
        Unit {
            divided: if is_modern { vec![vocab * d] } else { vec![vocab * d, vocab] },
            whole: if is_modern { vec![d; 2] } else { Vec::new() },
            flops: 2 * activations * vocab,
            kept_divided: 2 * length * vocab,
            kept_inside: length * vocab + of_parts,
            kept_whole: of_parts,
            kept_bytes: CLASS_BYTES * length,
            kept_once: 1,
            kept_between: if is_modern { activations } else { 0 },
            kept_gathered: activations,
            forward: vec![length, 2 * length],
            small: 2,
            backward: vec![activations],
            output: length * vocab,
            ..Unit::default()
        }
    }

    fn layer(sizes: &TransformerSizes) -> Unit {
        let &TransformerSizes { d_model: d, num_heads, d_ff, length, is_modern, has_dropout, .. } = sizes;
        let activations = length * d;
        // Log-sum of attention: one number per query and head.
        let log_sums = num_heads * length;
        // Queries, keys and values as one layer, or as three; the matrix after them; the feed-forward layers.
        let qkv = if is_modern { vec![3 * d * d, 3 * d] } else { [d * d, d].repeat(3) };
        Unit {
            divided: [&qkv[..], &[d * d, d * d_ff, d_ff, d_ff * d]].concat(),
            // Two norms, and the biases that are added after reductions over ranks.
            whole: vec![d; 6],
            flops: 2 * length * (4 * d * d + 2 * d * d_ff) + 4 * length * length * d,
            // Queries, keys and values (fused and then separate, if modern), attention output; feed-forward before and
            // after activation.
            kept_divided: (if is_modern { 7 } else { 4 }) * activations + log_sums + 2 * length * d_ff,
            kept_inside: log_sums,
            // Each half: output of the norm, output of the half, output of its dropout if any, and sum with its input.
            kept_between: (6 + 2 * u64::from(has_dropout)) * activations,
            kept_gathered: 2 * activations,
            forward: vec![activations; 2],
            backward: vec![activations; 2],
            output: activations,
            ..Unit::default()
        }
    }
}
