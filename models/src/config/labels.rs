//! Fields of `config.json` about labels, of models whose head scores documents.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::{Family, ModelConfig};
use crate::{Error, Result};

/// End of the name of an architecture that scores documents.
const ARCHITECTURE: &str = "ForSequenceClassification";
/// Number of labels of a configuration that has neither `id2label` nor `num_labels`, as in transformers.
const DEFAULT_LABELS: usize = 2;

/// What the scores of a document are for, and so their loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Problem {
    /// Each document has one label of several: cross-entropy.
    SingleLabel,
    /// Each document has any of the labels: the mean over labels of the binary cross-entropy of each.
    MultiLabel,
    /// Each document has a number, or as many as there are labels: the mean of squared errors. A single number is also the reward of
    /// a reward model: in a scope of pairs ([`Preferences`](ops::Preferences) with [`Reward`](ops::PreferenceLoss::Reward), and a target
    /// at the place of each document whose score counts) the loss is that of the pairs.
    Regression,
}

impl Problem {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::SingleLabel, Self::MultiLabel, Self::Regression];

    /// Returns its name in `config.json`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SingleLabel => "single_label_classification",
            Self::MultiLabel => "multi_label_classification",
            Self::Regression => "regression",
        }
    }
}

/// Labels that a head scores documents for, in place of the next token: `score.weight`, of (labels, features), is applied to the
/// last token of each document that is not [`pad_token`](Self::pad_token).
#[derive(Debug, Clone, PartialEq)]
pub struct LabelsConfig {
    /// Name of each label (`id2label`).
    pub names: Vec<String>,
    /// What the scores are for (`problem_type`); where a folder does not say so, a number if there is one label, else one label of
    /// several, as in transformers.
    pub problem: Problem,
    /// Token that fills up rows in other programs (`pad_token_id`).
    pub pad_token: Option<u32>,
}

impl LabelsConfig {
    /// Returns the index of a label.
    pub fn id(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| known == name)
    }

    /// Returns the place of a document whose score counts: of the last token that is not padding, or the first.
    pub fn scored_place(&self, document: &[u32]) -> usize {
        document.iter().rposition(|token| Some(*token) != self.pad_token).unwrap_or(0)
    }

    /// Returns so many labels without names, as transformers has them: a number if there is one, else one of several.
    pub(crate) fn unnamed(count: usize) -> Self {
        let names = (0..count).map(|id| format!("LABEL_{id}")).collect();
        Self { names, problem: Self::usual_problem(count), pad_token: None }
    }

    fn usual_problem(count: usize) -> Problem {
        if count == 1 { Problem::Regression } else { Problem::SingleLabel }
    }

    fn validate(&self) -> Result<()> {
        let refuse =
            |field: &'static str, got: String, help| Err(Error::Invalid { what: "labels", field, got, help });
        let count = self.names.len();
        if count == 0 {
            return refuse("the list of names", "empty".into(), "give one at least");
        }
        if self.names.iter().any(String::is_empty) {
            return refuse("a name", "empty".into(), "give each label a name");
        }
        if let Some(twice) = (0..count).find(|id| self.id(&self.names[*id]) != Some(*id)) {
            return refuse(
                "a name",
                format!("{} twice", self.names[twice]),
                "give each label a name of its own",
            );
        }
        match (self.problem, count) {
            (Problem::SingleLabel, 1) => refuse(
                "the number of names",
                "1".into(),
                "give two or more: a document has one label of several",
            ),
            _ => Ok(()),
        }
    }
}

