//! Jinja2's tests: what follows `is`.

use std::cmp::Ordering;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Value};

use super::objects::{Generator, Markup, Range, View, is_namespace};
use super::python::{self, text_of};
use super::{builtins, refuse};

/// Names of Jinja2's filters, and of those that transformers adds.
const FILTERS: &[&str] = &[
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape",
    "filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "max", "min", "pprint", "random", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "striptags",
    "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "urlize", "wordcount",
    "wordwrap", "xmlattr",
];

/// Names of Jinja2's tests.
const TESTS: &[&str] = &[
    "!=", "<", "<=", "==", ">", ">=", "boolean", "callable", "defined", "divisibleby", "eq", "equalto",
    "escaped", "even", "false", "filter", "float", "ge", "greaterthan", "gt", "in", "integer", "iterable",
    "le", "lessthan", "lower", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence",
    "string", "test", "true", "undefined", "upper",
];

/// Tests of minijinja that Jinja2 does not have.
const REMOVED: &[&str] = &["startingwith", "endingwith", "safe", "containing"];

pub(super) fn add(environment: &mut Environment<'static>) {
    REMOVED.iter().for_each(|name| environment.remove_test(name));
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("mapping", |value: &Value| value.kind() == ValueKind::Map && !is_namespace(value));
    environment.add_test("string", |value: &Value| text_of(value).is_some());
    environment.add_test("escaped", |value: &Value| value.downcast_object_ref::<Markup>().is_some());
    environment.add_test("lower", |value: &Value| Ok::<_, Error>(is_lower(&python::str(value)?)));
    environment.add_test("upper", |value: &Value| Ok::<_, Error>(is_upper(&python::str(value)?)));
    environment.add_test("odd", |value: &Value| Ok::<_, Error>(remainder(value, 2.0)? == 1.0));
    environment.add_test("even", |value: &Value| Ok::<_, Error>(remainder(value, 2.0)? == 0.0));
    environment.add_test("divisibleby", |value: &Value, by: &Value| match number(by) {
        Some(0.0) | None => Err(refuse("`divisibleby` needs a number that is not 0")),
        Some(by) => Ok(remainder(value, by)? == 0.0),
    });
    environment.add_test("sameas", |value: &Value, other: &Value| {
        let is_same = builtins().empty_state().perform_test("sameas", &[value.clone(), other.clone()])?;
        // Each use of a variable that is undefined is another object.
        Ok::<_, Error>(is_same && !value.is_undefined())
    });
    environment.add_test("filter", |value: &Value| is_name(value, FILTERS));
    environment.add_test("test", |value: &Value| is_name(value, TESTS));
    environment.add_test("in", |value: &Value, of: &Value| is_in(value, of));
    for (names, holds) in ORDERS {
        for name in *names {
            environment
                .add_test(*name, |value: &Value, other: &Value| Ok::<_, Error>(holds(order(value, other)?)));
        }
    }
}

type Holds = fn(Option<Ordering>) -> bool;

const ORDERS: &[(&[&str], Holds)] = &[
    (&["lt", "lessthan", "<"], |order| order.is_some_and(Ordering::is_lt)),
    (&["le", "<="], |order| order.is_some_and(Ordering::is_le)),
    (&["gt", "greaterthan", ">"], |order| order.is_some_and(Ordering::is_gt)),
    (&["ge", ">="], |order| order.is_some_and(Ordering::is_ge)),
];

fn is_callable(value: &Value) -> bool {
    let is_macro = value.as_object().is_some_and(|object| object.type_name().ends_with("::Macro"));
    let is_text = value.downcast_object_ref::<Markup>().is_some();
    value.is_undefined() || is_macro || (value.kind() == ValueKind::Plain && !is_text)
}

fn is_iterable(value: &Value) -> bool {
    let is_text = text_of(value).is_some();
    is_text || (!value.is_none() && !is_namespace(value) && value.try_iter().is_ok())
}

