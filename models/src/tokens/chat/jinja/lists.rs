//! Jinja2's filters of lists and dictionaries. Those that give a generator there give one here, too, which is not empty, has no length
//! and can be used once.

use std::cmp::Ordering;

use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::arguments::Arguments;
use super::filters::{Filter, add_one};
use super::objects::Generator;
use super::predicates::{order, sort_by_order};
use super::python::{self, text_of};
use super::{builtin, refuse};

pub(super) fn add(environment: &mut Environment<'static>) {
    let all: [(&'static str, Filter); 21] = [
        ("map", map),
        ("select", |state, arguments| select("select", state, arguments)),
        ("reject", |state, arguments| select("reject", state, arguments)),
        ("selectattr", |state, arguments| select("selectattr", state, arguments)),
        ("rejectattr", |state, arguments| select("rejectattr", state, arguments)),
        ("list", |_, arguments| {
            Ok(Value::from(items(Arguments::bind("list", arguments, &["_value"])?.need(0)?)?))
        }),
        ("join", |_, arguments| join(arguments)),
        ("sort", |_, arguments| sort(arguments)),
        ("unique", |_, arguments| unique(arguments)),
        ("min", |_, arguments| extreme("min", Ordering::Less, arguments)),
        ("max", |_, arguments| extreme("max", Ordering::Greater, arguments)),
        ("sum", |_, arguments| sum(arguments)),
        ("batch", |_, arguments| lazy("batch", arguments)),
        ("slice", |_, arguments| lazy("slice", arguments)),
        ("reverse", |_, arguments| reverse(arguments)),
        ("items", |_, arguments| pairs(arguments)),
        ("groupby", |_, arguments| groupby(arguments)),
        ("count", |_, arguments| length(arguments)),
        ("length", |_, arguments| length(arguments)),
        ("first", |_, arguments| {
            let given = Arguments::bind("first", arguments, &["_value"])?;
            Ok(items(given.need(0)?)?.into_iter().next().unwrap_or_default())
        }),
        ("last", |_, arguments| {
            let given = Arguments::bind("last", arguments, &["_value"])?;
            match given.need(0)? {
                lazy if lazy.downcast_object_ref::<Generator>().is_some() => {
                    Err(refuse("`last` of a generator; add `| list` before it"))
                }
                value => Ok(items(value)?.pop().unwrap_or_default()),
            }
        }),
    ];
    all.into_iter().for_each(|(name, filter)| add_one(environment, name, filter));
}

fn length(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("length", arguments, &["_value"])?;
    let value = given.need(0)?;
    match text_of(value) {
        Some(text) => Ok(Value::from(text.chars().count())),
        None if super::objects::is_namespace(value) => Err(refuse("a namespace has no length")),
        None => builtin("length", std::slice::from_ref(value)),
    }
}

/// Returns what Python iterates over.
fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match text_of(value) {
        Some(text) => Ok(text.chars().map(Value::from).collect()),
        None if value.is_none() => Err(refuse("none is not iterable")),
        None => value.try_iter()?.checked().collect(),
    }
}

/// Returns an item's attribute, such as `function.name` or 0; `default` if it is undefined.
fn attribute(item: &Value, name: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let found = match text_of(name) {
        Some(path) => path.split('.').try_fold(item.clone(), |item, part| {
            let number = part.parse::<i64>().ok().filter(|_| part.bytes().all(|byte| byte.is_ascii_digit()));
            item.get_item(&number.map_or_else(|| Value::from(part), Value::from))
        })?,
        None => item.get_item(name)?,
    };
    Ok(match default.filter(|_| found.is_undefined()) {
        Some(default) => default.clone(),
        None => found,
    })
}

