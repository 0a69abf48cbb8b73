//! The value of `--tee`: which output streams are shown.

use std::str::FromStr;

/// A value of `--tee`, with `torchrun`'s numbers: 1 standard output, 2 standard error, 3 both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tee {
    pub(super) stdout: bool,
    pub(super) stderr: bool,
}

impl FromStr for Tee {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let streams = |stdout, stderr| Ok(Self { stdout, stderr });
        match text {
            "0" => streams(false, false),
            "1" => streams(true, false),
            "2" => streams(false, true),
            "3" => streams(true, true),
            _ => Err("give 1 (standard output), 2 (standard error), 3 (both, as without a number) or 0; \
                      and -- before PROGRAM"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_numbers_and_nothing_else() {
        assert_eq!("1".parse(), Ok(Tee { stdout: true, stderr: false }));
        assert_eq!("2".parse(), Ok(Tee { stdout: false, stderr: true }));
        assert_eq!("3".parse(), Ok(Tee { stdout: true, stderr: true }));
        for wrong in ["", "4", "-1", "python", "0:1"] {
            assert!(wrong.parse::<Tee>().is_err(), "{wrong}");
        }
    }
}
