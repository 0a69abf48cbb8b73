//! Labels of documents in files.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::chat::json_kind;
use crate::{LabelsConfig, Problem};

/// Returns a document's label as numbers: the index of the only one; for each of several whether it applies; or the numbers
/// themselves.
///
/// # Errors
/// What is no label of these, named.
pub(super) fn parse(label: &Value, labels: &LabelsConfig) -> Result<Vec<f32>, String> {
    let count = labels.names.len();
    // Tables without lists hold them as JSON.
    let text = label.as_str().map(str::trim).filter(|text| text.starts_with('['));
    let listed = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_else(|| label.clone());
    let items = |kind: &str| match listed.kind() {
        ValueKind::Seq => Ok(listed.try_iter().into_iter().flatten().collect::<Vec<_>>()),
        _ => Err(format!("expected a list of {kind}, got {}", shown(label))),
    };
    match labels.problem {
        Problem::SingleLabel if listed.kind() == ValueKind::Seq => {
            let help =
                "a document has one label of several here; for several at once the task is multi-label";
            Err(format!("expected a name or a number, got a list; {help}"))
        }
        Problem::SingleLabel => id(label, labels).map(|id| vec![id as f32]),
        Problem::MultiLabel => items("labels").and_then(|items| several(&items, labels)),
        Problem::Regression if count == 1 => number(label).map(|number| vec![number]),
        Problem::Regression => items("numbers").and_then(|items| match items.len() == count {
            true => items.iter().map(number).collect(),
            false => Err(format!("got {} numbers; the model has {count} labels: give as many", items.len())),
        }),
    }
}

/// Returns for each label whether it is in the list, which has those that apply, or a number from 0 to 1 with a point for each
/// label.
fn several(items: &[Value], labels: &LabelsConfig) -> Result<Vec<f32>, String> {
    let count = labels.names.len();
    let is_share = |item: &Value| item.kind() == ValueKind::Number && !item.is_integer();
    if !items.is_empty() && items.iter().all(is_share) {
        let shares = items.iter().map(number).collect::<Result<Vec<_>, _>>()?;
        return match shares.len() == count && shares.iter().all(|share| (0.0..=1.0).contains(share)) {
            true => Ok(shares),
            false => Err(format!("got {} numbers; give {count} from 0.0 to 1.0, or names", shares.len())),
        };
    }
    // Of more labels, one of such numbers is there twice.
    let is_flag =
        |item: &Value| item.is_integer() && usize::try_from(item.clone()).is_ok_and(|flag| flag < 2);
    if items.len() == count && count <= 2 && items.iter().all(is_flag) && items.first() != items.get(1) {
        return Err(format!(
            "such numbers can be those of the labels that apply, or say for each whether it applies; give names ({}), or numbers with a point, such as 1.0 and 0.0",
            labels.names.join(", ")
        ));
    }
    let mut applies = vec![0.0; count];
    for item in items {
        let place = &mut applies[id(item, labels)?];
        if *place != 0.0 {
            return Err(format!(
                "label {} is there twice; give each that applies once, or a number for each label of the model, such as 1.0 or 0.0",
                shown(item)
            ));
        }
        *place = 1.0;
    }
    Ok(applies)
}

/// Returns the index of a label, which is given by its name or its index.
fn id(label: &Value, labels: &LabelsConfig) -> Result<usize, String> {
    let count = labels.names.len();
    let of_text =
        |text: &str| labels.id(text).or_else(|| labels.id(text.trim())).or_else(|| text.trim().parse().ok());
    if let Some(other) = labels.id(&label.to_string()).filter(|_| label.is_integer())
        && usize::try_from(label.clone()).ok() != Some(other)
    {
        return Err(format!(
            "{label} is the name of label {other}, and a number here would be an index, from 0: give the name as a string, \
             \"{label}\""
        ));
    }
    let found = match label.kind() {
        ValueKind::String => label.as_str().and_then(of_text),
        ValueKind::Number if label.is_integer() => usize::try_from(label.clone()).ok(),
        ValueKind::Number => None,
        _ => return Err(format!("expected a name or a number, got {}", json_kind(label))),
    };
    found.filter(|id| *id < count).ok_or_else(|| {
        let some: Vec<&str> = labels.names.iter().take(MOST_NAMED).map(String::as_str).collect();
        let more =
            if count > some.len() { format!(" and {} others", count - some.len()) } else { String::new() };
        format!(
            "{} is no label of the model: it has {}{more} (0 to {})",
            shown(label),
            some.join(", "),
            count - 1
        )
    })
}

/// Labels that an error lists.
const MOST_NAMED: usize = 10;

/// Returns a number, which may stand in a text.
pub(super) fn number(label: &Value) -> Result<f32, String> {
    let number = match label.kind() {
        ValueKind::Number => f64::try_from(label.clone()).ok(),
        ValueKind::String => label.as_str().and_then(|text| text.trim().parse().ok()),
        _ => None,
    };
    let number = number.map(|number: f64| number as f32).filter(|number| number.is_finite());
    number.ok_or_else(|| format!("expected a number, got {}", shown(label)))
}

