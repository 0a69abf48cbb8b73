//! Encoding of a rank's result as one line of text, for the launcher.
//!
//! Not JSON, which has no NaN or infinity: a run whose loss is NaN or infinite must still return a result.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Encodes as CBOR, written as two hexadecimal digits per byte.
///
/// # Errors
/// A value that cannot be encoded.
pub(crate) fn write<T: Serialize>(result: &T) -> Result<String> {
    let mut bytes = Vec::new();
    ciborium::into_writer(result, &mut bytes).map_err(unreadable)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Decodes what [`write()`] has made.
///
/// # Errors
/// Another text.
pub(crate) fn read<T: DeserializeOwned>(line: &str) -> Result<T> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let bytes: Option<Vec<u8>> = line
        .as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        })
        .collect();
    let bytes = bytes.ok_or_else(|| unreadable("it is not made of pairs of hexadecimal digits"))?;
    ciborium::from_reader(bytes.as_slice()).map_err(unreadable)
}

fn unreadable(reason: impl ToString) -> Error {
    Error::NoResult { reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use report::RunSeries;

    #[test]
    fn every_number_comes_back_to_the_bit() {
        let numbers =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.1, f32::MIN_POSITIVE / 2.0, 65504.0];
        let series = RunSeries { losses: numbers.to_vec(), seconds: f64::MAX, ..RunSeries::default() };
        let line = write(&series).unwrap();
        assert!(line.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let back: RunSeries = read(&line).unwrap();
        assert_eq!(
            back.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>(),
            numbers.map(f32::to_bits)
        );
        assert_eq!(back.seconds, f64::MAX);
        let pair = (Some("x".to_string()), u64::MAX);
        assert_eq!(read::<(Option<String>, u64)>(&write(&pair).unwrap()).unwrap(), pair);
    }

    #[test]
    fn what_is_no_result_is_an_error() {
        for line in ["", "1", "1x", "ff", "\u{e9}", "6161"] {
            let error = read::<RunSeries>(line).unwrap_err().to_string();
            assert!(error.starts_with("rank 0 ended without a result that can be read: "), "{error}");
        }
    }
}
