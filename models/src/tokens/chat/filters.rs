//! Functions and filters that transformers adds to Jinja for chat templates.

use std::io::{Result, Write};

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use jiff::tz::TimeZone;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        strftime(&format, Timestamp::now())
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
    });
    environment.add_filter("tojson", tojson);
}

/// Like Python's `json.dumps`; by default without escapes of non-ASCII characters.
fn tojson(value: Value, options: Kwargs) -> std::result::Result<String, Error> {
    let refuse = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let (indent, ascii): (Option<usize>, Option<bool>) =
        (options.get("indent")?, options.get("ensure_ascii")?);
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut json = Serializer::with_formatter(Vec::new(), Python::new(indent));
    match sorted.unwrap_or(false) {
        false => value.serialize(&mut json),
        true => serde_json::to_value(&value).and_then(|sorted| sorted.serialize(&mut json)),
    }
    .map_err(refuse)?;
    let text = String::from_utf8_lossy(&json.into_inner()).into_owned();
    Ok(if ascii.unwrap_or(false) { escaped(&text) } else { text })
}

/// JSON formatter like Python's: with spaces after commas and colons, or indented, and with Python's form of floats.
struct Python {
    indent: Option<String>,
    depth: usize,
    /// Whether nothing was written yet into the list or object.
    is_empty: bool,
}

impl Python {
    fn new(indent: Option<usize>) -> Self {
        Self { indent: indent.map(|indent| " ".repeat(indent.min(64))), depth: 0, is_empty: true }
    }

    fn begin<W: Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> Result<()> {
        (self.depth, self.is_empty) = (self.depth + 1, true);
        to.write_all(bracket)
    }

    fn end<W: Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> Result<()> {
        self.depth -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.line(to)?;
        }
        to.write_all(bracket)
    }

    fn separate<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> Result<()> {
        self.is_empty = false;
        match (first, &self.indent) {
            (true, _) => {}
            (false, None) => to.write_all(b", ")?,
            (false, Some(_)) => to.write_all(b",")?,
        }
        self.line(to)
    }

    fn line<W: Write + ?Sized>(&self, to: &mut W) -> Result<()> {
        match &self.indent {
            Some(indent) => write!(to, "\n{}", indent.repeat(self.depth)),
            None => Ok(()),
        }
    }
}

impl Formatter for Python {
    fn write_f64<W: Write + ?Sized>(&mut self, to: &mut W, value: f64) -> Result<()> {
        let text = format!("{value:e}");
        let parts =
            text.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?)));
        match parts.filter(|(_, power)| !(-4..16).contains(power)) {
            Some((digits, power)) => write!(to, "{digits}e{power:+03}"),
            None => write!(to, "{value:?}"),
        }
    }

    fn begin_array<W: Write + ?Sized>(&mut self, to: &mut W) -> Result<()> {
        self.begin(to, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, to: &mut W) -> Result<()> {
        self.end(to, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> Result<()> {
        self.separate(to, first)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, to: &mut W) -> Result<()> {
        self.begin(to, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, to: &mut W) -> Result<()> {
        self.end(to, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> Result<()> {
        self.separate(to, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> Result<()> {
        to.write_all(b": ")
    }
}

/// Escapes non-ASCII characters.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_ascii() {
            true => out.push(character),
            false => character
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    out
}

/// Formats a time in UTC; conversions that do not exist are left unchanged.
fn strftime(format: &str, time: Timestamp) -> std::result::Result<String, jiff::Error> {
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

    #[test]
    fn json_is_pythons() {
        let mut environment = Environment::new();
        add(&mut environment);
        let value: Value = serde_json::from_str(r#"{"b": [1, 2.5, "é<'"], "a": {}, "c": null}"#).unwrap();
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
        let value: Value = serde_json::from_str(floats).unwrap();
        let text = environment.render_str("{{ value | tojson }}", minijinja::context! { value }).unwrap();
        assert_eq!(text, floats);
    }
}
