//! Transport for data between two ranks: shared memory or TCP.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// What carries the data between two ranks. Rendezvous and control connections always use TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory between ranks of one host, TCP between all others. Two ranks are on one host where they run under
    /// the same kernel (by its boot id, not by a name), and memory that one hands over arrives at the other: containers
    /// with networks or users of their own use TCP, whatever their host names.
    #[default]
    Auto,
    /// TCP between all ranks.
    Tcp,
    /// Shared memory between all ranks. Where that is impossible, an error names the reason.
    Shm,
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "shm" => Ok(Self::Shm),
            _ => Err(Error::invalid("the transport", text, "give auto, tcp or shm")),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for transport in [Transport::Auto, Transport::Tcp, Transport::Shm] {
            assert_eq!(transport.to_string().parse::<Transport>().unwrap(), transport);
        }
        let message = "rdma".parse::<Transport>().unwrap_err().to_string();
        assert_eq!(message, "the transport: got rdma; give auto, tcp or shm");
    }
}
