//! What carries the data between two ranks.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// What carries the data between two ranks. Meeting, and watching over each other, they always do over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory between ranks of one host, TCP between all others. Two ranks are of one host where the kernel is the
    /// same one (by its boot id, not by a name), and where memory that one hands over arrives at the other: containers with
    /// networks or users of their own talk over TCP, whatever their hosts are called.
    #[default]
    Auto,
    /// TCP between all ranks.
    Tcp,
    /// Shared memory between all ranks: an error that says why where that cannot be.
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
