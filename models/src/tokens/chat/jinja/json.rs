//! `tojson`: Python's `json.dumps`, by default without escapes of non-ASCII characters.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, Value};

use super::arguments::Arguments;
use super::objects::{Generator, Range, View, is_namespace};
use super::python::{self, DEEPEST, text_of};
use super::{predicates, refuse};

struct Style {
    ascii: bool,
    indent: Option<String>,
    sorted: bool,
    /// Between items, and between key and value.
    separators: (String, String),
}

pub(super) fn tojson(arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let names = &["_value", "ensure_ascii", "indent", "separators", "sort_keys"];
    let given = Arguments::bind("tojson", &arguments, names)?;
    let indent = match given.given(2).map(text_of) {
        Some(Some(indent)) => Some(indent.to_string()),
        _ => given.number(2)?.map(|indent| " ".repeat(indent.clamp(0, 64) as usize)),
    };
    let default = if indent.is_some() { "," } else { ", " };
    let separators = match given.given(3) {
        None => (default.to_string(), ": ".to_string()),
        Some(pair) => match &pair.try_iter()?.collect::<Vec<_>>()[..] {
            [items, keys] if text_of(items).is_some() && text_of(keys).is_some() => {
                (python::str(items)?, python::str(keys)?)
            }
            _ => return Err(refuse("`tojson` needs two strings as `separators`")),
        },
    };
    let style = Style { ascii: given.flag(1, false), indent, sorted: given.flag(4, false), separators };
    let mut out = String::new();
    style.write(given.need(0)?, 0, &mut out)?;
    Ok(Value::from(out))
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(refuse("a value is nested too deep for `tojson`"));
        }
        if let Some(text) = text_of(value) {
            self.quote(text, out);
            return Ok(());
        }
        let is_lazy = value.downcast_object_ref::<Generator>().is_some()
            || value.downcast_object_ref::<View>().is_some()
            || value.downcast_object_ref::<Range>().is_some()
            || is_namespace(value);
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool | ValueKind::Number => out.push_str(&scalar(value)?),
            ValueKind::Seq | ValueKind::Iterable if !is_lazy => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.all('[', ']', items.iter(), depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::Map if !is_lazy => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                if self.sorted {
                    predicates::sort_by_order(&mut keys, |key| key)?;
                }
                self.all('{', '}', keys.iter(), depth, out, |key, out| {
                    match text_of(key) {
                        Some(text) => self.quote(text, out),
                        None => self.quote(&scalar(key)?, out),
                    }
                    out.push_str(&self.separators.1);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => return Err(refuse(format!("`tojson` cannot write a value of type {kind}"))),
        }
        Ok(())
    }

    fn all<'a>(
        &self,
        begin: char,
        end: char,
        items: impl ExactSizeIterator<Item = &'a Value>,
        depth: usize,
        out: &mut String,
        write: impl Fn(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        let is_empty = items.len() == 0;
        out.push(begin);
        for (place, item) in items.enumerate() {
            if place > 0 {
                out.push_str(&self.separators.0);
            }
            line(out, depth + 1);
            write(item, out)?;
        }
        if !is_empty {
            line(out, depth);
        }
        out.push(end);
        Ok(())
    }

    fn quote(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                '\0'..='\x1f' => out.push_str(&format!("\\u{:04x}", character as u32)),
                _ if self.ascii && !matches!(character, ' '..='~') => {
                    let units = character.encode_utf16(&mut [0; 2]).to_vec();
                    units.iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

/// Returns the JSON of null, a number, true or false, as a value or a key.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            Ok(match number.is_finite() {
                true => python::float(number),
                false if number.is_nan() => "NaN".into(),
                false => format!("{}Infinity", if number < 0.0 { "-" } else { "" }),
            })
        }
        kind => Err(refuse(format!("`tojson`: a value of type {kind} is no key"))),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn json_is_pythons() {
        let environment = super::super::environment().unwrap();
        let value: minijinja::Value =
            serde_json::from_str(r#"{"b": [1, 2.5, "é<'"], "a": {}, "c": null}"#).unwrap();
        let render = |expression: &str| {
            environment.render_str(expression, minijinja::context! { value => value.clone() }).unwrap()
        };
        assert_eq!(render("{{ value | tojson }}"), r#"{"b": [1, 2.5, "é<'"], "a": {}, "c": null}"#);
        assert_eq!(
            render("{{ value | tojson(sort_keys=true, ensure_ascii=true) }}"),
            r#"{"a": {}, "b": [1, 2.5, "\u00e9<'"], "c": null}"#
        );
        let lines = "{\n    \"b\": [\n        1,\n        2.5,\n        \"é<'\"\n    ],\n    \"a\": {},\n    \"c\": null\n}";
        assert_eq!(render("{{ value | tojson(indent=4) }}"), lines);
        assert_eq!(
            render("{{ [[], [{}, [1]]] | tojson(indent=1) }}"),
            "[\n [],\n [\n  {},\n  [\n   1\n  ]\n ]\n]"
        );
        let floats = "[1e-05, 1.5e-07, 0.0001, -0.0, 2.0, 1e+16, 1.5e+300, 123456789012345.6]";
        let value: minijinja::Value = serde_json::from_str(floats).unwrap();
        let text = environment.render_str("{{ value | tojson }}", minijinja::context! { value }).unwrap();
        assert_eq!(text, floats);
    }
}
