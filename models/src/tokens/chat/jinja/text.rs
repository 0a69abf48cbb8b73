//! Jinja2's filters of texts.

use minijinja::{Environment, Error, Value};

use super::arguments::Arguments;
use super::filters::{Filter, add_one};
use super::objects::Markup;
use super::python::{self, text_of};
use super::{builtin, refuse, strings};

pub(super) fn add(environment: &mut Environment<'static>) {
    let all: [(&'static str, Filter); 11] = [
        ("upper", |_, arguments| method("upper", arguments)),
        ("lower", |_, arguments| method("lower", arguments)),
        ("capitalize", |_, arguments| method("capitalize", arguments)),
        ("trim", |_, arguments| method("strip", arguments)),
        ("title", |_, arguments| {
            let given = Arguments::bind("title", arguments, &["_value"])?;
            builtin("title", &[Value::from(python::str(given.need(0)?)?)])
        }),
        ("center", |_, arguments| {
            let given = Arguments::bind("center", arguments, &["_value", "width"])?;
            let width = given.number(1)?.unwrap_or(80);
            strings::call(&python::str(given.need(0)?)?, "center", &[Value::from(width)])
        }),
        ("replace", |_, arguments| replace(arguments)),
        ("indent", |_, arguments| indent(arguments)),
        ("truncate", |_, arguments| truncate(arguments)),
        ("wordcount", |_, arguments| {
            let text = python::str(Arguments::bind("wordcount", arguments, &["_value"])?.need(0)?)?;
            let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            Ok(Value::from(words.filter(|word| !word.is_empty()).count()))
        }),
        ("format", |_, arguments| format(arguments)),
    ];
    all.into_iter().for_each(|(name, filter)| add_one(environment, name, filter));
}

/// Calls a method of the value's text.
fn method(name: &'static str, arguments: &[Value]) -> Result<Value, Error> {
    let (value, rest) = arguments.split_first().ok_or_else(|| refuse("a filter needs a value"))?;
    // `trim` names its argument, and Python's method does not.
    let given = Arguments::bind(name, rest, if name == "strip" { &["chars"] } else { &[] })?;
    let chars: Vec<Value> = given.get(0).cloned().into_iter().collect();
    strings::call(&python::str(value)?, name, &chars)
}

/// Refuses values that are no strings, where Jinja2 fails.
fn string<'a>(filter: &str, given: &'a Arguments) -> Result<&'a str, Error> {
    let value = given.need(0)?;
    if value.downcast_object_ref::<Markup>().is_some() {
        return Err(refuse(format!("`{filter}` of what `safe` or `escape` gives is not supported")));
    }
    text_of(value)
        .ok_or_else(|| refuse(format!("`{filter}` needs a string, got a value of type {}", value.kind())))
}

fn replace(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("replace", arguments, &["_value", "old", "new", "count"])?;
    let text = |place: usize| python::str(given.need(place)?);
    let count = given.number(3)?.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    Ok(Value::from(text(0)?.replacen(&text(1)?, &text(2)?, count)))
}

fn indent(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("indent", arguments, &["_value", "width", "first", "blank"])?;
    let width = match given.get(1).map(text_of) {
        Some(Some(width)) => width.to_string(),
        _ => " ".repeat(given.number(1)?.unwrap_or(4).clamp(0, strings::WIDEST) as usize),
    };
    // An end that the lines are cut at, as in Jinja2.
    let lines = strings::lines(&(string("indent", &given)?.to_string() + "\n"), false);
    let mut out = String::new();
    for (place, line) in lines.iter().enumerate() {
        let line = line.as_str().unwrap_or_default();
        let is_indented = match place {
            0 => given.flag(2, false),
            _ => given.flag(3, false) || !line.is_empty(),
        };
        out.push_str(if place > 0 { "\n" } else { "" });
        out.push_str(if is_indented { &width } else { "" });
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn truncate(arguments: &[Value]) -> Result<Value, Error> {
    let names = &["_value", "length", "killwords", "end", "leeway"];
    let given = Arguments::bind("truncate", arguments, names)?;
    let (length, leeway) = (given.number(1)?.unwrap_or(255), given.number(4)?.unwrap_or(5));
    let end = given.optional_text(3)?.unwrap_or_else(|| "...".into());
    let kept = length.saturating_sub(end.chars().count() as i64);
    if kept < 0 || leeway < 0 {
        return Err(refuse("`truncate` needs a length that its end fits in, and a leeway of 0 or more"));
    }
    let value = given.need(0)?;
    if value.len().is_some_and(|len| len as i64 <= length.saturating_add(leeway)) && text_of(value).is_none()
    {
        return Ok(value.clone());
    }
    let text = string("truncate", &given)?;
    if text.chars().count() as i64 <= length.saturating_add(leeway) {
        return Ok(Value::from(text));
    }
    let kept: String = text.chars().take(kept as usize).collect();
    let words =
        if given.flag(2, false) { &*kept } else { kept.rsplit_once(' ').map_or(&*kept, |(words, _)| words) };
    Ok(Value::from(format!("{words}{end}")))
}

/// `format`: Python's `%`, all of whose values must be used.
fn format(arguments: &[Value]) -> Result<Value, Error> {
    let (value, rest) = arguments.split_first().ok_or_else(|| refuse("`format` needs a value"))?;
    let text = python::str(value)?;
    let named = rest.iter().any(Value::is_kwargs);
    if !named && !rest.is_empty() && !text.replace("%%", "").contains('%') {
        return Err(refuse("`format`: more values than the string has places"));
    }
    builtin("format", &[&[Value::from(text)], rest].concat())
}