/// Reads the labels of a model whose architecture scores documents; `None` for others.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Option<LabelsConfig>> {
    let names = fields.value("architectures").and_then(Value::as_array).into_iter().flatten();
    if !names.filter_map(Value::as_str).any(|name| name.ends_with(ARCHITECTURE)) {
        return Ok(None);
    }
    let named = names_of(fields)?;
    let count = fields.optional_size("num_labels")?;
    if let (Some(count), Some(named)) = (count, &named)
        && count != named.len()
    {
        let help = format!("id2label names {} labels: give the same number, or leave it out", named.len());
        return Err(fields.config_error("num_labels", &count.to_string(), &help));
    }
    let count = count.unwrap_or(DEFAULT_LABELS);
    let names = named.unwrap_or_else(|| LabelsConfig::unnamed(count).names);
    let problem = match fields.text("problem_type")? {
        None => LabelsConfig::usual_problem(names.len()),
        Some(name) => match Problem::ALL.into_iter().find(|problem| problem.name() == name) {
            Some(problem) => problem,
            None => {
                let known = Problem::ALL.map(Problem::name).join(", ");
                return Err(fields.config_error("problem_type", name, &format!("supported are {known}")));
            }
        },
    };
    let pad_token = match fields.value("pad_token_id") {
        None => None,
        // transformers takes such an index for that of no token.
        Some(id) if id.as_i64().is_some_and(|id| id < 0) => None,
        Some(_) => fields.optional_size("pad_token_id")?.map(|id| id as u32),
    };
    let labels = LabelsConfig { names, problem, pad_token };
    labels.validate()?;
    Ok(Some(labels))
}

/// Reads the names in `id2label`, an object with the ids from 0 on as keys.
fn names_of(fields: &mut Fields<'_>) -> Result<Option<Vec<String>>> {
    let Some(value) = fields.value("id2label") else { return Ok(None) };
    let named = value.as_object().filter(|named| !named.is_empty());
    let name = |id: usize| named?.get(&id.to_string())?.as_str().map(String::from);
    match (0..named.map_or(1, Map::len)).map(name).collect() {
        Some(names) => Ok(Some(names)),
        None => {
            let help = "it must have a name for each id from 0 on, as in {\"0\": \"no\", \"1\": \"yes\"}";
            Err(fields.invalid_value("id2label", value, help))
        }
    }
}

impl ModelConfig {
    /// Returns the configuration of this model with a head for these labels in place of the one for the next token.
    ///
    /// # Errors
    /// A model that has labels already; no labels, or two of one name; a single label, of which each document has one.
    ///
    /// ```
    /// use models::{LabelsConfig, ModelConfig, Problem};
    ///
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
    /// let names = ["ham", "spam"].map(String::from).to_vec();
    /// let labels = LabelsConfig { names, problem: Problem::SingleLabel, pad_token: Some(0) };
    /// let config = ModelConfig::from_folder(folder)?.with_labels(labels)?;
    /// assert_eq!(config.json()["architectures"][0], "LlamaForSequenceClassification");
    /// assert_eq!(config.json()["id2label"]["1"], "spam");
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn with_labels(mut self, labels: LabelsConfig) -> Result<Self> {
        labels.validate()?;
        if let Some(before) = &self.labels {
            let got = format!("one that scores {}", before.names.join(", "));
            let help = "its head is trained further as it is: give a language model for a new one";
            return Err(Error::Invalid { what: "labels", field: "the model", got, help });
        }
        let ids = || labels.names.iter().enumerate();
        let to_names: Map<String, Value> = ids().map(|(id, name)| (id.to_string(), json!(name))).collect();
        let to_ids: Map<String, Value> = ids().map(|(id, name)| (name.clone(), json!(id))).collect();
        let architecture = format!("{}{ARCHITECTURE}", architecture(self.family));
        self.json.remove("num_labels");
        self.json.extend([
            ("architectures".to_string(), json!([architecture])),
            ("id2label".to_string(), Value::Object(to_names)),
            ("label2id".to_string(), Value::Object(to_ids)),
            ("problem_type".to_string(), json!(labels.problem.name())),
            ("pad_token_id".to_string(), json!(labels.pad_token)),
        ]);
        Self::from_map(self.json)
    }
}

/// Returns the name of a family in those of its classes in transformers.
fn architecture(family: Family) -> &'static str {
    match family {
        Family::Llama => "Llama",
        Family::Mistral => "Mistral",
        Family::Qwen2 => "Qwen2",
        Family::Qwen3 => "Qwen3",
        Family::Mixtral => "Mixtral",
        Family::Qwen2Moe => "Qwen2Moe",
        Family::Qwen3Moe => "Qwen3Moe",
        Family::DeepseekV3 => "DeepseekV3",
        Family::Gpt2 => "GPT2",
    }
}
