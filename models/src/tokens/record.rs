//! Documents of records: of lines of JSON, and of rows of tables.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::chat::{Chat, json_kind, tools, variables};
use super::label;
use super::piece::Piece;

const TEXT: &str = "text";
const MESSAGES: &str = "messages";
/// Field of what follows a prompt.
pub(super) const COMPLETION: &str = "completion";
pub(super) const PROMPT: &str = "prompt";
pub(super) const CHOSEN: &str = "chosen";
pub(super) const REJECTED: &str = "rejected";
const MARGIN: &str = "margin";
const TOOLS: &str = "tools";
const VARIABLES: &str = "chat_template_kwargs";
/// Fields that say how conversations are written.
#[cfg(feature = "parquet")]
pub(super) const OF_TEMPLATES: [&str; 2] = [TOOLS, VARIABLES];
/// Fields of a pair.
pub(super) const OF_PAIRS: [&str; 3] = [CHOSEN, REJECTED, PROMPT];
/// Fields of a pair that a reward model learns from.
pub(super) const OF_REWARDS: [&str; 4] = [CHOSEN, REJECTED, PROMPT, MARGIN];
/// Fields of a record that are looked for by default.
pub(super) const NAMES: [&str; 3] = [TEXT, MESSAGES, COMPLETION];
/// Fields of a record that may hold its label.
pub(super) const LABELS: [&str; 2] = ["label", "labels"];

