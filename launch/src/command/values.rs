//! Parsers of numbers on the command line, with what to give in place of one that cannot be used.

use std::time::Duration;

/// Parses a count of at least 1.
///
/// # Errors
/// What is accepted.
pub fn count(text: &str) -> Result<usize, &'static str> {
    text.parse().ok().filter(|count| *count > 0).ok_or("give a whole number, 1 or more")
}

/// Parses a seed.
///
/// # Errors
/// What is accepted.
pub fn seed(text: &str) -> Result<u64, &'static str> {
    text.parse().map_err(|_| "give a whole number from 0 to 18446744073709551615")
}

/// Parses a learning rate: finite, at least 0.
///
/// # Errors
/// What is accepted.
pub fn learning_rate(text: &str) -> Result<f64, &'static str> {
    let lr = text.parse().ok().filter(|lr: &f64| lr.is_finite() && *lr >= 0.0);
    lr.ok_or("give a finite number, 0 or more")
}

/// Parses a probability, such as dropout's.
///
/// # Errors
/// What is accepted.
pub fn probability(text: &str) -> Result<f64, &'static str> {
    let p = text.parse().ok().filter(|p| (0.0..=1.0).contains(p));
    p.ok_or("give a number from 0 to 1")
}

/// Parses a duration in seconds, greater than 0.
///
/// # Errors
/// What is accepted.
pub fn seconds(text: &str) -> Result<Duration, &'static str> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero()).ok_or("give a number of seconds greater than 0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_cannot_be_used_are_refused() {
        for text in ["0", "-1", "1.5", "", "x", "99999999999999999999"] {
            assert!(count(text).is_err(), "{text}");
        }
        for text in ["-1", "1.5", "", "x", "18446744073709551616"] {
            assert!(seed(text).is_err(), "{text}");
        }
        for text in ["NaN", "inf", "-1", "-1e-9", "", "x"] {
            assert!(learning_rate(text).is_err(), "{text}");
        }
        for text in ["0", "-1", "NaN", "inf", "1e300", "1e-12", "5s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!((count("7"), learning_rate("1e-3")), (Ok(7), Ok(1e-3)));
        assert_eq!((seed("0"), seed("18446744073709551615")), (Ok(0), Ok(u64::MAX)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
    }
}
