//! Current date and time for reports.

use jiff::Timestamp;

/// Returns the current time in UTC in the format of RFC 3339: `2025-01-31T08:05:00Z`.
pub fn now_rfc3339() -> String {
    rfc3339(Timestamp::now())
}

fn rfc3339(time: Timestamp) -> String {
    time.strftime("%FT%TZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_whole() {
        let time = Timestamp::new(951_868_799, 999_999_999).unwrap();
        assert_eq!(rfc3339(time), "2000-02-29T23:59:59Z");
        assert!(now_rfc3339().starts_with("20"));
    }
}
