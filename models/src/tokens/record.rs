//! Documents of records: of lines of JSON, and of rows of tables.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::chat::{Chat, json_kind, tools};
use super::piece::Piece;

const TEXT: &str = "text";
const MESSAGES: &str = "messages";
/// Field of what follows a prompt.
pub(super) const COMPLETION: &str = "completion";
pub(super) const PROMPT: &str = "prompt";
/// Fields of a record that are looked for by default.
pub(super) const NAMES: [&str; 3] = [TEXT, MESSAGES, COMPLETION];

/// Returns the document of a record; `None` if it is empty. `null_is_empty` is for rows of tables, which have all
/// columns.
///
/// # Errors
/// A record without the field, or with both a text and a conversation; a field that is neither; a prompt without a completion.
pub(super) fn piece(
    record: &Value,
    field: Option<&str>,
    null_is_empty: bool,
) -> Result<Option<Piece>, String> {
    document(record, field, null_is_empty, Chat::new)
}

/// As [`piece`]; `chat` makes a conversation of messages and tools.
fn document(
    record: &Value,
    field: Option<&str>,
    null_is_empty: bool,
    chat: impl FnOnce(Value, Option<Value>) -> Result<Chat, String>,
) -> Result<Option<Piece>, String> {
    let names = field.map_or(NAMES.to_vec(), |field| vec![field]);
    let get = |name: &str| record.get_item(&Value::from(name)).ok().filter(|value| !value.is_undefined());
    let found: Vec<(&str, Value)> = names.iter().filter_map(|name| Some((*name, get(name)?))).collect();
    // Rows of several kinds have all fields, and null or nothing in those of the other kinds.
    let mut filled = found.iter().filter(|(_, value)| value.is_true());
    let (first, second) = (filled.next(), filled.next());
    if let (Some((first, _)), Some((second, _))) = (first, second) {
        return Err(format!(
            "both `{first}` and `{second}` are filled; name the one to train on with --field"
        ));
    }
    let prompt = get(PROMPT).filter(|prompt| prompt.is_true());
    if first.is_none() && prompt.is_some() && names.contains(&COMPLETION) {
        return Err(format!(
            "there is a `{PROMPT}` without a `{COMPLETION}`; give both, or name the field to train on with --field"
        ));
    }
    let Some((name, value)) = first.or(found.first()).cloned() else {
        let held: Vec<String> = record.try_iter().into_iter().flatten().map(|key| key.to_string()).collect();
        let (names, held) = (listed(&names), held.join(", "));
        return Err(format!("there is no field {names}, but {held}; name one with --field"));
    };
    let refuse = |name: &str, problem: String| format!("field `{name}`: {problem}");
    let tools = || get("tools").map(tools).transpose().map_err(|problem| refuse("tools", problem));
    if name == COMPLETION
        && value.is_true()
        && let Some(prompt) = get(PROMPT).filter(|prompt| !prompt.is_none())
    {
        return completion(prompt, value, || Ok(tools()?.flatten())).map(Some);
    }
    if name == COMPLETION && field.is_none() && value.is_true() {
        return Err(format!(
            "there is a `{COMPLETION}` without a `{PROMPT}`; give both, or --field {COMPLETION} for a text without a prompt"
        ));
    }
    let value = match value.as_str() {
        Some("") => return Ok(None),
        // Tables without lists hold conversations as JSON.
        Some(text) if name == MESSAGES => serde_json::from_str(text).map_err(|error| {
            refuse(name, format!("expected a list of messages, got a string that is no JSON: {error}"))
        })?,
        Some(text) => {
            let (text, context) = (text.to_string(), Default::default());
            return Ok(Some(Piece::Text { text, context, begins: true, ends: true }));
        }
        None if value.is_none() && null_is_empty => return Ok(None),
        None => value,
    };
    chat(value, tools()?.flatten())
        .map(|chat| Some(Piece::Chat(chat)))
        .map_err(|problem| refuse(name, problem))
}

/// Returns the document of a record with its label: a text, a conversation, a prompt, or a prompt with its completion.
///
/// # Errors
/// A record without a label, or whose document is missing, empty or ambiguous.
pub(super) fn labelled(record: &Value, field: Option<&str>) -> Result<Piece, String> {
    let label = label(record)?;
    let is_filled = |name: &str| record.get_item(&Value::from(name)).is_ok_and(|value| value.is_true());
    let is_prompt = is_filled(PROMPT) && !NAMES.into_iter().any(is_filled);
    let field = field.or(is_prompt.then_some(PROMPT));
    match document(record, field, true, Chat::any)? {
        Some(document) => Ok(Piece::Labelled { document: Box::new(document), label }),
        None => Err("it has a label, and no text".into()),
    }
}

/// Fields of a record that may hold its label.
const LABELS: [&str; 2] = ["label", "labels"];

/// Returns the label of a record.
///
/// # Errors
/// A record without one, or with two.
pub(super) fn label(record: &Value) -> Result<Value, String> {
    let get = |name: &&str| record.get_item(&Value::from(*name)).ok();
    let mut found = LABELS.iter().filter_map(get).filter(|value| !value.is_undefined() && !value.is_none());
    match (found.next(), found.next()) {
        (Some(label), None) => Ok(label),
        (Some(_), Some(_)) => Err(format!("both {} are filled; give one of them", listed(&LABELS))),
        (None, _) => Err(format!("there is no {}; give each document one", listed(&LABELS))),
    }
}

/// Returns names in quotes, with "or" before the last one.
pub(super) fn listed(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} or {last}", before.join(", ")),
        _ => quoted.concat(),
    }
}

/// Returns a prompt with its completion.
fn completion(
    prompt: Value,
    completion: Value,
    tools: impl FnOnce() -> Result<Option<Value>, String>,
) -> Result<Piece, String> {
    match (prompt.as_str(), completion.as_str(), prompt.kind(), completion.kind()) {
        (Some(prompt), Some(completion), ..) => {
            Ok(Piece::Completion { prompt: prompt.into(), completion: completion.into() })
        }
        (.., ValueKind::Seq, ValueKind::Seq) => {
            Chat::completing(&prompt, &completion, tools()?).map(Piece::Chat)
        }
        _ => Err(format!(
            "`{PROMPT}` is {}, and `{COMPLETION}` is {}; give two strings, or two lists of messages",
            json_kind(&prompt),
            json_kind(&completion)
        )),
    }
}

/// Returns the name of a record's JSON type if it is no object.
pub(super) fn other_kind(record: &Value) -> Option<&'static str> {
    (record.kind() != ValueKind::Map).then(|| json_kind(record))
}
