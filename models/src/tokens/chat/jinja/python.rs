//! Values as Python writes them: `str` and `repr`.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::objects::{Generator, Group, Markup, Range, View, is_namespace};
use super::refuse;

/// Limit on the nesting of a value that is printed.
pub(super) const DEEPEST: usize = 256;

/// Returns a string's or a safe string's text.
pub(super) fn text_of(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.downcast_object_ref::<Markup>().map(|markup| &*markup.0))
}

/// Whether Python's `str.isspace` holds for a character.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Returns the text of a value, as Python's `str`.
///
/// # Errors
/// A value whose text in Python is an address in memory.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    match (text_of(value), value.kind()) {
        (Some(text), _) => Ok(text.to_string()),
        (None, ValueKind::Undefined) => Ok(String::new()),
        _ => repr(value),
    }
}

/// Returns Python's `repr` of a value.
///
/// # Errors
/// As [`str`].
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    repr_within(value, DEEPEST)
}

fn repr_within(value: &Value, depth: usize) -> Result<String, Error> {
    let depth = depth.checked_sub(1).ok_or_else(|| refuse("a value is nested too deep to be printed"))?;
    if let Some(markup) = value.downcast_object_ref::<Markup>() {
        return Ok(format!("Markup({})", quoted(&markup.0)));
    }
    if let Some(range) = value.downcast_object_ref::<Range>() {
        return Ok(range.to_string());
    }
    if let Some(view) = value.downcast_object_ref::<View>() {
        return Ok(format!("dict_{}([{}])", view.kind, joined(&view.items, depth)?));
    }
    if let Some(generator) = value.downcast_object_ref::<Generator>() {
        return Err(refuse(format!("what `{}` gives cannot be printed; add `| list`", generator.made_by)));
    }
    match value.kind() {
        ValueKind::Undefined => Ok("Undefined".into()),
        ValueKind::None => Ok("None".into()),
        ValueKind::Bool => Ok(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(value.clone())?)),
        ValueKind::String => Ok(quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq if value.is_tuple() || value.downcast_object_ref::<Group>().is_some() => {
            let comma = if value.len() == Some(1) { "," } else { "" };
            Ok(format!("({}{comma})", list(value, depth)?))
        }
        ValueKind::Seq | ValueKind::Iterable => Ok(format!("[{}]", list(value, depth)?)),
        ValueKind::Map if value.as_object().is_some_and(|object| object.type_name().ends_with("::Loop")) => {
            Err(refuse("`loop` cannot be printed"))
        }
        ValueKind::Map => {
            let text = format!("{{{}}}", pairs(value, depth)?);
            Ok(if is_namespace(value) { format!("<Namespace {text}>") } else { text })
        }
        _ => Err(refuse("a function, a method or another object without a text cannot be printed")),
    }
}

fn list(value: &Value, depth: usize) -> Result<String, Error> {
    let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
    joined(&items, depth)
}

fn joined(items: &[Value], depth: usize) -> Result<String, Error> {
    let items = items.iter().map(|item| repr_within(item, depth));
    Ok(items.collect::<Result<Vec<_>, _>>()?.join(", "))
}

fn pairs(value: &Value, depth: usize) -> Result<String, Error> {
    let pair = |key: Result<Value, Error>| {
        let key = key?;
        Ok(format!("{}: {}", repr_within(&key, depth)?, repr_within(&value.get_item(&key)?, depth)?))
    };
    Ok(value.try_iter()?.checked().map(pair).collect::<Result<Vec<_>, Error>>()?.join(", "))
}

/// Returns a float with the fewest digits that give it, as Python's `repr`.
pub(super) fn float(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string().to_lowercase();
    }
    let text = format!("{value:e}");
    let parts = text.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?)));
    match parts.filter(|(_, power)| !(-4..16).contains(power)) {
        Some((digits, power)) => format!("{digits}e{power:+03}"),
        None => format!("{value:?}"),
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => out.extend(['\\', quote]),
            _ if is_printable(character) => out.push(character),
            _ => out.push_str(&match character as u32 {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x10000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
    out
}

/// Whether Python's `str.isprintable` holds for a character.
pub(super) fn is_printable(character: char) -> bool {
    // After another character, Rust escapes what does not print, quotes and backslashes.
    matches!(character, '\'' | '"' | '\\') || !format!("a{character}").escape_debug().any(|c| c == '\\')
}
