//! Conversations and chat templates.

mod answers;
mod generation;
mod jinja;
mod named;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::value::ValueKind;
use minijinja::{Environment, Value, context};

use crate::reading::read_config;
use crate::tokenizer::{CONFIG, text_of_token};
use crate::{Error, Result, Tokenizer};

use generation::{BEGIN, END};

pub use named::NamedTemplate;

pub(crate) const FILE: &str = "chat_template.jinja";
/// Folder of the other templates of a tokenizer, where it has several.
pub(crate) const MORE_TEMPLATES: &str = "additional_chat_templates";
const NAME: &str = "chat_template";
/// Returns whether a file of a tokenizer is a chat template, by its path in the folder.
pub(crate) fn is_template(name: &str) -> bool {
    name.starts_with("chat_template.") || name.starts_with(MORE_TEMPLATES)
}

/// The template for conversations with tools, where a folder has several.
const NAME_WITH_TOOLS: &str = "tool_use";

/// A conversation: messages, each with a role.
#[derive(Debug, Clone)]
pub struct Chat {
    messages: Vec<Value>,
    /// Of each message, whether it is an answer that is trained on.
    trained: Vec<bool>,
    /// Number of messages of its prompt, if all behind them is trained on, whatever the template marks.
    prompt: Option<usize>,
    tools: Option<Value>,
    /// Further variables of the template, by name.
    variables: Vec<(String, Value)>,
}

/// Returns the name of a value's JSON type.
pub(super) fn json_kind(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => "null",
        ValueKind::Bool => "true or false",
        ValueKind::Number => "a number",
        ValueKind::String => "a string",
        ValueKind::Seq => "a list",
        _ => "an object",
    }
}

/// Returns the messages of a list.
fn messages_of(list: &Value) -> Vec<Value> {
    list.try_iter().into_iter().flatten().collect()
}

impl Chat {
    /// Checks that the messages are a list of objects with a role, and that one is an answer to train on.
    pub(super) fn new(messages: Value, tools: Option<Value>) -> std::result::Result<Self, String> {
        let chat = Self::any(messages, tools)?;
        match (chat.trained.contains(&true), chat.messages.iter().any(is_answer)) {
            (true, _) => Ok(chat),
            (false, true) => Err("no answer is to be trained on: there is nothing to learn".into()),
            (false, false) => Err("no message is of the role `assistant`: there is nothing to learn".into()),
        }
    }

    /// Checks a prompt and a completion, which are lists. All of the completion is trained on, unless some of its answers are
    /// not to be: then only the other ones are.
    pub(super) fn completing(
        prompt: &Value,
        completion: &Value,
        tools: Option<Value>,
    ) -> std::result::Result<Self, String> {
        let chat = Self::following(prompt, completion, tools)?;
        let prompt = messages_of(prompt);
        let mut trained = chat.trained;
        trained[..prompt.len()].fill(false);
        let are_all = trained
            .iter()
            .zip(&chat.messages)
            .skip(prompt.len())
            .all(|(trained, message)| *trained || !is_answer(message));
        if !are_all && !trained.contains(&true) {
            return Err("no answer of the completion is to be trained on: there is nothing to learn".into());
        }
        Ok(Self { prompt: are_all.then_some(prompt.len()), trained, ..chat })
    }

    /// Checks a prompt and an answer, which are lists. All of the answer counts.
    pub(super) fn answering(
        prompt: &Value,
        answer: &Value,
        tools: Option<Value>,
    ) -> std::result::Result<Self, String> {
        match Self::completing(prompt, answer, tools) {
            Ok(chat) if chat.prompt.is_none() => {
                Err("all of an answer counts: leave out `weight` and `train`".into())
            }
            Ok(chat) if chat.messages.len() == chat.prompt.unwrap_or_default() => {
                Err("there is no message".into())
            }
            chat => chat,
        }
    }

    /// Joins two lists of messages to one conversation, as [`any`](Self::any).
    pub(super) fn following(
        first: &Value,
        second: &Value,
        tools: Option<Value>,
    ) -> std::result::Result<Self, String> {
        Self::any(Value::from([messages_of(first), messages_of(second)].concat()), tools)
    }

