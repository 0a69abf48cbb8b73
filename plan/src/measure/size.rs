//! Parsing and formatting of sizes in bytes.

/// Parses a size in bytes: `4096`, `4K`, `64KiB`, `1M`, `2G`; units are powers of 1024.
///
/// # Errors
/// A message that says what is accepted.
pub fn parse(text: &str) -> Result<usize, String> {
    let help =
        || "give bytes, or a number with K, M or G (powers of 1024), such as 4096, 64K or 1M".to_string();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: usize = text[..digits].parse().map_err(|_| help())?;
    let unit = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return Err(help()),
    };
    number.checked_mul(unit).filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(help)
}

/// Formats a size with the largest unit that leaves a whole number: `4 KiB`, `1000 B`.
pub fn format(bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let mut unit = 0;
    let mut number = bytes;
    while unit + 1 < units.len() && number > 0 && number.is_multiple_of(1024) {
        (number, unit) = (number / 1024, unit + 1);
    }
    format!("{number} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in
            [("4096", 4096), ("4K", 4096), ("64kib", 65536), ("1M", 1 << 20), ("2G", 2 << 30), ("0", 0)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5M", "4X", "99999999999999999999", "9999999999G", "1 M"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!([0, 1000, 4096, 64 << 20].map(format), ["0 B", "1000 B", "4 KiB", "64 MiB"]);
    }
}
