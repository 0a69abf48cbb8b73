//! Formats numbers for people.

/// Formats a number with at most `digits` digits after the point, and no zeros at the end: `2`, `0.25`.
pub(super) fn trimmed(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".to_string() } else { text.to_string() }
}

/// Formats a number with about `digits` significant digits: `0.00123`, `4.67`, `1234`, `1.2e-9`.
pub(super) fn significant(value: f64, digits: usize) -> String {
    if value == 0. || !value.is_finite() {
        return value.to_string();
    }
    let exponent = value.abs().log10().floor() as i32;
    if !(-4..6).contains(&exponent) {
        let text = format!("{value:.*e}", digits.saturating_sub(1));
        let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
        let mantissa = if mantissa.contains('.') {
            mantissa.trim_end_matches('0').trim_end_matches('.')
        } else {
            mantissa
        };
        return format!("{mantissa}e{power}");
    }
    trimmed(value, (digits as i32 - 1 - exponent).max(0) as usize)
}

/// A unit that suits the largest of some values, and its size, by which values are divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Unit {
    pub(super) name: &'static str,
    pub(super) size: f64,
}

impl Unit {
    pub(super) fn of_seconds(largest: f64) -> Self {
        pick(largest, &[("s", 1.), ("ms", 1e-3), ("µs", 1e-6)])
    }

    pub(super) fn of_bytes(largest: f64) -> Self {
        pick(largest, &[("GiB", (1u64 << 30) as f64), ("MiB", (1u64 << 20) as f64), ("KiB", 1024.)])
    }
}

/// Returns the first unit, from large to small, that the value reaches; otherwise the smallest.
fn pick(largest: f64, units: &[(&'static str, f64)]) -> Unit {
    let fits = units.iter().find(|(_, size)| largest >= *size).or(units.last());
    fits.map_or(Unit { name: "", size: 1. }, |&(name, size)| Unit { name, size })
}

/// Formats a time: `1.25 s`, `31.4 µs`.
pub(super) fn seconds(value: f64) -> String {
    let unit = Unit::of_seconds(value);
    format!("{} {}", significant(value / unit.size, 3), unit.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for ((value, digits), text) in
            [((0., 2), "0"), ((2., 2), "2"), ((0.25, 3), "0.25"), ((-0.001, 2), "0"), ((120., 0), "120")]
        {
            assert_eq!(trimmed(value, digits), text);
        }
        for (value, text) in [
            (0.001_234_5, "0.00123"),
            (4.666, "4.67"),
            (1234.6, "1235"),
            (100., "100"),
            (1.234e-9, "1.23e-9"),
            (1e12, "1e12"),
            (-2.5, "-2.5"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(significant(value, 3), text);
        }
        for (value, text) in [(1.25, "1.25 s"), (0.0314, "31.4 ms"), (3e-5, "30 µs"), (0., "0 µs")] {
            assert_eq!(seconds(value), text);
        }
        assert_eq!((Unit::of_bytes(3e9).name, Unit::of_bytes(5.).name), ("GiB", "KiB"));
    }
}