    /// Checks that the messages are a list of objects with a role.
    pub(super) fn any(messages: Value, tools: Option<Value>) -> std::result::Result<Self, String> {
        if messages.kind() != ValueKind::Seq {
            let kind = json_kind(&messages);
            return Err(format!("expected a text or a list of messages, got {kind}"));
        }
        let messages: Vec<Value> = messages.try_iter().map_err(|error| error.to_string())?.collect();
        for (place, message) in messages.iter().enumerate() {
            if role(message).is_none() {
                return Err(format!(
                    "message {place} has no `role`: expected is {{\"role\": …, \"content\": …}}"
                ));
            }
        }
        let trained = messages.iter().enumerate().map(|(place, message)| {
            is_trained(message).map_err(|problem| format!("message {place}: {problem}"))
        });
        let trained = trained.collect::<std::result::Result<_, _>>()?;
        let messages = messages.iter().map(|message| jinja::plain_data(&prepared(message))).collect();
        Ok(Self {
            messages,
            trained,
            prompt: None,
            tools: tools.as_ref().map(jinja::plain_data),
            variables: Vec::new(),
        })
    }

    /// The same with these variables for the template.
    pub(super) fn with_variables(self, variables: &[(String, Value)]) -> Self {
        let plain = variables.iter().map(|(name, value)| (name.clone(), jinja::plain_data(value)));
        Self { variables: plain.collect(), ..self }
    }

    /// Returns the approximate bytes of its text.
    pub(super) fn bytes(&self) -> usize {
        let content =
            |message: &Value| message.get_attr("content").ok().and_then(|text| Some(text.as_str()?.len()));
        self.messages.iter().map(|message| 64 + content(message).unwrap_or_default()).sum()
    }

    /// Parses a JSON array of messages.
    ///
    /// # Errors
    /// Text that is not a conversation, or has no message of the role `assistant`.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse(text, Self::new)
    }

    /// Parses a JSON array of messages that a model is to answer: the last one is not the assistant's.
    ///
    /// # Errors
    /// Text that is not a conversation, has no message, or ends with one of the assistant.
    pub fn to_answer(text: &str) -> Result<Self> {
        Self::parse(text, |messages, tools| {
            let chat = Self::any(messages, tools)?;
            match chat.messages.last().map(is_answer) {
                None => Err("there is no message".into()),
                Some(true) => {
                    Err("the last message is the assistant's own: there is nothing to answer".into())
                }
                Some(false) => Ok(chat),
            }
        })
    }

    fn parse(
        text: &str,
        new: impl FnOnce(Value, Option<Value>) -> std::result::Result<Self, String>,
    ) -> Result<Self> {
        let messages: std::result::Result<Value, String> =
            serde_json::from_str(text).map_err(|error| error.to_string());
        messages.and_then(|messages| new(messages, None)).map_err(Error::Conversation)
    }
}

/// Checks the tools of a conversation: a list of objects, or a string that has one as JSON.
pub(super) fn tools(given: Value) -> std::result::Result<Option<Value>, String> {
    let tools = match given.as_str().map(str::trim) {
        Some("") => return Ok(None),
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("expected a list of objects, got a string that is no JSON: {error}"))?,
        None => given,
    };
    if tools.is_none() || tools.is_undefined() {
        return Ok(None);
    }
    let is_list = tools.kind() == ValueKind::Seq;
    let other = tools.try_iter().into_iter().flatten().find(|tool| tool.kind() != ValueKind::Map);
    match (is_list, other) {
        (true, None) => Ok(Some(tools)),
        (true, Some(other)) => Err(format!("expected a list of objects, got {} in it", json_kind(&other))),
        (false, _) => Err(format!("expected a list of objects, got {}", json_kind(&tools))),
    }
}

