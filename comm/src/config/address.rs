//! Host names and ports in text form: formatting and checks.

use std::fmt;
use std::net::Ipv6Addr;

/// Prints as `host:port`, with brackets where the host is an IPv6 address.
pub(crate) struct HostPort<'a>(pub(crate) &'a str, pub(crate) u16);

impl fmt::Display for HostPort<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.contains(':') {
            true => write!(f, "[{}]:{}", self.0, self.1),
            false => write!(f, "{}:{}", self.0, self.1),
        }
    }
}

/// Parses a port from 1 to 65535. Accepts digits only, where `u16::from_str` would accept a sign as well.
pub(crate) fn parse_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&port| digits && port != 0)
}

/// Removes the brackets around an IPv6 address, as in a URL.
pub fn without_brackets(host: &str) -> &str {
    let inside = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inside.filter(|inside| inside.parse::<Ipv6Addr>().is_ok()).unwrap_or(host)
}

pub(crate) fn is_host(text: &str) -> bool {
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
    !text.is_empty() && text.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_are_those_of_an_ipv6_address() {
        assert_eq!(without_brackets("[::1]"), "::1");
        assert_eq!(without_brackets("[fd00::1]"), "fd00::1");
        for other in ["::1", "[127.0.0.1]", "[node]", "[::1", "::1]", "[]", "node"] {
            assert_eq!(without_brackets(other), other);
        }
    }
}
