//! Which tensors a GGUF file of a model has, and of which parameters each is made.

use std::collections::BTreeMap;

use crate::names::ADAPTER;
use crate::reading::gguf::{
    POSITIONS, ROUTER, SHARED_GATE, llama3_factors, name_of, of_expert, rotated_heads,
};
use crate::{Error, Lora, ModelConfig, Result, Weights};

/// A tensor to write.
#[derive(Debug)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) source: Source,
    /// Whether it is f32 whatever the matrices are.
    pub(super) is_exact: bool,
}

/// What a tensor is made of.
#[derive(Debug)]
pub(super) enum Source {
    /// A parameter; `rotated_heads` is the number of heads whose rows are reordered so that rotated pairs are adjacent.
    Parameter { name: String, rotated_heads: Option<usize> },
    /// The matrices of all experts of a layer, in their order.
    Experts(Vec<String>),
    /// Numbers that are no parameter.
    Numbers(Vec<f32>),
}

/// The matrices of a layer's experts, of one kind.
#[derive(Debug, Default)]
struct Matrices {
    /// Of each of them.
    dims: Vec<usize>,
    /// Of each expert.
    names: BTreeMap<usize, String>,
}

/// Returns all tensors of a model, block by block.
pub(super) fn of_model(weights: &Weights) -> Result<Vec<TensorPlan>> {
    let config = weights.config();
    let mut all = Vec::new();
    let factors = config.rotary.as_ref().and_then(llama3_factors);
    all.extend(factors.map(|factors| TensorPlan {
        name: "rope_freqs.weight".into(),
        dims: vec![factors.len()],
        source: Source::Numbers(factors),
        is_exact: true,
    }));
    let mut experts: BTreeMap<String, Matrices> = BTreeMap::new();
    for (name, dims) in weights.shapes() {
        if let Some((of_all, expert)) = of_expert(config, name) {
            let matrices = experts.entry(of_all).or_default();
            matrices.dims.clone_from(dims);
            matrices.names.insert(expert, name.clone());
            continue;
        }
        let Some(in_file) = name_of(config, name) else {
            return Err(Error::Format {
                path: "config.json".into(),
                problem: format!("GGUF has no name for the parameter {name}"),
            });
        };
        let is_exact =
            [ROUTER, SHARED_GATE, POSITIONS].iter().any(|part| in_file.contains(&format!("{part}.")));
        let dims = if in_file.contains(SHARED_GATE) { vec![dims.iter().product()] } else { dims.clone() };
        let source = Source::Parameter { name: name.clone(), rotated_heads: rotated_heads(config, name) };
        all.push(TensorPlan { name: in_file, dims, source, is_exact });
    }
    for (name, Matrices { dims, names }) in experts {
        let dims = [&[names.len()], dims.as_slice()].concat();
        let source = Source::Experts(names.into_values().collect());
        all.push(TensorPlan { name, dims, source, is_exact: false });
    }
    Ok(all)
}

/// Returns all tensors of adapters.
pub(super) fn of_adapters(config: &ModelConfig, lora: &Lora) -> Result<Vec<TensorPlan>> {
    let plan = |(name, dims): (&String, &Vec<usize>)| {
        let found = ADAPTER
            .into_iter()
            .enumerate()
            .find_map(|(place, part)| Some((place, name.strip_suffix(&format!("{part}.weight"))?)));
        let of_layer = |layer: &str| name_of(config, &format!("{layer}weight"));
        let Some((place, in_file, layer)) =
            found.and_then(|(place, layer)| Some((place, of_layer(layer)?, layer)))
        else {
            let problem =
                format!("a GGUF file of adapters cannot have {name}: merge them into the model instead");
            return Err(Error::Format { path: "adapter_config.json".into(), problem });
        };
        // Rows of the second matrix are outputs.
        let rotated_heads = if place == 1 { rotated_heads(config, &format!("{layer}weight")) } else { None };
        let name = format!("{in_file}.{}", ["lora_a", "lora_b"][place]);
        let source = Source::Parameter { name: format!("{layer}{}.weight", ADAPTER[place]), rotated_heads };
        Ok(TensorPlan { name, dims: dims.clone(), source, is_exact: true })
    };
    lora.shapes().iter().map(plan).collect()
}