/// Returns the further variables of a template that a record gives (`chat_template_kwargs`): those of an object, or of a string that
/// has one as JSON.
///
/// # Errors
/// What is no object; what says in transformers how a text is made rather than what the template knows.
pub(super) fn variables(given: Value) -> std::result::Result<Vec<(String, Value)>, String> {
    const OTHERS: [&str; 15] = [
        "conversation", "messages", "tools", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
    ];
    let given = match given.as_str().map(str::trim) {
        Some("") => return Ok(Vec::new()),
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("expected an object, got a string that is no JSON: {error}"))?,
        None => given,
    };
    if given.is_none() || given.is_undefined() {
        return Ok(Vec::new());
    }
    if given.kind() != ValueKind::Map {
        return Err(format!("expected an object, got {}", json_kind(&given)));
    }
    let names = given.try_iter().map_err(|error| error.to_string())?;
    names
        .map(|name| match name.to_string() {
            name if OTHERS.contains(&&*name) => {
                Err(format!("`{name}` is no variable that a record can set: leave it out"))
            }
            text => Ok((text, given.get_item(&name).map_err(|error| error.to_string())?)),
        })
        .collect()
}

fn role(message: &Value) -> Option<String> {
    message.get_attr("role").ok()?.as_str().map(str::to_string)
}

/// Returns a message as transformers passes it to a template: without fields that are null, and with its reasoning
/// under the names that templates read.
fn prepared(message: &Value) -> Value {
    const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let get =
        |name: &str| message.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none());
    let mut fields: Vec<(String, Value)> = Vec::new();
    for name in message.try_iter().into_iter().flatten().map(|name| name.to_string()) {
        fields.extend(get(&name).map(|value| (name, value)));
    }
    if let Some(reasoning) = REASONING.iter().find_map(|name| get(name)) {
        for (name, place) in [("thinking", 0), ("reasoning_content", fields.len() + 1)] {
            match fields.iter_mut().find(|(found, _)| found == name) {
                Some((_, value)) if name == "reasoning_content" => *value = reasoning.clone(),
                Some(_) => {}
                None => fields.insert(place.min(fields.len()), (name.into(), reasoning.clone())),
            }
        }
    }
    Value::from_pairs(fields)
}

/// Whether a message is an answer that is trained on: all are whose `weight` is not 0 and whose `train` is not false.
fn is_trained(message: &Value) -> std::result::Result<bool, String> {
    let get = |name: &str| {
        let value = message.get_attr(name).ok()?;
        Some(value).filter(|value| !value.is_undefined() && !value.is_none())
    };
    let weight = match get("weight") {
        None => None,
        Some(weight) if weight == Value::from(0) && weight.is_number() => Some(false),
        Some(weight) if weight == Value::from(1) && weight.is_number() => Some(true),
        Some(weight) => return Err(format!("`weight` is {weight:?}; supported are 0 and 1")),
    };
    let train = match get("train") {
        None => None,
        Some(train) if train.kind() == ValueKind::Bool => Some(train.is_true()),
        Some(train) => return Err(format!("`train` is {train:?}; supported are true and false")),
    };
    match (weight.or(train), weight.is_some() && train.is_some() && weight != train) {
        (_, true) => Err("`weight` and `train` contradict each other".into()),
        (Some(true), _) if !is_answer(message) => {
            Err("only what the role `assistant` says can be trained on; leave out `weight` or `train`".into())
        }
        (given, _) => Ok(given.unwrap_or(true) && is_answer(message)),
    }
}

fn is_answer(message: &Value) -> bool {
    role(message).is_some_and(|role| role == "assistant")
}

/// Text of a conversation, or of its begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges of the assistant's answers to train on.
    pub answers: Vec<Range<usize>>,
}

/// Chat template: converts conversations to text with the Jinja template of a folder, as transformers does.
///
/// `strftime_now` returns the time in UTC.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Special tokens by name, such as `bos_token`.
    special: BTreeMap<String, String>,
    /// Whether the template marks the answers, and whether that for conversations with tools does, if there is one.
    marks: (bool, Option<bool>),
    path: PathBuf,
}

