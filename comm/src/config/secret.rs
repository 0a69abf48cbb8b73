//! The job's shared secret.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use subtle::ConstantTimeEq;

use crate::{Error, Result};

/// More than any secret file holds.
const FILE_LIMIT: u64 = 4096;

/// The 32 bytes that every rank of a job knows and nobody else does.
///
/// Pass it on by environment or by a file of mode 0600, never on a command line, which every user of the host can read.
///
/// ```
/// use comm::Secret;
///
/// let secret = Secret::random()?;
/// assert_eq!(Secret::from_hex(&secret.to_hex())?, secret);
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new secret from the operating system's random numbers.
    ///
    /// # Errors
    /// [`Error::System`] where the system provides none.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|reason| Error::system("random numbers for a secret", reason))?;
        Ok(Self(bytes))
    }

    /// Reads 64 hexadecimal digits; blanks around them are skipped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for anything else, and for 64 zeros.
    pub fn from_hex(digits: &str) -> Result<Self> {
        Self::parse(digits, "the secret")
    }

    /// Reads a file that holds 64 hexadecimal digits and that nobody but its owner can read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where it cannot be read, others may read or write it, or it holds something else.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let refuse = |help: String| Error::invalid("the secret's file", path.display(), help);
        let unreadable = |reason| refuse(format!("give a file that can be read ({reason})"));
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(refuse("give a regular file".into()));
        }
        let file = File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            let path = path.display();
            return Err(refuse(format!("others may use it, its mode is {mode:04o}: run `chmod 600 {path}`")));
        }
        let mut text = String::new();
        file.take(FILE_LIMIT).read_to_string(&mut text).map_err(unreadable)?;
        Self::parse(&text, &format!("the secret in {}", path.display()))
    }

    /// The 64 hexadecimal digits that [`Secret::from_hex`] reads: for a worker's environment or a file of mode 0600.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns the secret as a key of HMAC-SHA256: a block of 64 bytes, padded with zeros.
    pub(crate) fn block(&self) -> [u8; 64] {
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        block
    }

    /// Parses 64 hexadecimal digits. The error never repeats the input, which may be nearly right.
    pub(crate) fn parse(digits: &str, what: &str) -> Result<Self> {
        let refuse = |got: String| {
            Error::invalid(what, got, "give 64 hexadecimal digits, as `openssl rand -hex 32` makes")
        };
        let digits = digits.trim().as_bytes();
        if digits.len() != 64 {
            return Err(refuse(format!("{} bytes of text (not shown)", digits.len())));
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |ascii: u8| char::from(ascii).to_digit(16).and_then(|value| u8::try_from(value).ok());
            match (digit(pair[0]), digit(pair[1])) {
                (Some(high), Some(low)) => *byte = high << 4 | low,
                _ => return Err(refuse("something that is not hexadecimal (not shown)".into())),
            }
        }
        if bytes == [0; 32] {
            return Err(refuse("64 zeros, which anybody would guess".into()));
        }
        Ok(Self(bytes))
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGITS: &str = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

    fn file(mode: u32, text: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn hexadecimal_digits_are_read_and_written() {
        let secret = Secret::from_hex(&format!("  {DIGITS}\n")).unwrap();
        assert_eq!(secret.to_hex(), DIGITS.to_lowercase());
        assert_eq!(secret.block()[..3], [0x00, 0x11, 0x22]);
    }

    #[test]
    fn anything_else_is_refused_without_being_repeated() {
        for wrong in
            ["", "12", &DIGITS[1..], &DIGITS.replace('5', "g"), &DIGITS.replace("55", "é"), &"0".repeat(64)]
        {
            let message = Secret::from_hex(wrong).unwrap_err().to_string();
            assert!(message.contains("64 hexadecimal digits"), "{message}");
            assert!(wrong.len() < 8 || !message.contains(wrong), "{message}");
            assert_eq!(message.lines().count(), 1);
        }
    }

    #[test]
    fn two_random_secrets_differ_and_neither_shows() {
        let (a, b) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert_ne!(a, b);
        assert_eq!(format!("{a:?}"), "Secret(..)");
    }

    #[test]
    fn a_file_must_be_its_owners_alone() {
        for mode in [0o600, 0o400] {
            assert!(Secret::from_file(file(mode, DIGITS.as_bytes()).path()).is_ok());
        }
        for mode in [0o640, 0o604, 0o644, 0o610, 0o602, 0o666, 0o777] {
            let message = Secret::from_file(file(mode, DIGITS.as_bytes()).path()).unwrap_err().to_string();
            assert!(message.contains("chmod 600") && message.contains(&format!("{mode:04o}")), "{message}");
        }
    }

    #[test]
    fn a_file_that_holds_no_secret_is_an_error() {
        for text in [&b""[..], b"\xff\xfe\x00", &[b'a'; 100_000]] {
            let message = Secret::from_file(file(0o600, text).path()).unwrap_err().to_string();
            assert!(message.contains("secret"), "{message}");
        }
        assert!(Secret::from_file("/nowhere/at/all").unwrap_err().to_string().contains("/nowhere/at/all"));
        assert!(Secret::from_file("/dev/null").unwrap_err().to_string().contains("regular file"));
    }
}