/// Returns what to do about a table that has none of these columns.
pub(super) fn column_help(names: &[&str]) -> &'static str {
    if names.starts_with(&OF_PAIRS) { "a pair has `chosen` and `rejected`" } else { "name one with --field" }
}

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
    if first.is_none() && field.is_none() && is_pair(record) {
        return Err(
            "it is a pair of answers: `prefer` trains on those, and `finetune --task reward` a reward model; or name one field with --field"
                .into(),
        );
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
    let tools = || get(TOOLS).map(tools).transpose().map_err(|problem| refuse(TOOLS, problem));
    if name == COMPLETION
        && value.is_true()
        && let Some(prompt) = get(PROMPT).filter(|prompt| !prompt.is_none())
    {
        return completion(prompt, value, record, || Ok(tools()?.flatten())).map(Some);
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
    let chat = chat(value, tools()?.flatten()).map_err(|problem| refuse(name, problem))?;
    Ok(Some(Piece::Chat(chat.with_variables(&variables_of(record)?))))
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

/// Returns the further variables that a record has for its template.
fn variables_of(record: &Value) -> Result<Vec<(String, Value)>, String> {
    let given = record.get_item(&Value::from(VARIABLES)).unwrap_or_default();
    variables(given).map_err(|problem| format!("field `{VARIABLES}`: {problem}"))
}

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
        (None, _) if is_pair(record) => {
            Err("it is a pair of answers, without a label: give --task reward, for a model that learns from those".into())
        }
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
    record: &Value,
    tools: impl FnOnce() -> Result<Option<Value>, String>,
) -> Result<Piece, String> {
    match (prompt.as_str(), completion.as_str(), prompt.kind(), completion.kind()) {
        (Some(prompt), Some(completion), ..) => {
            Ok(Piece::Completion { prompt: prompt.into(), completion: completion.into() })
        }
        (.., ValueKind::Seq, ValueKind::Seq) => {
            let chat = Chat::completing(&prompt, &completion, tools()?)?;
            Ok(Piece::Chat(chat.with_variables(&variables_of(record)?)))
        }
        _ => Err(format!(
            "`{PROMPT}` is {}, and `{COMPLETION}` is {}; give two strings, or two lists of messages",
            json_kind(&prompt),
            json_kind(&completion)
        )),
    }
}

/// Whether a record has two answers.
pub(super) fn is_pair(record: &Value) -> bool {
    let has = |name: &str| record.get_item(&Value::from(name)).is_ok_and(|value| value.is_true());
    has(CHOSEN) && has(REJECTED)
}

/// Returns the pair of a record for a reward model: two whole documents, and as label their margin, 0 unless there is one.
///
/// # Errors
/// Those of [`pair`], but conversations need not begin alike; a margin that is no number.
pub(super) fn rewarded(record: &Value, is_text: bool) -> Result<Piece, String> {
    let document = Box::new(pair_of(record, is_text, true)?);
    let given = record.get_item(&Value::from(MARGIN)).ok();
    // An empty cell of a table is none.
    let given =
        given.filter(|margin| !margin.is_undefined() && !margin.is_none() && margin.as_str() != Some(""));
    let margin = given.map_or(Ok(0.0), |margin| label::number(&margin));
    let margin = margin.map_err(|problem| format!("field `{MARGIN}`: {problem}"))?;
    Ok(Piece::Labelled { document, label: Value::from(margin) })
}

/// Returns the pair of a record. `is_text` is for rows of tables of text: there an empty prompt is none, and a list of messages is a
/// string that has it as JSON.
///
/// # Errors
/// A record without both answers; answers that are equal, of two kinds, or without a prompt.
pub(super) fn pair(record: &Value, is_text: bool) -> Result<Piece, String> {
    pair_of(record, is_text, false)
}

/// As [`pair`]; of `whole` conversations nothing is asked but that they are some.
fn pair_of(record: &Value, is_text: bool, whole: bool) -> Result<Piece, String> {
    let get = |name: &str| record.get_item(&Value::from(name)).ok().filter(|value| value.is_true());
    let [Some(chosen), Some(rejected)] = [CHOSEN, REJECTED].map(get) else {
        let missing = if get(CHOSEN).is_none() { CHOSEN } else { REJECTED };
        return Err(format!(
            "there is no `{missing}`, or it is empty: a pair has `{CHOSEN}` and `{REJECTED}`"
        ));
    };
    let messages = |value: Value| if is_text { messages(value) } else { value };
    let [chosen, rejected] = [messages(chosen), messages(rejected)];
    if chosen == rejected {
        return Err(format!("`{CHOSEN}` and `{REJECTED}` are equal: nothing is preferred; leave it out"));
    }
    let empty = record
        .get_item(&Value::from(PROMPT))
        .ok()
        .filter(|prompt| prompt.as_str() == Some("") && !is_text && !whole);
    let prompt = get(PROMPT).map(messages).or(empty);
    match (chosen.as_str(), rejected.as_str(), chosen.kind(), rejected.kind()) {
        (Some(chosen), Some(rejected), ..) => {
            let (prompt, answers) = match prompt {
                None => split_text(chosen, rejected),
                Some(prompt) => match prompt.as_str() {
                    Some(prompt) => (prompt.into(), [chosen.into(), rejected.into()]),
                    None => return Err(of_two_kinds(&prompt, "a string")),
                },
            };
            Ok(Piece::Pair { prompt, answers })
        }
        (.., ValueKind::Seq, ValueKind::Seq) => {
            let tools =
                get(TOOLS).map(tools).transpose().map_err(|problem| format!("field `{TOOLS}`: {problem}"))?;
            let variables = variables_of(record)?;
            let (prompt, answers) = match prompt {
                Some(prompt) if prompt.kind() == ValueKind::Seq => (prompt, [chosen, rejected]),
                Some(prompt) if prompt.is_true() && !share_a_question(&chosen, &rejected) => {
                    return Err(of_two_kinds(&prompt, "lists of messages"));
                }
                _ if whole => (Value::from(Vec::<Value>::new()), [chosen, rejected]),
                _ => split_messages(&chosen, &rejected)?,
            };
            let chat = |name: &str, answer: &Value| {
                let chat = if whole { Chat::following } else { Chat::answering };
                chat(&prompt, answer, tools.clone().flatten())
                    .map(|chat| chat.with_variables(&variables))
                    .map_err(|problem| format!("field `{name}`: {problem}"))
            };
            Ok(Piece::ChatPair([chat(CHOSEN, &answers[0])?, chat(REJECTED, &answers[1])?]))
        }
        _ => {
            let kinds = [json_kind(&chosen), json_kind(&rejected)];
            Err(format!(
                "`{CHOSEN}` is {}, and `{REJECTED}` is {}; give two strings, or two lists of messages",
                kinds[0], kinds[1]
            ))
        }
    }
}

fn of_two_kinds(prompt: &Value, answers: &str) -> String {
    let kind = json_kind(prompt);
    format!(
        "`{PROMPT}` is {kind}, and both answers are {answers}; give all as strings, or all as lists of messages"
    )
}

/// Whether two conversations begin with the same messages, with one among them that is neither an answer nor an instruction. Some
/// sets have a prompt as text, and again in the messages of both.
fn share_a_question(chosen: &Value, rejected: &Value) -> bool {
    let of = |list: &Value| list.try_iter().into_iter().flatten().collect::<Vec<_>>();
    let is_question = |message: &Value| {
        let role = message.get_attr("role").ok();
        role.is_some_and(|role| {
            role.as_str().is_some_and(|role| !["assistant", "system", "developer"].contains(&role))
        })
    };
    let (chosen, rejected) = (of(chosen), of(rejected));
    let mut shared = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b);
    shared.any(|(message, _)| is_question(message))
}