impl ChatTemplate {
    /// Loads the template of a folder: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. `None` if
    /// it has neither. For conversations with tools it is `additional_chat_templates/tool_use.jinja` or `tool_use` of
    /// `chat_template`, if there is one.
    ///
    /// # Errors
    /// Files that cannot be read, and templates that are not valid Jinja.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>> {
        let Some(texts) = texts_of_folder(folder)? else { return Ok(None) };
        Self::new(texts, special_tokens(folder)?).map(Some)
    }

    fn new(texts: Texts, special: BTreeMap<String, String>) -> Result<Self> {
        let Texts { text, with_tools, path } = texts;
        // As Jinja reads the source of a template.
        let with_marks = |text: &str| generation::with_marks(&text.replace("\r\n", "\n").replace('\r', "\n"));
        let (text, marks) = with_marks(&text);
        let with_tools = with_tools.as_deref().map(with_marks);
        let marks = (marks, with_tools.as_ref().map(|(_, marks)| *marks));
        let environment = jinja::environment().and_then(|mut environment| {
            jinja::add_template(&mut environment, NAME, text)?;
            let with_tools = with_tools.map(|(text, _)| text);
            with_tools.map_or(Ok(()), |text| jinja::add_template(&mut environment, NAME_WITH_TOOLS, text))?;
            Ok(environment)
        });
        match environment {
            Ok(environment) => Ok(Self { environment, special, marks, path }),
            Err(error) => Err(refuse(&path, &error)),
        }
    }

    /// Returns the text of a conversation, with the assistant's answers to train on, each with the token that ends it: those that
    /// the template marks with `{% generation %}`, else what each answer adds to the text of the messages before it.
    ///
    /// Some templates write an answer otherwise once other messages follow, as that of Qwen3, which then leaves reasoning out. Then
    /// there are several texts, and each ends with an answer as the model wrote it.
    ///
    /// # Cost
    /// One rendering with marks; without, two for each answer, of all messages up to it.
    ///
    /// # Errors
    /// Errors of the template; a template that writes the messages before an answer otherwise when it follows.
    pub fn render(&self, chat: &Chat) -> Result<Vec<Rendered>> {
        match self.marks_answers_of(chat) {
            true => Ok(vec![self.answers_by_marks(chat)?]),
            false => self.answers_by_prefix(chat),
        }
    }

    /// Returns the tokens of a conversation that a model is to answer, up to the beginning of its answer.
    ///
    /// # Errors
    /// Errors of the template; characters without a token.
    ///
    /// ```
    /// use models::Tokenizer;
    /// use models::tokens::{Chat, ChatTemplate};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path();
    /// let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    /// std::fs::write(path.join("chat_template.jinja"), template)?;
    /// let (template, tokenizer) = (ChatTemplate::from_folder(path)?.ok_or("no template")?, Tokenizer::bytes()?);
    /// let chat = Chat::to_answer(r#"[{"role": "user", "content": "hi"}]"#)?;
    /// let tokens = template.prompt(&chat, &tokenizer)?;
    /// assert_eq!(tokenizer.decode(&tokens)?, "user: hi\nassistant: ");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn prompt(&self, chat: &Chat, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let text = self.text(&chat.messages, chat, true)?.replace([BEGIN, END], "");
        let tokens = tokenizer.encode_with_offsets(&text)?;
        Ok(tokens.into_iter().map(|(token, _)| token).collect())
    }

    /// Returns the text of a conversation's prompt, up to the beginning of an answer, and that of all; `None` if it is not
    /// divided so.
    pub(super) fn completion(&self, chat: &Chat) -> Result<Option<(String, String)>> {
        let Some(prompt) = chat.prompt else { return Ok(None) };
        let text = |messages: &[Value], add_generation_prompt| {
            Ok::<_, Error>(self.text(messages, chat, add_generation_prompt)?.replace([BEGIN, END], ""))
        };
        // Some templates fail without messages.
        let before = if prompt == 0 { String::new() } else { text(&chat.messages[..prompt], true)? };
        Ok(Some((before, self.whole(chat)?)))
    }

    /// Returns the text of all of a conversation.
    pub(super) fn whole(&self, chat: &Chat) -> Result<String> {
        Ok(self.text(&chat.messages, chat, false)?.replace([BEGIN, END], ""))
    }

    /// Returns whether the template itself marks the answers.
    pub fn marks_answers(&self) -> bool {
        self.marks.0
    }

    /// Whether the template of this conversation marks the answers.
    pub(super) fn marks_answers_of(&self, chat: &Chat) -> bool {
        let with_tools = if self.takes_tools(chat) { self.marks.1 } else { None };
        with_tools.unwrap_or(self.marks.0)
    }

    /// Whether the template for conversations with tools is used, as transformers chooses.
    fn takes_tools(&self, chat: &Chat) -> bool {
        chat.tools.is_some() && self.marks.1.is_some()
    }

    /// Renders some messages, with marks if the template has them.
    fn text(&self, messages: &[Value], chat: &Chat, add_generation_prompt: bool) -> Result<String> {
        let tools = chat.tools.clone();
        let mut others: BTreeMap<&str, Value> =
            self.special.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str()))).collect();
        others.insert("documents", Value::from(()));
        others.extend(chat.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let others = Value::from_pairs(others);
        let context = context! { messages, tools, add_generation_prompt, ..others };
        let name = if self.takes_tools(chat) { NAME_WITH_TOOLS } else { NAME };
        let template = self.environment.get_template(name);
        template.and_then(|template| template.render(context)).map_err(|error| refuse(&self.path, &error))
    }

    fn problem(&self, problem: String) -> Error {
        Error::Format { path: self.path.clone(), problem }
    }
}

