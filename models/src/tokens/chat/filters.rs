//! Functions and filters that transformers adds to Jinja for chat templates.

use std::io::{Result, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        strftime(&format, now.as_secs())
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

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats a Unix time in UTC, with the conversions that templates use; others are left unchanged.
fn strftime(format: &str, seconds: u64) -> String {
    let days = seconds / 86_400;
    let (year, month, day) = date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{:02}", seconds / 3600 % 24)),
            Some('M') => out.push_str(&format!("{:02}", seconds / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", seconds % 60)),
            Some('%') => out.push('%'),
            other => {
                out.push('%');
                out.extend(other);
            }
        }
    }
    out
}

/// Returns year, month and day of a number of days since 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_pythons() {
        // `datetime.fromtimestamp(t, timezone.utc).strftime("%A %d %B %Y, %a %b %m %y, %H:%M:%S %% %q")`
        for (seconds, expected) in [
            (0, "Thursday 01 January 1970, Thu Jan 01 70, 00:00:00 % %q"),
            (951_782_399, "Monday 28 February 2000, Mon Feb 02 00, 23:59:59 % %q"),
            (951_782_400, "Tuesday 29 February 2000, Tue Feb 02 00, 00:00:00 % %q"),
            (1_795_392_000, "Monday 23 November 2026, Mon Nov 11 26, 00:00:00 % %q"),
        ] {
            assert_eq!(strftime("%A %d %B %Y, %a %b %m %y, %H:%M:%S %% %q", seconds), expected);
        }
        assert_eq!(strftime("%", 0), "%");
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
