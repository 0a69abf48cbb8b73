//! Which connections are encrypted.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// Which TCP connections are encrypted. Shared memory never is: only the two ranks can see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tls {
    /// None. Anybody who can listen to the network sees the model.
    #[default]
    Off,
    /// Connections between hosts; those within one (on loopback, or from an address to itself) are not.
    Hosts,
    /// All.
    All,
}

impl Tls {
    /// Returns whether a connection is to be encrypted; `is_local` where both of its ends are on one host.
    pub(crate) fn covers(self, is_local: bool) -> bool {
        match self {
            Self::Off => false,
            Self::Hosts => !is_local,
            Self::All => true,
        }
    }
}

impl FromStr for Tls {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "off" => Ok(Self::Off),
            "hosts" => Ok(Self::Hosts),
            "all" => Ok(Self::All),
            _ => Err(Error::invalid("TLS", text, "give off, hosts or all")),
        }
    }
}

impl fmt::Display for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Hosts => "hosts",
            Self::All => "all",
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for tls in [Tls::Off, Tls::Hosts, Tls::All] {
            assert_eq!(tls.to_string().parse::<Tls>().unwrap(), tls);
        }
        assert_eq!("on".parse::<Tls>().unwrap_err().to_string(), "TLS: got on; give off, hosts or all");
        assert!(Tls::Hosts.covers(false) && !Tls::Hosts.covers(true) && Tls::All.covers(true));
    }
}
