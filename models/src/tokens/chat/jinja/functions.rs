//! Functions of chat templates: those of transformers, and Python's `range` and `dict`.

use std::sync::Arc;

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use jiff::tz::TimeZone;
use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

use super::arguments::Arguments;
use super::objects::Range;
use super::refuse;

/// As Jinja2's sandbox limits ranges.
const LONGEST_RANGE: i64 = 100_000;

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.remove_global("debug");
    environment
        .add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(refuse(message)) });
    environment.add_function("strftime_now", |format: String| {
        strftime(&format, Timestamp::now()).map_err(|error| refuse(error.to_string()))
    });
    environment.add_function("range", |arguments: Rest<ValueOrKwargs>| range(&arguments.into_values()));
    environment.add_global("dict", Value::from_object(Dict));
}

fn range(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("range", arguments, &["_start", "_stop", "_step"])?;
    given.need(0)?;
    let number = |place: usize, default: i64| Ok::<_, Error>(given.number(place)?.unwrap_or(default));
    let (start, stop) = match given.get(1) {
        None => (0, number(0, 0)?),
        Some(_) => (number(0, 0)?, number(1, 0)?),
    };
    let step = number(2, 1)?;
    let too_long = start.abs_diff(stop) / step.unsigned_abs().max(1) > LONGEST_RANGE as u64;
    if step == 0 || too_long {
        return Err(refuse(format!("`range` has at most {LONGEST_RANGE} numbers, and a step that is not 0")));
    }
    Ok(Value::from_object(Range { start, stop, step }))
}

/// `dict`.
#[derive(Debug)]
struct Dict;

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        let (positional, named) = match arguments.split_last() {
            Some((last, before)) if last.is_kwargs() => (before, Some(Kwargs::try_from(last.clone())?)),
            _ => (arguments, None),
        };
        let pairs = match positional {
            [] => Vec::new(),
            [one] => pairs(one)?,
            _ => return Err(refuse("`dict` takes one dictionary or list of pairs")),
        };
        let named =
            named.iter().flat_map(|named| named.args().map(|name| Ok((Value::from(name), named.get(name)?))));
        let named: Vec<(Value, Value)> = named.collect::<Result<_, Error>>()?;
        Ok(Value::from_pairs(pairs.into_iter().chain(named)))
    }
}

fn pairs(of: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let pair = |item: Result<Value, Error>| {
        let item = item?;
        if of.kind() == ValueKind::Map {
            let value = of.get_item(&item)?;
            return Ok((item, value));
        }
        match &item.try_iter()?.collect::<Vec<_>>()[..] {
            [key, value] => Ok((key.clone(), value.clone())),
            _ => Err(refuse("`dict` takes one dictionary or list of pairs")),
        }
    };
    of.try_iter()?.checked().map(pair).collect()
}

pub(super) fn is_dict(value: &Value) -> bool {
    value.downcast_object_ref::<Dict>().is_some()
}

/// `dict.fromkeys`.
pub(super) fn from_keys(arguments: &[Value]) -> Result<Value, Error> {
    let given = Arguments::bind("fromkeys", arguments, &["_keys", "_value"])?;
    let value = given.get(1).cloned().unwrap_or(Value::from(()));
    let pair = |key: Result<Value, Error>| Ok((key?, value.clone()));
    let pairs = given.need(0)?.try_iter()?.checked().map(pair).collect::<Result<Vec<_>, Error>>()?;
    Ok(Value::from_pairs(pairs))
}

/// Formats a time in UTC; conversions that do not exist are left unchanged.
fn strftime(format: &str, time: Timestamp) -> Result<String, jiff::Error> {
    let time = BrokenDownTime::from(&time.to_zoned(TimeZone::UTC));
    time.to_string_with_config(&Config::new().lenient(true), format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_pythons() {
        // `datetime.fromtimestamp(t, timezone.utc).strftime("%A %d %B %Y, %a %b %m %y, %H:%M:%S %% %J")`
        for (seconds, expected) in [
            (0, "Thursday 01 January 1970, Thu Jan 01 70, 00:00:00 % %J"),
            (951_782_399, "Monday 28 February 2000, Mon Feb 02 00, 23:59:59 % %J"),
            (951_782_400, "Tuesday 29 February 2000, Tue Feb 02 00, 00:00:00 % %J"),
            (1_795_392_000, "Monday 23 November 2026, Mon Nov 11 26, 00:00:00 % %J"),
        ] {
            let time = Timestamp::from_second(seconds).unwrap();
            assert_eq!(strftime("%A %d %B %Y, %a %b %m %y, %H:%M:%S %% %J", time).unwrap(), expected);
        }
        assert_eq!(strftime("%", Timestamp::UNIX_EPOCH).unwrap(), "%");
    }
}
