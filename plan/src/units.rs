//! Parsing and display of quantities: `16GB`, `12.5GB/s`, `50us`, `2TFLOP/s`.

/// Splits a text into number and unit; `None` if the number is not above 0.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    (number.is_finite() && number > 0.0).then_some((number, text[end..].trim()))
}

/// Returns the factor of a unit's prefix, and the rest of the unit.
fn prefix(unit: &str) -> (f64, &str) {
    let factors = [("ki", 1024.0), ("mi", 1024f64.powi(2)), ("gi", 1024f64.powi(3)), ("ti", 1024f64.powi(4))];
    let lower = unit.to_ascii_lowercase();
    if let Some((prefix, factor)) = factors.iter().find(|(prefix, _)| lower.starts_with(prefix)) {
        return (*factor, &unit[prefix.len()..]);
    }
    let factors = [("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12)];
    match factors.iter().find(|(prefix, _)| lower.starts_with(prefix)) {
        Some((_, factor)) => (*factor, &unit[1..]),
        None => (1.0, unit),
    }
}

/// Parses a number with a prefix and one of these endings.
fn quantity(text: &str, endings: &[&str]) -> Option<f64> {
    let (number, unit) = split(text)?;
    let (factor, rest) = prefix(unit);
    endings.iter().any(|ending| rest.eq_ignore_ascii_case(ending)).then_some(number * factor)
}

/// Parses a number of bytes.
///
/// # Errors
/// Any other text; the error gives examples of valid ones.
pub fn bytes(text: &str) -> Result<f64, &'static str> {
    quantity(text, &["", "b"]).ok_or("give bytes, such as 500MB, 16GB or 80GiB")
}

/// Parses a bandwidth, in bytes per second.
///
/// # Errors
/// Any other text; the error gives examples of valid ones.
pub fn bandwidth(text: &str) -> Result<f64, &'static str> {
    let bits = || quantity(text, &["bit/s"]).map(|bits| bits / 8.0);
    quantity(text, &["", "b", "b/s"])
        .or_else(bits)
        .ok_or("give bytes or bits a second, such as 12.5GB/s or 100Gbit/s")
}

/// Parses operations per second.
///
/// # Errors
/// Any other text; the error gives examples of valid ones.
pub fn flops(text: &str) -> Result<f64, &'static str> {
    let endings = ["", "flop/s", "flops"];
    quantity(text, &endings).ok_or("give operations a second, such as 80GFLOP/s or 300TFLOP/s")
}

/// Parses a time, in seconds.
///
/// # Errors
/// Any other text; the error gives examples of valid ones.
pub fn time(text: &str) -> Result<f64, &'static str> {
    let factor = |unit: &str| {
        Some(match unit {
            "s" | "" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        })
    };
    let time = split(text).and_then(|(number, unit)| Some(number * factor(unit)?));
    time.ok_or("give a time, such as 50us or 1ms")
}

/// Formats bytes, with three digits and a prefix.
pub fn show_bytes(bytes: f64) -> String {
    show(bytes, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// Formats seconds, with three digits and a prefix.
pub(crate) fn show_time(seconds: f64) -> String {
    show(seconds * 1e9, &["ns", "us", "ms", "s"])
}

/// Formats operations per second, with three digits and a prefix.
pub fn show_flops(flops: f64) -> String {
    show(flops, &["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"])
}

fn show(mut number: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while number >= 999.5 && unit + 1 < units.len() {
        (number, unit) = (number / 1e3, unit + 1);
    }
    let digits = match number {
        // Bytes without a prefix are whole numbers.
        number if number >= 99.95 || units[unit] == "B" => 0,
        number if number >= 9.995 => 1,
        _ => 2,
    };
    format!("{number:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read() {
        assert_eq!(
            (bytes("16GB"), bytes("1.5 kB"), bytes("2GiB"), bytes("7")),
            (Ok(16e9), Ok(1500.0), Ok(2147483648.0), Ok(7.0))
        );
        assert_eq!((bandwidth("12.5GB/s"), bandwidth("100Gbit/s")), (Ok(12.5e9), Ok(12.5e9)));
        assert_eq!((flops("2TFLOP/s"), flops("80G")), (Ok(2e12), Ok(80e9)));
        assert_eq!((time("50us"), time("1ms"), time("2")), (Ok(50.0 * 1e-6), Ok(1e-3), Ok(2.0)));
        for text in ["", "x", "-1GB", "0", "1XB", "1GB/h", "nan", "inf", "1.2.3"] {
            assert!(bytes(text).is_err() && bandwidth(text).is_err() && flops(text).is_err(), "{text}");
        }
        assert!(time("5 h").is_err());
    }

    #[test]
    fn quantities_are_shown_with_three_digits() {
        assert_eq!(
            [0.0, 999.0, 1e3, 12_345.0, 123_456.0, 999_900.0].map(show_bytes),
            ["0 B", "999 B", "1.00 kB", "12.3 kB", "123 kB", "1.00 MB"]
        );
        assert_eq!([0.0000015, 0.25, 90.0].map(show_time), ["1.50 us", "250 ms", "90.0 s"]);
    }
}
