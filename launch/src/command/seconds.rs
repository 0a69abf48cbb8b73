//! Durations on the command line.

use std::time::Duration;

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
    fn what_is_no_duration_is_refused() {
        for text in ["0", "-1", "NaN", "inf", "1e300", "1e-12", "5s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
    }
}