/// Tables of text hold messages as JSON. What is a list of something else is an answer.
fn messages(value: Value) -> Value {
    let list = value.as_str().filter(|text| text.starts_with("[{"));
    let list: Option<Value> = list.and_then(|text| serde_json::from_str(text).ok());
    let has_role = |message: Value| message.get_attr("role").is_ok_and(|role| role.as_str().is_some());
    let are_messages = |list: &Value| list.try_iter().is_ok_and(|mut list| list.all(has_role));
    list.filter(are_messages).unwrap_or(value)
}

/// Returns what two texts begin with, without a space at its end, and the rests of both, as TRL divides them.
fn split_text(chosen: &str, rejected: &str) -> (String, [String; 2]) {
    let chars = || chosen.chars().zip(rejected.chars());
    let (shared, shortest) = (chars().take_while(|(a, b)| a == b).count(), chars().count());
    // An answer has a character at least.
    let shared = shared.min(shortest.saturating_sub(1));
    let ends_with_space = shared > 0 && chosen.chars().nth(shared - 1) == Some(' ');
    let shared = shared - usize::from(ends_with_space);
    let rest = |text: &str| text.chars().skip(shared).collect();
    (chosen.chars().take(shared).collect(), [rest(chosen), rest(rejected)])
}

/// Returns the messages that two conversations begin with, and the rests of both.
fn split_messages(chosen: &Value, rejected: &Value) -> Result<(Value, [Value; 2]), String> {
    let of = |list: &Value| list.try_iter().into_iter().flatten().collect::<Vec<_>>();
    let lists = [of(chosen), of(rejected)];
    let shared = lists[0].iter().zip(&lists[1]).take_while(|(a, b)| a == b).count();
    if shared == 0 {
        return Err(format!(
            "`{CHOSEN}` and `{REJECTED}` begin with different messages: give the messages before both answers as `{PROMPT}`"
        ));
    }
    if lists.iter().any(|list| list.len() == shared) {
        return Err(format!(
            "one of `{CHOSEN}` and `{REJECTED}` is the beginning of the other: each needs an answer"
        ));
    }
    let rest = |list: &Vec<Value>| Value::from(list[shared..].to_vec());
    Ok((Value::from(lists[0][..shared].to_vec()), [rest(&lists[0]), rest(&lists[1])]))
}

/// Returns the name of a record's JSON type if it is no object.
pub(super) fn other_kind(record: &Value) -> Option<&'static str> {
    (record.kind() != ValueKind::Map).then(|| json_kind(record))
}
