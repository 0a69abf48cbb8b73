//! TFRecord format: framing of records in a file.

/// Encodes a record with these bytes as its data.
pub(super) fn of(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(bytes.len() + 16);
    record.extend(length);
    record.extend(masked(&length).to_le_bytes());
    record.extend(bytes);
    record.extend(masked(bytes).to_le_bytes());
    record
}

/// Returns the masked CRC-32C: rotated and offset, since a plain CRC of data that contains CRCs is unreliable.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checksum is the one that RFC 3720 gives for 32 zeros, masked.
    #[test]
    fn a_record_is_length_bytes_and_checksums() {
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked(&[0; 32]), 0x0fd7_fffa);
        let record = of(b"abc");
        assert_eq!(
            (&record[..8], &record[12..15], record.len()),
            (&[3, 0, 0, 0, 0, 0, 0, 0][..], &b"abc"[..], 19)
        );
    }
}
