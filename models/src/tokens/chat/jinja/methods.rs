//! Methods of Python's lists, tuples, dictionaries and numbers; those of strings are in `strings`.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::Arguments;
use super::objects::{View, is_namespace};
use super::python::text_of;
use super::{functions, refuse, strings};

/// All methods of dictionaries, also those that change one, which chat templates must not call.
pub(super) const OF_DICTIONARIES: &[&str] = &[
    "clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
];

/// Calls a method of a value.
///
/// # Errors
/// A method that the value does not have or that is not supported; the method's own errors.
pub(super) fn call(_: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(text) = text_of(value) {
        return strings::call(text, method, arguments);
    }
    match value.kind() {
        ValueKind::Map if !is_namespace(value) => of_dictionary(value, method, arguments),
        ValueKind::Seq => of_list(value, method, arguments),
        ValueKind::Number => of_number(value, method, arguments),
        _ if functions::is_dict(value) && method == "fromkeys" => functions::from_keys(arguments),
        _ => unknown(value, method),
    }
}

fn unknown(value: &Value, method: &str) -> Result<Value, Error> {
    let problem = format!("a value of type {} has no method `{method}` here", value.kind());
    Err(Error::new(ErrorKind::UnknownMethod, problem))
}

fn of_dictionary(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let keys = || value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>();
    let view = |kind: &'static str, items: Result<Vec<Value>, Error>| {
        Arguments::bind(kind, arguments, &[])?;
        Ok(Value::from_object(View { kind, items: items? }))
    };
    match method {
        "keys" => view("keys", keys()),
        "values" => view("values", keys()?.iter().map(|key| value.get_item(key)).collect()),
        "items" => {
            let pair = |key: &Value| Ok(Value::from(Tuple::from([key.clone(), value.get_item(key)?])));
            view("items", keys()?.iter().map(pair).collect())
        }
        "get" => {
            let given = Arguments::bind("get", arguments, &["_key", "_default"])?;
            let found = value.get_item(given.need(0)?)?;
            let default = || given.get(1).cloned().unwrap_or(Value::from(()));
            Ok(if found.is_undefined() { default() } else { found })
        }
        "copy" => {
            Arguments::bind("copy", arguments, &[])?;
            let pairs = keys()?.into_iter().map(|key| {
                let item = value.get_item(&key);
                item.map(|item| (key, item))
            });
            Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, _>>()?))
        }
        "fromkeys" => functions::from_keys(arguments),
        "clear" | "pop" | "popitem" | "setdefault" | "update" => {
            Err(refuse(format!("`{method}` would change a dictionary, which chat templates must not")))
        }
        _ => unknown(value, method),
    }
}

fn of_list(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let items = || value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>();
    match method {
        "count" => {
            let given = Arguments::bind("count", arguments, &["_value"])?;
            let wanted = given.need(0)?;
            Ok(Value::from(items()?.iter().filter(|item| *item == wanted).count()))
        }
        "index" => {
            let given = Arguments::bind("index", arguments, &["_value", "_start", "_stop"])?;
            let (items, wanted) = (items()?, given.need(0)?);
            let bound = |bound: Option<i64>, default: usize| match bound {
                None => default,
                Some(place) if place < 0 => items.len().saturating_sub(place.unsigned_abs() as usize),
                Some(place) => place as usize,
            };
            let (from, to) = (bound(given.number(1)?, 0), bound(given.number(2)?, items.len()));
            let place = (from..to.min(items.len())).find(|place| items[*place] == *wanted);
            place.map(Value::from).ok_or_else(|| refuse("`index`: the value is not in the list"))
        }
        "copy" if !value.is_tuple() => {
            Arguments::bind("copy", arguments, &[])?;
            Ok(Value::from(items()?))
        }
        "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort"
            if !value.is_tuple() =>
        {
            Err(refuse(format!(
                "`{method}` would change a list, which chat templates must not; add lists with `+`"
            )))
        }
        _ => unknown(value, method),
    }
}

fn of_number(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "is_integer" => {
            Arguments::bind("is_integer", arguments, &[])?;
            let is_whole = |number: f64| number.is_finite() && number.fract() == 0.0;
            Ok(Value::from(value.is_integer() || f64::try_from(value.clone()).is_ok_and(is_whole)))
        }
        _ => unknown(value, method),
    }
}
