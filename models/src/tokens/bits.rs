//! Bit mask of the tokens that count for the loss: that of token t is bit t % 8 of byte t / 8.

/// Packs bits into bytes, to be written to a file.
#[derive(Debug, Default)]
pub(super) struct Bits {
    /// Bits that do not fill a byte yet.
    last: u8,
    filled: u32,
    bytes: Vec<u8>,
}

impl Bits {
    pub(super) fn push(&mut self, bit: bool) {
        self.last |= u8::from(bit) << self.filled;
        self.filled += 1;
        if self.filled == 8 {
            self.fill();
        }
    }

    /// Returns the complete bytes since the last call.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Completes the last byte, with zeros.
    pub(super) fn fill(&mut self) {
        if self.filled > 0 {
            self.bytes.push(self.last);
            (self.last, self.filled) = (0, 0);
        }
    }
}

/// Returns the number of bytes of so many bits.
pub(super) fn bytes(bits: u64) -> u64 {
    bits.div_ceil(8)
}

/// Returns the bit of a token, from bytes of which the first holds the bit of the token `first`.
pub(super) fn get(bytes: &[u8], first: u64, token: u64) -> bool {
    let byte = bytes.get((token / 8 - first / 8) as usize).copied().unwrap_or_default();
    byte >> (token % 8) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_come_back() {
        let all: Vec<bool> = (0..21).map(|i: u32| i.is_multiple_of(3) || i == 7).collect();
        let (mut bits, mut bytes) = (Bits::default(), Vec::new());
        for &bit in &all {
            bits.push(bit);
            bytes.extend(bits.take());
        }
        bits.fill();
        bytes.extend(bits.take());
        assert_eq!(bytes.len() as u64, super::bytes(21));
        for first in [0, 5, 13] {
            let part = &bytes[first / 8..];
            assert!((first..21).all(|t| get(part, first as u64, t as u64) == all[t]), "{first}");
        }
        assert!(!get(&bytes, 0, 100));
    }
}
