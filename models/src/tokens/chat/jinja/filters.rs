//! Jinja2's filters of single values.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

use super::arguments::Arguments;
use super::objects::Markup;
use super::python::{self, is_space, text_of};
use super::{builtin, methods, refuse};

/// A filter: it gets the state, and its arguments, of which the first is the value.
pub(super) type Filter = fn(&mut State, &[Value]) -> Result<Value, Error>;

/// Filters of minijinja that Jinja2 does not have, or that are not equal to it.
const REMOVED: &[&str] = &["split", "lines", "zip", "chain", "bool", "pprint"];

pub(super) fn add(environment: &mut Environment<'static>) {
    REMOVED.iter().for_each(|name| environment.remove_filter(name));
    let all: [(&str, Filter); 12] = [
        ("abs", |_, arguments| abs(arguments)),
        ("attr", |_, arguments| attr(arguments)),
        ("d", |_, arguments| default(arguments)),
        ("default", |_, arguments| default(arguments)),
        ("e", |_, arguments| escape(arguments, false)),
        ("escape", |_, arguments| escape(arguments, false)),
        ("forceescape", |_, arguments| escape(arguments, true)),
        ("float", |_, arguments| float(arguments)),
        ("int", |_, arguments| int(arguments)),
        ("round", |_, arguments| round(arguments)),
        ("safe", |_, arguments| {
            let value = Arguments::bind("safe", arguments, &["_value"])?;
            Ok(Value::from_object(Markup(python::str(value.need(0)?)?)))
        }),
        ("string", |_, arguments| {
            let given = Arguments::bind("string", arguments, &["_value"])?;
            let value = given.need(0)?;
            Ok(if text_of(value).is_some() { value.clone() } else { Value::from(python::str(value)?) })
        }),
    ];
    all.into_iter().for_each(|(name, filter)| add_one(environment, name, filter));
}

pub(super) fn add_one(environment: &mut Environment<'static>, name: &'static str, filter: Filter) {
    environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        state.consume_fuel(arguments.first().and_then(Value::len).unwrap_or_default() as u64)?;
        filter(state, &arguments)
    });
}

fn abs(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("abs", arguments, &["_value"])?;
    match given.need(0)? {
        value if value.kind() == ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        value => builtin("abs", std::slice::from_ref(value)),
    }
}

/// Attributes alone: fields of objects are none.
fn attr(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("attr", arguments, &["_value", "name"])?;
    let (value, name) = (given.need(0)?, given.text(1)?);
    if value.is_undefined() {
        return Err(refuse("`attr` of a value that is undefined"));
    }
    match super::objects::is_namespace(value) {
        true => value.get_attr(&name),
        false if methods::OF_DICTIONARIES.contains(&&*name) || text_of(value).is_some() => {
            Err(refuse(format!("`attr({name:?})` could be a method, which is not supported")))
        }
        false => Ok(Value::UNDEFINED),
    }
}

fn default(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("default", arguments, &["_value", "default_value", "boolean"])?;
    let value = given.need(0)?;
    let is_missing = value.is_undefined() || (given.flag(2, false) && !value.is_true());
    Ok(if is_missing { given.get(1).cloned().unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

fn escape(arguments: &[Value], also_safe: bool) -> Result<Value, Error> {
    let given = Arguments::bind("escape", arguments, &["_value"])?;
    let value = given.need(0)?;
    if !also_safe && value.downcast_object_ref::<Markup>().is_some() {
        return Ok(value.clone());
    }
    let mut escaped = String::new();
    for character in python::str(value)?.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            _ => escaped.push(character),
        }
    }
    Ok(Value::from_object(Markup(escaped)))
}

/// Returns a number's text as Rust reads it: without the underscores and white space that Python allows.
fn digits(text: &str) -> Option<String> {
    let text = text.trim_matches(is_space);
    let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let characters: Vec<char> = text.chars().collect();
    let is_between = |place: usize| {
        place > 0 && is_digit(Some(characters[place - 1])) && is_digit(characters.get(place + 1).copied())
    };
    let is_fine = (0..characters.len()).all(|place| characters[place] != '_' || is_between(place));
    is_fine.then(|| text.replace('_', ""))
}

fn float(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("float", arguments, &["_value", "default"])?;
    let value = given.need(0)?;
    let number = match (text_of(value), value.kind()) {
        (Some(text), _) => digits(text).and_then(|text| text.parse::<f64>().ok()),
        (None, ValueKind::Undefined) => return Err(refuse("`float` of a value that is undefined")),
        (None, ValueKind::Bool) => Some(f64::from(u8::from(value.is_true()))),
        (None, ValueKind::Number) => f64::try_from(value.clone()).ok(),
        _ => None,
    };
    Ok(number.map(Value::from).unwrap_or_else(|| given.get(1).cloned().unwrap_or_else(|| Value::from(0.0))))
}

fn int(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("int", arguments, &["_value", "default", "base"])?;
    let (value, base) = (given.need(0)?, given.number(2)?.unwrap_or(10));
    let number = match (text_of(value), value.kind()) {
        (Some(text), _) => digits(text)
            .filter(|text| text.parse().is_ok_and(f64::is_finite) || base != 10)
            .and_then(|text| builtin("int", &[Value::from(text), Value::from(()), Value::from(base)]).ok()),
        (None, ValueKind::Undefined) => return Err(refuse("`int` of a value that is undefined")),
        (None, ValueKind::Number) if f64::try_from(value.clone()).is_ok_and(|n| !n.is_finite()) => None,
        (None, ValueKind::Bool | ValueKind::Number) => Some(builtin("int", std::slice::from_ref(value))?),
        _ => None,
    };
    Ok(number.unwrap_or_else(|| given.get(1).cloned().unwrap_or_else(|| Value::from(0))))
}

fn round(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("round", arguments, &["_value", "precision", "method"])?;
    let value = given.need(0)?;
    let method = given.optional_text(2)?.unwrap_or_else(|| "common".into());
    let is_whole = value.kind() == ValueKind::Bool || value.is_integer();
    let rounded = match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        _ => value.clone(),
    };
    let precision = Value::from(given.number(1)?.unwrap_or(0));
    let rounded = builtin("round", &[rounded, precision, Value::from(&*method)])?;
    match is_whole && method != "common" {
        true => Ok(Value::from(f64::try_from(rounded)?)),
        false => Ok(rounded),
    }
}
