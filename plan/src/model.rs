//! Models as sizes: what each part of them holds, computes, keeps and sends.

use std::borrow::Cow;

/// A part of a model that stays together. Numbers are of elements, and of a sample (a row) where they depend on the batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unit {
    /// Parameters that tensor parallelism divides.
    pub divided: u64,
    /// The tensors that these are.
    pub divided_tensors: u64,
    /// Parameters that every tensor-parallel rank has.
    pub whole: u64,
    /// The tensors that the parameters are.
    pub tensors: Vec<u64>,
    /// What belongs to the model and is not learnt; data parallelism keeps it equal.
    pub buffers: u64,
    /// What sharded data parallelism gathers one after the other.
    pub parts: Vec<Part>,
    /// Numbers that linear layers give for a sample: kept a second time where they are of 16 bits.
    pub linear: u64,
    /// Operations of a forward pass for a sample, in the divided part.
    pub flops: u64,
    /// Activations kept for backward in the divided part.
    pub kept_divided: u64,
    /// Of these and of those that every rank keeps, what operations keep to themselves, computed with 32 bits at least.
    pub kept_inside: u64,
    /// Activations kept for backward between the divided parts.
    pub kept_between: u64,
    /// Activations of which every tensor-parallel rank keeps all: those of a loss that each computes, for one.
    pub kept_whole: u64,
    /// Bytes of whole numbers that operations keep of a sample: classes, tokens.
    pub kept_bytes: u64,
    /// Activations that there are once, however many samples: the loss.
    pub kept_once: u64,
    /// What sequence parallelism keeps more: gathered inputs.
    pub kept_gathered: u64,
    /// What sequence parallelism gathers forward and needs no gradient of: the data, where it comes in here.
    pub gathered: u64,
    /// All-reduces forward, each of so many elements for a sample.
    pub forward: Vec<u64>,
    /// All-reduces backward.
    pub backward: Vec<u64>,
    /// Of the forward ones, how many are on numbers that sequence parallelism leaves alone; they come last.
    pub small: usize,
    /// What goes on to the next unit.
    pub output: u64,
}

/// A part of a unit that is gathered at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Part {
    /// The tensors that its parameters are.
    pub tensors: Vec<u64>,
    /// What it gives for a sample, of which a copy is kept.
    pub output: u64,
}

/// A model, as a row of units.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its parts, in order.
    pub units: Vec<Unit>,
    /// What a sample is.
    pub sample: String,
    /// Numbers of heads and widths, all of which the tensor-parallel ranks have to divide.
    pub divisors: Vec<(&'static str, u64)>,
    /// A transformer's sizes. Its vocabulary need not be divided: the first ranks then have one token more.
    pub sizes: Option<TransformerSizes>,
    /// Rows of a sample that sequence parallelism divides; 0 where there are none but the batch.
    pub length: u64,
}

/// The sizes of a transformer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransformerSizes {
    /// Tokens in the vocabulary.
    pub vocab_size: u64,
    /// Features of a token.
    pub d_model: u64,
    /// Heads of attention.
    pub num_heads: u64,
    /// Width of the feed-forward layers.
    pub d_ff: u64,
    /// Layers.
    pub num_layers: u64,
    /// Longest row.
    pub max_len: u64,
    /// Tokens of a row that the model is shown.
    pub length: u64,
    /// Whether positions are learnt and there is a last norm and no bias of the head, as in `tensor-parallel-transformer`; the
    /// tutorials' own has sines, no last norm, and a bias.
    pub is_modern: bool,
    /// Whether there is dropout, each of which gives numbers of its own.
    pub has_dropout: bool,
}

impl Part {
    /// Parameters in all.
    pub fn parameters(&self) -> u64 {
        self.tensors.iter().sum()
    }

    /// Those of tensors below so many elements.
    pub fn of_small(&self, limit: u64) -> u64 {
        self.tensors.iter().filter(|elements| **elements < limit).sum()
    }
}

/// A row's class, as losses keep it.
const CLASS_BYTES: u64 = size_of::<Option<usize>>() as u64;
/// A token, as a table of which ranks have parts keeps it.
const TOKEN_BYTES: u64 = size_of::<u32>() as u64;

/// What linear layers are trained with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpLoss {
    /// The mean squared error: differences and their squares are kept.
    Squares,
    /// Cross-entropy of classes: probabilities are kept.
    Classes,
}

impl Unit {
    /// Parameters in all.
    pub fn parameters(&self) -> u64 {
        self.divided + self.whole
    }

    /// Activations kept for backward on one rank that computes all.
    pub fn kept(&self) -> u64 {
        self.kept_divided + self.kept_between + self.kept_whole
    }

    /// Bytes kept beside the numbers of so many samples, in so many parts with a loss each.
    pub fn kept_apart(&self, samples: u64, parts: u64, element: u64) -> f64 {
        self.kept_bytes as f64 * samples as f64 + (self.kept_once * parts * element) as f64
    }
}

impl Model {
    /// Parameters in all.
    pub fn parameters(&self) -> u64 {
        self.sum(Unit::parameters)
    }

    /// Operations of a forward pass for a sample.
    pub fn flops(&self) -> u64 {
        self.sum(|unit| unit.flops)
    }

    /// A sum over units.
    pub fn sum(&self, of: impl Fn(&Unit) -> u64) -> u64 {
        self.units.iter().map(of).sum()
    }

    /// Bytes kept beside the numbers of so many samples, in so many parts with a loss each.
    pub fn kept_apart(&self, samples: u64, parts: u64, element: u64) -> f64 {
        self.units.iter().map(|unit| unit.kept_apart(samples, parts, element)).sum()
    }