/// Returns a value as it is told: short ones as they are, others by their kind.
fn shown(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number => value.to_string(),
        ValueKind::String => {
            format!("{:?}", value.as_str().unwrap_or_default().chars().take(40).collect::<String>())
        }
        _ => json_kind(value).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::record;
    use super::*;

    fn parsed(json: &str, problem: Problem) -> Result<Vec<f32>, String> {
        let names = ["no", "yes", "maybe"].map(String::from);
        let names = if problem == Problem::Regression { names[..1].to_vec() } else { names.to_vec() };
        let record: Value = serde_json::from_str(json).unwrap();
        record::label(&record)
            .and_then(|label| parse(&label, &LabelsConfig { names, problem, pad_token: None }))
    }

    #[test]
    fn labels_are_names_or_numbers() {
        use Problem::{MultiLabel, Regression, SingleLabel};
        let cases = [
            (r#"{"label": "yes"}"#, SingleLabel, vec![1.0]),
            (r#"{"labels": 2}"#, SingleLabel, vec![2.0]),
            (r#"{"label": "0", "labels": null}"#, SingleLabel, vec![0.0]),
            (r#"{"label": ["maybe", 0]}"#, MultiLabel, vec![1.0, 0.0, 1.0]),
            (r#"{"label": []}"#, MultiLabel, vec![0.0; 3]),
            (r#"{"label": [0.0, 1.0, 0.5]}"#, MultiLabel, vec![0.0, 1.0, 0.5]),
            (r#"{"label": "[\"no\"]"}"#, MultiLabel, vec![1.0, 0.0, 0.0]),
            (r#"{"label": -2.5}"#, Regression, vec![-2.5]),
            (r#"{"label": "3"}"#, Regression, vec![3.0]),
        ];
        for (json, problem, expected) in cases {
            assert_eq!(parsed(json, problem).as_deref(), Ok(&expected[..]), "{json}");
        }
        let wrong = [
            (
                r#"{"label": "perhaps"}"#,
                SingleLabel,
                "\"perhaps\" is no label of the model: it has no, yes, maybe (0 to 2)",
            ),
            (r#"{"label": 3}"#, SingleLabel, "3 is no label of the model"),
            (r#"{"label": 1.5}"#, SingleLabel, "1.5 is no label of the model"),
            (r#"{"label": true}"#, SingleLabel, "expected a name or a number, got true or false"),
            (r#"{"label": ["yes"]}"#, SingleLabel, "got a list; a document has one label of several here"),
            (r#"{"text": "a"}"#, SingleLabel, "there is no `label` or `labels`; give each document one"),
            (r#"{"label": 1, "labels": 2}"#, SingleLabel, "both `label` or `labels` are filled"),
            (r#"{"label": "yes"}"#, MultiLabel, "expected a list of labels, got \"yes\""),
            (r#"{"label": [0, 1, 1]}"#, MultiLabel, "label 1 is there twice"),
            (r#"{"label": [0.0, 1.0]}"#, MultiLabel, "got 2 numbers; give 3 from 0.0 to 1.0, or names"),
            (r#"{"label": "warm"}"#, Regression, "expected a number, got \"warm\""),
            (r#"{"label": [1]}"#, Regression, "expected a number, got a list"),
        ];
        let of_two = LabelsConfig {
            names: ["no", "yes"].map(String::from).to_vec(),
            problem: MultiLabel,
            pad_token: None,
        };
        let of = |json: &str| parse(&serde_json::from_str::<Value>(json).unwrap(), &of_two);
        for json in ["[0, 1]", "[1, 0]"] {
            let line = of(json).unwrap_err();
            assert!(line.contains("give names (no, yes), or numbers with a point"), "{json}: {line}");
        }
        assert!(of("[1, 1]").unwrap_err().contains("label 1 is there twice"));
        let found = [of("[1]"), of("[\"no\", 1]"), of("[1.0, 0.0]")];
        assert_eq!(found, [Ok(vec![0.0, 1.0]), Ok(vec![1.0, 1.0]), Ok(vec![1.0, 0.0])]);
        // Names that are numbers, as those of stars.
        let of_stars = LabelsConfig {
            names: ["1", "2", "3"].map(String::from).to_vec(),
            problem: SingleLabel,
            pad_token: None,
        };
        let of = |json: &str| parse(&serde_json::from_str::<Value>(json).unwrap(), &of_stars);
        assert_eq!(["\"1\"", "\" 3\"", "0"].map(of), [Ok(vec![0.0]), Ok(vec![2.0]), Ok(vec![0.0])]);
        let line = of("1").unwrap_err();
        assert!(line.contains("1 is the name of label 0, and a number here would be an index"), "{line}");
        for (json, problem, said) in wrong {
            let line = parsed(json, problem).unwrap_err();
            assert!(line.contains(said), "{json}: {line}");
        }
    }
}