fn refuse(path: &Path, error: &minijinja::Error) -> Error {
    let line = error.line().map_or(String::new(), |line| format!("line {line} of "));
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    let what = what.lines().collect::<Vec<_>>().join(" ");
    Error::Format { path: path.into(), problem: format!("{line}the chat template: {what}") }
}

/// Returns the special tokens of a folder by name.
fn special_tokens(folder: &Path) -> Result<BTreeMap<String, String>> {
    let json = read_config(folder)?;
    let special = json.iter().filter(|(name, _)| name.ends_with("_token"));
    Ok(special.filter_map(|(name, value)| Some((name.clone(), text_of_token(value)?.to_string()))).collect())
}

/// Reads the file of a template.
fn read(path: &Path) -> Result<String> {
    let text = String::from_utf8(Error::read(path)?);
    text.map_err(|error| Error::Format { path: path.into(), problem: error.to_string() })
}

/// Returns the text of a folder's template, if it has one.
pub(crate) fn template_text(folder: &Path) -> Result<Option<String>> {
    Ok(texts_of_folder(folder)?.map(|texts| texts.text))
}

/// A template before it is compiled.
struct Texts {
    text: String,
    /// The one for conversations with tools, if that is another.
    with_tools: Option<String>,
    /// The file that has it.
    path: PathBuf,
}

/// Returns the texts of a folder's template, if it has one.
fn texts_of_folder(folder: &Path) -> Result<Option<Texts>> {
    let (own, config) = (folder.join(FILE), folder.join(CONFIG));
    if !folder.is_file() && own.exists() {
        let with_tools = folder.join(MORE_TEMPLATES).join(format!("{NAME_WITH_TOOLS}.jinja"));
        let with_tools = with_tools.exists().then(|| read(&with_tools)).transpose()?;
        return Ok(Some(Texts { text: read(&own)?, with_tools, path: own }));
    }
    let json = read_config(folder)?;
    let of = |name: &str| of_config(&json, name).map(str::to_string);
    Ok(of("default").map(|text| Texts { text, with_tools: of(NAME_WITH_TOOLS), path: config }))
}

/// Returns a template of a configuration by its name. A single one is named `default`.
fn of_config<'a>(json: &'a serde_json::Map<String, serde_json::Value>, name: &str) -> Option<&'a str> {
    let template = json.get("chat_template")?;
    let single = || template.as_str().filter(|_| name == "default");
    let named = |named: &&serde_json::Value| named.get("name").is_some_and(|found| found == name);
    single().or_else(|| template.as_array()?.iter().find(named)?.get("template")?.as_str())
}