fn map(state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
    let (value, rest) = arguments.split_first().ok_or_else(|| refuse("`map` needs a value"))?;
    let items = if value.is_true() { items(value)? } else { Vec::new() }.into_iter();
    let mapped: Vec<Value> = match rest {
        [named] if named.is_kwargs() => {
            let named = Kwargs::try_from(named.clone())?;
            let (name, default): (Value, Option<Value>) = (named.get("attribute")?, named.get("default")?);
            named.assert_all_used()?;
            items.map(|item| attribute(&item, &name, default.as_ref())).collect::<Result<_, _>>()?
        }
        [filter, rest @ ..] => {
            let filter = text_of(filter).ok_or_else(|| refuse("`map` needs the name of a filter"))?;
            items
                .map(|item| state.apply_filter(filter, &[&[item], rest].concat()))
                .collect::<Result<_, _>>()?
        }
        [] => return Err(refuse("`map` needs the name of a filter, or `attribute`")),
    };
    Ok(Generator::value("map", mapped))
}

fn select(name: &'static str, state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
    let (value, rest) = arguments.split_first().ok_or_else(|| refuse(format!("`{name}` needs a value")))?;
    let (attr, rest) = match rest.split_first().filter(|_| name.ends_with("attr")) {
        Some((attr, rest)) => (Some(attr), rest),
        None if name.ends_with("attr") => {
            return Err(refuse(format!("`{name}` needs the name of an attribute")));
        }
        None => (None, rest),
    };
    let mut kept = Vec::new();
    for item in if value.is_true() { items(value)? } else { Vec::new() } {
        let tested = attr.map_or_else(|| Ok(item.clone()), |attr| attribute(&item, attr, None))?;
        let holds = match rest.split_first() {
            None => tested.is_true(),
            Some((test, rest)) => {
                let test =
                    text_of(test).ok_or_else(|| refuse(format!("`{name}` needs the name of a test")))?;
                state.perform_test(test, &[&[tested], rest].concat())?
            }
        };
        if holds == name.starts_with("select") {
            kept.push(item);
        }
    }
    Ok(Generator::value(name, kept))
}

fn join(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("join", arguments, &["_value", "d", "attribute"])?;
    let between = given.get(1).map_or_else(|| Ok(String::new()), python::str)?;
    let text = |item: &Value| match given.given(2) {
        Some(name) => python::str(&attribute(item, name, None)?),
        None => python::str(item),
    };
    let texts: Result<Vec<String>, Error> = items(given.need(0)?)?.iter().map(text).collect();
    Ok(Value::from(texts?.join(&between)))
}

/// Returns what items are compared by: an attribute or several, and strings without case unless it counts.
fn key(item: &Value, name: Option<&Value>, with_case: bool) -> Result<Value, Error> {
    let part = |found: Value| match text_of(&found) {
        Some(text) if !with_case => Value::from(text.to_lowercase()),
        _ => found,
    };
    match (name, name.and_then(text_of)) {
        (Some(_), Some(names)) if names.contains(',') => {
            names.split(',').map(|name| Ok(part(attribute(item, &Value::from(name), None)?))).collect()
        }
        (Some(name), _) => Ok(part(attribute(item, name, None)?)),
        (None, _) => Ok(part(item.clone())),
    }
}

fn keyed(value: &Value, name: Option<&Value>, with_case: bool) -> Result<Vec<(Value, Value)>, Error> {
    items(value)?.into_iter().map(|item| Ok((key(&item, name, with_case)?, item))).collect()
}

fn sort(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("sort", arguments, &["_value", "reverse", "case_sensitive", "attribute"])?;
    let mut all = keyed(given.need(0)?, given.given(3), given.flag(2, false))?;
    // Equal items keep their order, also in reverse.
    let is_reversed = given.flag(1, false);
    if is_reversed {
        all.reverse();
    }
    sort_by_order(&mut all, |(key, _)| key)?;
    if is_reversed {
        all.reverse();
    }
    Ok(all.into_iter().map(|(_, item)| item).collect())
}