    /// Linear layers of these sizes; `has_function` where there is a function between them. Each two are one unit that tensor
    /// parallelism divides in the middle.
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
                divided: inputs * hidden + hidden + hidden * outputs,
                divided_tensors: 3,
                whole: outputs,
                tensors: vec![inputs * hidden, hidden, hidden * outputs, outputs],
                parts: vec![part(inputs, hidden), part(hidden, outputs)],
                linear: hidden + outputs,
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
                whole: inputs * outputs + outputs,
                tensors: vec![inputs * outputs, outputs],
                parts: vec![part(inputs, outputs)],
                linear: outputs,
                flops: 2 * inputs * outputs,
                kept_between: outputs,
                output: outputs,
                ..Unit::default()
            });
        }
        if let Some(last) = units.last_mut() {
            match loss {
                MlpLoss::Squares => {
                    last.kept_whole = 2 * last.output;
                    // Their sum, and the mean.
                    last.kept_once = 2;
                }
                MlpLoss::Classes => {
                    last.kept_whole = last.output;
                    last.kept_inside += last.output;
                    (last.kept_bytes, last.kept_once) = (CLASS_BYTES, 1);
                }
            }
        }
        Self { name: name.into(), units, sample: "samples".into(), divisors, sizes: None, length: 0 }
    }

    /// The same where layers multiply and add their bias one after the other, as candle's own do.
    pub fn with_separate_biases(mut self) -> Self {
        for unit in &mut self.units {
            let inner = unit.linear - unit.output;
            unit.kept_divided += inner;
            unit.kept_between += unit.output;
        }
        self
    }

    /// A transformer that predicts the next token.
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
        // Which of the tokens are a rank's, of an embedding that may be divided.
        let of_parts = if is_modern { length } else { 0 };
        let positions = max_len * d;
        let mut units = vec![Unit {
            divided: vocab * d,
            divided_tensors: 1,
            tensors: vec![vocab * d],
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
                (position.whole, position.tensors) = (positions, vec![positions]);
                position.kept_between += activations * u64::from(has_dropout);
            }
            false => position.buffers = positions,
        }
        units.push(position);
        units.extend((0..num_layers).map(|_| Self::layer(sizes)));
        units.push(Self::head(sizes));
        for unit in &mut units {
            let part = Part { tensors: unit.tensors.clone(), output: unit.output };
            unit.parts.extend((!unit.tensors.is_empty()).then_some(part));
        }
        let divisors = vec![
            ("the heads of attention", sizes.num_heads),
            ("the width of the feed-forward layers", sizes.d_ff),
        ];
        let sample = format!("rows of {length} tokens");
        Self { name: name.into(), units, sample, divisors, sizes: Some(*sizes), length }
    }

    /// The model of which so many ranks have equal parts, each of them what the first rank has of this one.
    pub fn in_parts(&self, ranks: u64) -> Cow<'_, Self> {
        match self.sizes {
            Some(sizes) if !sizes.vocab_size.is_multiple_of(ranks) => {
                let vocab_size = sizes.vocab_size.next_multiple_of(ranks);
                Cow::Owned(Self::transformer(&self.name, &TransformerSizes { vocab_size, ..sizes }))
            }
            _ => Cow::Borrowed(self),
        }
    }

    /// The last norm, where there is one, the layer that gives logits, and the loss.
    fn head(sizes: &TransformerSizes) -> Unit {
        let &TransformerSizes { vocab_size: vocab, d_model: d, length, is_modern, .. } = sizes;
        let activations = length * d;
        // Sums, of a loss whose classes may be divided.
        let of_parts = if is_modern { length } else { 0 };
        let (norm, bias) = if is_modern { (2 * d, 0) } else { (0, vocab) };
        Unit {
            divided: vocab * d + bias,
            divided_tensors: if is_modern { 1 } else { 2 },
            whole: norm,
            tensors: if is_modern { vec![vocab * d, d, d] } else { vec![vocab * d, vocab] },
            linear: length * vocab,
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
        // Of attention, one number for each query and head.
        let log_sums = num_heads * length;
        // Weight and bias of each: queries, keys and values are one weight, or three.
        let attention = match is_modern {
            true => vec![3 * d * d, 3 * d, d * d, d],
            false => [d * d, d].repeat(4),
        };
        Unit {
            divided: 4 * d * d + 3 * d + 2 * d * d_ff + d_ff,
            // All but the biases that are added to sums over ranks.
            divided_tensors: attention.len() as u64 + 4 - 2,
            // Two norms, and the biases that are added to sums over ranks.
            whole: 4 * d + 2 * d,
            tensors: [&attention[..], &[d, d, d, d], &[d * d_ff, d_ff, d * d_ff, d]].concat(),
            linear: 5 * activations + length * d_ff,
            flops: 2 * length * (4 * d * d + 2 * d * d_ff) + 4 * length * length * d,
            // Queries, keys and values, in one at first and then apart; what attention gives; the feed-forward layer twice.
            kept_divided: (if is_modern { 7 } else { 4 }) * activations + log_sums + 2 * length * d_ff,
            kept_inside: log_sums,
            // Each half: norm, its result, what dropout leaves of that, and the sum with what came in.
            kept_between: (6 + 2 * u64::from(has_dropout)) * activations,
            kept_gathered: 2 * activations,
            forward: vec![activations; 2],
            backward: vec![activations; 2],
            output: activations,
            ..Unit::default()
        }
    }
}