fn is_sequence(value: &Value) -> bool {
    let is_lazy =
        value.downcast_object_ref::<Generator>().is_some() || value.downcast_object_ref::<View>().is_some();
    value.kind() != ValueKind::None && is_iterable(value) && !is_lazy
}

/// Whether Python's `str.islower` holds for a text.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| c.is_uppercase() || is_title(c))
}

/// Whether Python's `str.isupper` holds for a text.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| c.is_lowercase() || is_title(c))
}

/// Whether a character is one letter for two of which the first is upper case, such as U+01C5.
pub(super) fn is_title(character: char) -> bool {
    !character.is_uppercase() && !character.is_lowercase() && character.to_lowercase().ne([character])
}

/// Returns a number's value; true is 1.
fn number(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn remainder(value: &Value, by: f64) -> Result<f64, Error> {
    let value =
        number(value).ok_or_else(|| refuse(format!("a value of type {} is no number", value.kind())))?;
    Ok(value.rem_euclid(by))
}

/// Returns the order of two values, none if one is no number.
///
/// # Errors
/// Values that Python does not compare.
pub(super) fn order(value: &Value, other: &Value) -> Result<Option<Ordering>, Error> {
    if let (Some(value), Some(other)) = (number(value), number(other)) {
        return Ok(value.partial_cmp(&other));
    }
    if let (Some(value), Some(other)) = (text_of(value), text_of(other)) {
        return Ok(Some(value.cmp(other)));
    }
    let are_lists = value.kind() == ValueKind::Seq && other.kind() == ValueKind::Seq;
    if !are_lists || value.is_tuple() != other.is_tuple() {
        return Err(refuse(format!("values of types {} and {} have no order", value.kind(), other.kind())));
    }
    let (items, others) = (value.try_iter()?, other.try_iter()?);
    for (item, other) in items.zip(others) {
        if item != other {
            return order(&item, &other);
        }
    }
    Ok(Some(value.len().cmp(&other.len())))
}

fn is_name(value: &Value, known: &[&str]) -> Result<bool, Error> {
    let is_view = value.downcast_object_ref::<View>().is_some();
    match value.kind() {
        ValueKind::Seq if value.downcast_object_ref::<Range>().is_some() => Ok(false),
        ValueKind::Seq if !value.is_tuple() => Err(refuse("a list is no name")),
        _ if is_view => Err(refuse("a view of a dictionary is no name")),
        ValueKind::Map if !is_namespace(value) => Err(refuse("an object is no name")),
        _ => Ok(text_of(value).is_some_and(|name| known.contains(&name))),
    }
}

fn is_in(value: &Value, of: &Value) -> Result<bool, Error> {
    if let Some(of) = text_of(of) {
        let value = text_of(value).ok_or_else(|| refuse("only a string can be in a string"))?;
        return Ok(of.contains(value));
    }
    match of.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::Map if !is_namespace(of) => match value.kind() {
            ValueKind::Seq if !value.is_tuple() => Err(refuse("a list is no key")),
            ValueKind::Map if !is_namespace(value) => Err(refuse("an object is no key")),
            _ => Ok(!of.get_item(value)?.is_undefined()),
        },
        _ if is_iterable(of) => {
            let equals = |item: Value| {
                item == *value || text_of(&item).is_some_and(|text| Some(text) == text_of(value))
            };
            Ok(of.try_iter()?.any(equals))
        }
        kind => Err(refuse(format!("a value of type {kind} contains nothing"))),
    }
}

/// Sorts by keys, as Python's `sorted`.
///
/// # Errors
/// Keys that Python does not compare.
pub(super) fn sort_by_order<T>(items: &mut [T], key: impl Fn(&T) -> &Value) -> Result<(), Error> {
    let mut problem = None;
    items.sort_by(|a, b| {
        let order = order(key(a), key(b)).unwrap_or_else(|error| {
            problem.get_or_insert(error);
            None
        });
        order.unwrap_or(Ordering::Equal)
    });
    problem.map_or(Ok(()), Err)
}
