//! Models as sizes: what each part of them holds, computes, keeps and sends.

/// A part of a model that stays together. Numbers are of elements, and of a sample (a row) where they depend on the batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unit {
    /// Parameters that tensor parallelism divides.
    pub divided: u64,
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
    /// Of these, what operations keep to themselves.
    pub kept_inside: u64,
    /// Activations kept for backward between the divided parts.
    pub kept_between: u64,
    /// Activations of the loss, where every tensor-parallel rank computes all of it.
    pub kept_loss: u64,
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
    /// Rows of a sample that sequence parallelism divides; 0 where there are none but the batch.
    pub length: u64,
}

/// The sizes of a transformer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransformerSizes {
    /// Tokens that there are.
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
    /// documents' own has sines, no last norm, and a bias.
    pub is_modern: bool,
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
        self.kept_divided + self.kept_between + self.kept_loss
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
                MlpLoss::Squares => last.kept_loss = 2 * last.output,
                MlpLoss::Classes => {
                    last.kept_loss = last.output;
                    last.kept_inside += last.output;
                }
            }
        }
        Self { name: name.into(), units, sample: "samples".into(), divisors, length: 0 }
    }

    /// A transformer that predicts the next token.
    pub fn transformer(name: &str, sizes: &TransformerSizes) -> Self {
        let &TransformerSizes {
            vocab_size: vocab, d_model: d, num_layers, max_len, length, is_modern, ..
        } = sizes;
        let activations = length * d;
        let positions = max_len * d;
        let mut units = vec![Unit {
            divided: vocab * d,
            tensors: vec![vocab * d],
            kept_between: activations,
            forward: vec![activations],
            output: activations,
            ..Unit::default()
        }];
        let mut position = Unit { kept_between: activations, output: activations, ..Unit::default() };
        match is_modern {
            true => (position.whole, position.tensors) = (positions, vec![positions]),
            false => position.buffers = positions,
        }
        units.push(position);
        units.extend((0..num_layers).map(|_| Self::layer(sizes)));
        let (norm, bias) = if is_modern { (2 * d, 0) } else { (0, vocab) };
        units.push(Unit {
            divided: vocab * d + bias,
            whole: norm,
            tensors: if is_modern { vec![vocab * d, d, d] } else { vec![vocab * d, vocab] },
            linear: length * vocab,
            flops: 2 * activations * vocab,
            kept_divided: 2 * length * vocab,
            kept_inside: length * vocab,
            kept_between: if is_modern { activations } else { 0 },
            kept_gathered: activations,
            forward: vec![length, 2 * length],
            small: 2,
            backward: vec![activations],
            output: length * vocab,
            ..Unit::default()
        });
        for unit in &mut units {
            let part = Part { tensors: unit.tensors.clone(), output: unit.output };
            unit.parts.extend((!unit.tensors.is_empty()).then_some(part));
        }
        let divisors = vec![
            ("the heads of attention", sizes.num_heads),
            ("the vocabulary", vocab),
            ("the width of the feed-forward layers", sizes.d_ff),
        ];
        let sample = format!("rows of {length} tokens");
        Self { name: name.into(), units, sample, divisors, length }
    }

    fn layer(sizes: &TransformerSizes) -> Unit {
        let &TransformerSizes { d_model: d, num_heads, d_ff, length, is_modern, .. } = sizes;
        let activations = length * d;
        let scores = num_heads * length * length;
        // Weight and bias of each: queries, keys and values are one weight, or three.
        let attention = match is_modern {
            true => vec![3 * d * d, 3 * d, d * d, d],
            false => [d * d, d].repeat(4),
        };
        Unit {
            divided: 4 * d * d + 3 * d + 2 * d * d_ff + d_ff,
            // Two norms, and the biases that are added to sums over ranks.
            whole: 4 * d + 2 * d,
            tensors: [&attention[..], &[d, d, d, d], &[d * d_ff, d_ff, d * d_ff, d]].concat(),
            linear: 5 * activations + length * d_ff,
            flops: 2 * length * (4 * d * d + 2 * d * d_ff) + 4 * length * length * d,
            // Queries, keys and values, in one at first and then apart; what attention gives; the feed-forward layer twice.
            kept_divided: (if is_modern { 7 } else { 4 }) * activations + scores + 2 * length * d_ff,
            kept_inside: scores,
            // Each half: norm, its result, and the sum with what came in.
            kept_between: 6 * activations,
            kept_gathered: 2 * activations,
            forward: vec![activations; 2],
            backward: vec![activations; 2],
            output: activations,
            ..Unit::default()
        }
    }
}
