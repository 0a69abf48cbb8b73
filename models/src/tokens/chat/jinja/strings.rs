//! Methods of Python's strings.

use std::ops::Range;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::arguments::Arguments;
use super::predicates::{is_lower, is_title, is_upper};
use super::python::{self, is_space, text_of};
use super::{builtin, refuse};

/// Limit on the width of padded text.
pub(super) const WIDEST: i64 = 1 << 20;

/// Calls a method of a string.
pub(super) fn call(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(value) = classified(text, method) {
        Arguments::bind(method, arguments, &[])?;
        return value.map(Value::from);
    }
    if let Some(cased) = cased(text, method) {
        Arguments::bind(method, arguments, &[])?;
        return cased.map(Value::from);
    }
    match method {
        "strip" | "lstrip" | "rstrip" => strip(text, method, arguments),
        "center" | "ljust" | "rjust" | "zfill" => pad(text, method, arguments),
        "count" | "find" | "rfind" | "index" | "rindex" => find(text, method, arguments),
        "startswith" | "endswith" => matches(text, method, arguments),
        "split" | "rsplit" => split(text, method, arguments),
        "partition" | "rpartition" => partition(text, method, arguments),
        "splitlines" => {
            let given = Arguments::bind(method, arguments, &["keepends"])?;
            Ok(lines(text, given.flag(0, false)).into_iter().collect())
        }
        "removeprefix" | "removesuffix" => {
            let part = Arguments::bind(method, arguments, &["_part"])?.text(0)?;
            let rest =
                if method == "removeprefix" { text.strip_prefix(&*part) } else { text.strip_suffix(&*part) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "replace" => {
            let given = Arguments::bind(method, arguments, &["_old", "_new", "count"])?;
            let (old, new) = (given.text(0)?, given.text(1)?);
            let count = given.number(2)?.and_then(|count| usize::try_from(count).ok());
            Ok(Value::from(text.replacen(&*old, &new, count.unwrap_or(usize::MAX))))
        }
        "join" => {
            let given = Arguments::bind(method, arguments, &["_items"])?;
            let item = |item: Result<Value, Error>| {
                let item = item?;
                let kind = item.kind();
                text_of(&item)
                    .map(str::to_string)
                    .ok_or_else(|| refuse(format!("`join` joins strings, got {kind}")))
            };
            let items = given.need(0)?.try_iter()?.checked().map(item).collect::<Result<Vec<_>, Error>>();
            Ok(Value::from(items?.join(text)))
        }
        "expandtabs" => {
            let width = Arguments::bind(method, arguments, &["tabsize"])?.number(0)?.unwrap_or(8);
            Ok(Value::from(expand_tabs(text, width.clamp(0, WIDEST) as usize)))
        }
        "format" => format(FormatStyle::StrFormat, text, arguments).map(Value::from),
        _ => {
            let problem = format!("a string has no method `{method}` here");
            Err(Error::new(ErrorKind::UnknownMethod, problem))
        }
    }
}

/// Returns what a method such as `isdigit` tells of a text.
fn classified(text: &str, method: &str) -> Option<Result<bool, Error>> {
    let all = |holds: &dyn Fn(char) -> bool| Some(Ok(!text.is_empty() && text.chars().all(holds)));
    match method {
        "isascii" => Some(Ok(text.is_ascii())),
        "islower" => Some(Ok(is_lower(text))),
        "isupper" => Some(Ok(is_upper(text))),
        "isspace" => all(&is_space),
        "isprintable" => Some(Ok(text.chars().all(python::is_printable))),
        "istitle" => Some(Ok(is_titled(text))),
        "isidentifier" if text.is_ascii() => {
            let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
            Some(Ok(starts && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')))
        }
        "isalpha" => all(&|c| c.is_alphabetic() && !c.is_numeric()),
        "isalnum" => all(&|c| c.is_alphabetic() || c.is_numeric()),
        "isdigit" | "isdecimal" | "isnumeric" => {
            // Rust does not tell the kinds of numbers beyond ASCII.
            let unknown = text.chars().find(|c| !c.is_ascii() && (c.is_numeric() || c.is_alphabetic()));
            match unknown.filter(|c| c.is_numeric() || method == "isnumeric") {
                Some(other) => {
                    Some(Err(refuse(format!("`{method}` is not supported for the character {other:?}"))))
                }
                None => all(&|c| c.is_ascii_digit()),
            }
        }
        _ => None,
    }
}

fn is_cased(character: char) -> bool {
    character.is_lowercase() || character.is_uppercase() || is_title(character)
}

fn is_titled(text: &str) -> bool {
    let (mut follows, mut any) = (false, false);
    for character in text.chars() {
        if follows != character.is_lowercase() && is_cased(character) {
            return false;
        }
        follows = is_cased(character);
        any |= follows;
    }
    any
}

/// Returns the text with letters of another case.
fn cased(text: &str, method: &str) -> Option<Result<String, Error>> {
    let capitalized = |text: &str| {
        builtin("capitalize", &[Value::from(text)]).map(|text| text.as_str().unwrap_or_default().to_string())
    };
    match method {
        "upper" => Some(Ok(text.to_uppercase())),
        "lower" => Some(Ok(text.to_lowercase())),
        "capitalize" => Some(capitalized(text)),
        // The dotless i is the one letter that is not equal to its upper case without case.
        "casefold" => Some(Ok(text
            .chars()
            .map(|c| if c == 'ı' { c.to_string() } else { c.to_uppercase().to_string().to_lowercase() })
            .collect())),
        "swapcase" => {
            Some(Ok(text
                .chars()
                .map(|c| {
                    if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
                })
                .collect()))
        }
        "title" => {
            let words = text.split_inclusive(|c: char| !is_cased(c));
            Some(words.map(capitalized).collect())
        }
        _ => None,
    }
}

fn strip(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let characters = Arguments::bind(method, arguments, &["_characters"])?.optional_text(0)?;
    let goes = |c: char| characters.as_ref().map_or_else(|| is_space(c), |characters| characters.contains(c));
    Ok(Value::from(match method {
        "lstrip" => text.trim_start_matches(goes),
        "rstrip" => text.trim_end_matches(goes),
        _ => text.trim_matches(goes),
    }))
}

fn pad(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (given, fill) = match method {
        "zfill" => (Arguments::bind(method, arguments, &["_width"])?, Some("0".into())),
        _ => {
            let given = Arguments::bind(method, arguments, &["_width", "_fill"])?;
            let fill = given.optional_text(1)?;
            (given, fill)
        }
    };
    let fill = fill.unwrap_or_else(|| " ".into());
    let width = given.number(0)?.ok_or_else(|| refuse(format!("`{method}` needs the argument `width`")))?;
    if fill.chars().count() != 1 || width > WIDEST {
        return Err(refuse(format!(
            "`{method}` needs one character to fill with, and a width up to {WIDEST}"
        )));
    }
    let missing = (width.max(0) as usize).saturating_sub(text.chars().count());
    let left = match method {
        "ljust" => 0,
        // As CPython places the odd one.
        "center" => missing / 2 + (missing & width as usize & 1),
        _ => missing,
    };
    let (before, after) = (fill.repeat(left), fill.repeat(missing - left));
    let signed = text.strip_prefix(['+', '-']).filter(|_| method == "zfill");
    Ok(Value::from(match signed {
        Some(digits) => format!("{}{before}{digits}", &text[..1]),
        None => format!("{before}{text}{after}"),
    }))
}

/// Returns the bytes of a part of the text, which is given in characters; none if it begins after the end.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<Range<usize>> {
    let len = text.chars().count();
    let place = |place: i64| match usize::try_from(place) {
        Ok(place) => place,
        Err(_) => len.saturating_sub(place.unsigned_abs() as usize),
    };
    let (start, end) = (start.map_or(0, place), end.map_or(len, place).min(len));
    if start > len {
        return None;
    }
    let byte = |place: usize| text.char_indices().nth(place).map_or(text.len(), |(byte, _)| byte);
    (start <= end).then(|| byte(start)..byte(end))
}

fn find(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind(method, arguments, &["_part", "_start", "_end"])?;
    let wanted = given.text(0)?;
    let range = part(text, given.number(1)?, given.number(2)?);
    let within = range.clone().map(|range| &text[range]);
    if method == "count" {
        return Ok(Value::from(within.map_or(0, |within| within.matches(&*wanted).count())));
    }
    let found =
        within.and_then(
            |within| if method.starts_with('r') { within.rfind(&*wanted) } else { within.find(&*wanted) },
        );
    match found.zip(range) {
        Some((place, range)) => Ok(Value::from(text[..range.start + place].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(refuse(format!("`{method}`: {wanted:?} is not in the string"))),
    }
}

fn matches(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind(method, arguments, &["_parts", "_start", "_end"])?;
    let parts = given.need(0)?;
    let parts: Vec<Value> = match parts.kind() {
        ValueKind::Seq if parts.is_tuple() => parts.try_iter()?.collect(),
        _ => vec![parts.clone()],
    };
    let within = part(text, given.number(1)?, given.number(2)?).map(|range| &text[range]);
    let mut found = false;
    for part in &parts {
        let part = text_of(part).ok_or_else(|| {
            refuse(format!("`{method}` needs a string or a tuple of strings, got {}", part.kind()))
        })?;
        found |= within.is_some_and(|text| {
            if method == "endswith" { text.ends_with(part) } else { text.starts_with(part) }
        });
    }
    Ok(Value::from(found))
}

fn split(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind(method, arguments, &["sep", "maxsplit"])?;
    let separator = given.optional_text(0)?;
    let most =
        given.number(1)?.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX).saturating_add(1);
    let from_end = method == "rsplit";
    let mut parts: Vec<&str> = match separator.as_deref() {
        Some("") => return Err(refuse(format!("`{method}` needs a separator with a character at least"))),
        Some(separator) if from_end => text.rsplitn(most, separator).collect(),
        Some(separator) => text.splitn(most, separator).collect(),
        None => words(text, most, from_end),
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Returns at most so many parts between white space, from the begin or the end.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text);
    loop {
        rest = if from_end { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        if rest.is_empty() {
            return parts;
        }
        let cut = match from_end {
            true => {
                rest.char_indices().rev().find(|(_, c)| is_space(*c)).map(|(place, c)| place + c.len_utf8())
            }
            false => rest.find(is_space),
        };
        match cut.filter(|_| parts.len() + 1 < most) {
            None => {
                parts.push(rest);
                return parts;
            }
            Some(cut) => {
                let (before, after) = rest.split_at(cut);
                let (word, left) = if from_end { (after, before) } else { (before, after) };
                parts.push(word);
                rest = left;
            }
        }
    }
}

fn partition(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let separator = Arguments::bind(method, arguments, &["_separator"])?.text(0)?;
    if separator.is_empty() {
        return Err(refuse(format!("`{method}` needs a separator with a character at least")));
    }
    let from_end = method == "rpartition";
    let found = if from_end { text.rsplit_once(&*separator) } else { text.split_once(&*separator) };
    let parts = match found {
        Some((before, after)) => [before, &*separator, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// Returns the lines of a text, as Python's `splitlines`.
pub(super) fn lines(text: &str, with_ends: bool) -> Vec<Value> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((line, end)) = rest.find(is_end).map(|place| rest.split_at(place)) {
        let first = end.chars().next().map_or(0, char::len_utf8);
        let len = if end.starts_with("\r\n") { 2 } else { first };
        lines.push(Value::from(if with_ends { &rest[..line.len() + len] } else { line }));
        rest = &end[len..];
    }
    lines.extend((!rest.is_empty()).then(|| Value::from(rest)));
    lines
}

fn expand_tabs(text: &str, width: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for character in text.chars() {
        match character {
            '\t' => {
                let spaces = if width == 0 { 0 } else { width - column % width };
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            _ => {
                out.push(character);
                column = if matches!(character, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}