fn unique(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("unique", arguments, &["_value", "case_sensitive", "attribute"])?;
    let (mut seen, mut kept) = (std::collections::HashSet::new(), Vec::new());
    for (key, item) in keyed(given.need(0)?, given.given(2), given.flag(1, false))? {
        if matches!(key.kind(), ValueKind::Map | ValueKind::Seq) && !key.is_tuple() {
            return Err(refuse("`unique` compares neither lists nor dictionaries"));
        }
        if seen.insert(key) {
            kept.push(item);
        }
    }
    Ok(Generator::value("unique", kept))
}

fn extreme(name: &str, wanted: Ordering, arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind(name, arguments, &["_value", "case_sensitive", "attribute"])?;
    let mut all = keyed(given.need(0)?, given.given(2), given.flag(1, false))?.into_iter();
    let Some(mut best) = all.next() else { return Ok(Value::UNDEFINED) };
    for other in all {
        if order(&other.0, &best.0)? == Some(wanted) {
            best = other;
        }
    }
    Ok(best.1)
}

fn sum(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("sum", arguments, &["_value", "attribute", "start"])?;
    let name = given.given(1);
    let of = |item: &Value| name.map_or_else(|| Ok(item.clone()), |name| attribute(item, name, None));
    let all: Vec<Value> = items(given.need(0)?)?.iter().map(of).collect::<Result<_, _>>()?;
    if all.iter().any(Value::is_undefined) {
        return Err(refuse("`sum`: an item is undefined"));
    }
    let start = given.get(2).cloned().unwrap_or_else(|| Value::from(0));
    builtin("sum", &[Value::from(all), Value::from(()), start])
}

/// Calls a filter of minijinja whose result is a generator in Jinja2.
fn lazy(name: &'static str, arguments: &[Value]) -> Result<Value, Error> {
    let names = if name == "batch" {
        &["_value", "linecount", "fill_with"]
    } else {
        &["_value", "slices", "fill_with"]
    };
    let given = Arguments::bind(name, arguments, names)?;
    let count = given.number(1)?.ok_or_else(|| refuse(format!("`{name}` needs a number")))?;
    let mut all = vec![Value::from(items(given.need(0)?)?), Value::from(count)];
    all.extend(given.given(2).cloned());
    Ok(Generator::value(name, items(&builtin(name, &all)?)?))
}

fn reverse(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("reverse", arguments, &["_value"])?;
    let value = given.need(0)?;
    let mut all = items(value)?;
    all.reverse();
    match text_of(value) {
        Some(text) => Ok(Value::from(text.chars().rev().collect::<String>())),
        None => Ok(Generator::value("reverse", all)),
    }
}

fn pairs(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("items", arguments, &["_value"])?;
    let value = given.need(0)?;
    if value.is_undefined() {
        return Ok(Generator::value("items", Vec::new()));
    }
    if value.kind() != ValueKind::Map || super::objects::is_namespace(value) {
        return Err(refuse(format!("`items` needs a dictionary, got a value of type {}", value.kind())));
    }
    let pair = |key: &Value| Ok(Value::from(Tuple::from([key.clone(), value.get_item(key)?])));
    let pairs: Result<Vec<Value>, Error> = items(value)?.iter().map(pair).collect();
    Ok(Generator::value("items", pairs?))
}

fn groupby(arguments: &[Value]) -> Result<Value, Error> {
    let names = &["_value", "attribute", "default", "case_sensitive"];
    let given = Arguments::bind("groupby", arguments, names)?;
    let (name, with_case) = (given.need(1)?, given.flag(3, false));
    let mut all = Vec::new();
    for item in items(given.need(0)?)? {
        let of = attribute(&item, name, given.given(2))?;
        all.push((key(&of, None, with_case)?, of, item));
    }
    sort_by_order(&mut all, |(key, ..)| key)?;
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for (key, of, item) in all {
        match groups.last_mut().filter(|(last, ..)| *last == key) {
            Some((.., items)) => items.push(item),
            None => groups.push((key, of, vec![item])),
        }
    }
    Ok(groups
        .into_iter()
        .map(|(_, of, items)| Value::from_object(super::objects::Group(of, Value::from(items))))
        .collect())
}
