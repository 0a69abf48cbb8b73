//! Init methods: where the ranks of a job meet.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::config::address::{HostPort, is_host, parse_port};
use crate::{Error, Result};

/// Where the ranks of a job find each other. Reads and prints as a URL.
///
/// ```
/// use comm::InitMethod;
///
/// let method: InitMethod = "tcp://[::1]:29500".parse()?;
/// assert_eq!(method, InitMethod::Tcp { host: "::1".into(), port: 29500 });
/// assert_eq!(method.to_string(), "tcp://[::1]:29500");
/// assert_eq!("env://".parse::<InitMethod>()?, InitMethod::Env);
/// assert!("file://relative".parse::<InitMethod>().is_err());
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum InitMethod {
    /// `env://`: at `MASTER_ADDR`, port `MASTER_PORT`.
    #[default]
    Env,
    /// `tcp://host:port`: rank 0 listens there, and nowhere else.
    Tcp {
        /// A name or an address of the host of rank 0.
        host: String,
        /// From 1.
        port: u16,
    },
    /// `file:///path`: rank 0 listens on a free port of [`TcpConfig::bind`](crate::TcpConfig::bind) and writes it into
    /// this file, which all ranks can read. The file need not exist; what an earlier run left there does no harm.
    File(PathBuf),
}

impl FromStr for InitMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |help: &str| Err(Error::invalid("the init method", text, help));
        if text == "env://" {
            return Ok(Self::Env);
        }
        if let Some(path) = text.strip_prefix("file://") {
            return match path.starts_with('/') && !path.ends_with('/') && !path.contains('\0') {
                true => Ok(Self::File(path.into())),
                false => refuse("give the file's absolute path, as in file:///home/me/meeting"),
            };
        }
        let Some(address) = text.strip_prefix("tcp://") else {
            return refuse("give env://, tcp://HOST:PORT or file:///PATH");
        };
        let Some((host, port)) = address.rsplit_once(':') else {
            return refuse("the port is missing: give tcp://HOST:PORT");
        };
        let Some(port) = parse_port(port) else {
            return refuse("the port must be a number from 1 to 65535");
        };
        let host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(inside) => inside,
            None if host.contains(':') => {
                return refuse("put an IPv6 address in brackets, as in tcp://[::1]:29500");
            }
            None => host,
        };
        match is_host(host) {
            true => Ok(Self::Tcp { host: host.into(), port }),
            false => refuse("the host must be a name or an address, as in tcp://node0:29500"),
        }
    }
}

impl fmt::Display for InitMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env => f.write_str("env://"),
            Self::Tcp { host, port } => write!(f, "tcp://{}", HostPort(host, *port)),
            Self::File(path) => write!(f, "file://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_three_forms_are_read_and_printed() {
        for text in [
            "env://", "tcp://localhost:29500", "tcp://10.0.0.1:1", "tcp://[::1]:65535", "file:///tmp/meet me",
        ] {
            assert_eq!(text.parse::<InitMethod>().unwrap().to_string(), text);
        }
        assert_eq!("file:///a/b".parse::<InitMethod>().unwrap(), InitMethod::File("/a/b".into()));
    }

    #[test]
    fn anything_else_is_one_line_that_repeats_it() {
        let wrong = "|env:/|env|tcp://|tcp://host|tcp://host:|tcp://host:0|tcp://host:65536|tcp://host:+1|tcp://:80|\
                     tcp://::1:80|tcp://[]:80|tcp://a b:80|tcp://a/b:80|tcp://host:80/|file://|file://x|file:///x/|\
                     http://x:80|TCP://host:80";
        for text in wrong.split('|') {
            let message = text.parse::<InitMethod>().unwrap_err().to_string();
            assert!(message.contains(text) && message.lines().count() == 1, "{message}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_is_read_prints_the_same(text in "(tcp://|file:///|env://)?\\PC{0,20}(:[0-9]{0,6})?") {
            if let Ok(method) = text.parse::<InitMethod>() {
                prop_assert_eq!(method.to_string().parse::<InitMethod>().unwrap(), method);
            }
        }
    }
}
