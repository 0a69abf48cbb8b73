//! Errors of one attempt to connect two ranks.

use std::fmt;
use std::io;

use rustix::io::Errno;

use crate::base::last_message::LastMessage;
use crate::connection::obstacle::Obstacle;

/// Protocol version: increases with every change of what ranks send to each other.
pub(crate) const VERSION: u16 = 6;

/// Why an attempt to connect two ranks failed. Most are tried again until the time-out, and the last one is then
/// reported.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The other side closed the connection.
    Closed,
    /// The other side sent nothing for too long.
    TimedOut,
    /// This side was told to stop waiting.
    Stopped,
    /// The operating system's reason.
    Io(io::Error),
    /// The other side does not speak our protocol.
    NotOurs,
    /// The other side speaks another version of it.
    Version(u16),
    /// The other side does not hold the job's secret.
    BadProof,
    /// The other side has checked this side's proof and rejected it.
    ProofRefused,
    /// The other side encrypts this connection (`theirs`) and this one does not, or the other way round.
    Encryption { theirs: bool },
    /// The other side holds the secret, and does not expect this rank (now).
    NotAwaited,
    /// The other side holds the secret, and dials this rank itself, or is connected to it.
    Crossed,
    /// The other side holds the secret, and has closed its group, or its group has failed; with its last words.
    Gone(LastMessage),
    /// The connection is as it should be, but memory cannot be shared over it.
    NoMemory(Obstacle),
    /// The other side holds the secret, and is another rank than the one that was dialed.
    OtherRank(u32),
    /// The other side holds the secret, and sent an invalid message.
    Malformed(String),
    /// The meeting file cannot be used (yet).
    File(String),
    /// The host of the meeting point has no address (yet).
    Resolve(String),
    /// The system provides no random numbers.
    NoRandomness,
}

/// The result of one attempt.
pub(crate) type ConnectResult<T> = std::result::Result<T, ConnectError>;

impl ConnectError {
    /// Returns whether the other side is a rank of some job that will hardly answer otherwise at another attempt.
    pub(crate) fn is_permanent(&self) -> bool {
        matches!(
            self,
            ConnectError::ProofRefused | ConnectError::Version(_) | ConnectError::Encryption { .. }
        )
    }

    /// Returns whether this process, or this machine, has no file descriptors left.
    pub(crate) fn is_out_of_files(&self) -> bool {
        let ConnectError::Io(error) = self else { return false };
        [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionReset, InvalidData, NotConnected, TimedOut,
            UnexpectedEof,
        };
        match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => {
                ConnectError::Closed
            }
            TimedOut => ConnectError::TimedOut,
            InvalidData => match error.get_ref().and_then(|error| error.downcast_ref()) {
                // A different key means another secret or another job.
                Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_)) => {
                    ConnectError::ProofRefused
                }
                _ => ConnectError::NotOurs,
            },
            _ => ConnectError::Io(error),
        }
    }
}

impl From<Errno> for ConnectError {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Closed => f.write_str("the connection was closed"),
            ConnectError::TimedOut => f.write_str("no answer came"),
            ConnectError::Stopped => f.write_str("the meeting was over"),
            ConnectError::Io(error) if self.is_out_of_files() => {
                write!(f, "{error}; raise the limit of open files (ulimit -n)")
            }
            ConnectError::Io(error) => write!(f, "{error}"),
            ConnectError::NotOurs => f.write_str("what listens there is no rank of Girandole"),
            ConnectError::Version(theirs) => write!(
                f,
                "what listens there speaks version {theirs} of the protocol, this rank version {VERSION}: run the same \
                 build everywhere"
            ),
            ConnectError::BadProof => f.write_str("what listens there could not prove that it belongs to this job"),
            ConnectError::ProofRefused => f.write_str(
                "the other side did not accept this rank's proof: the secret (GIRANDOLE_SECRET, GIRANDOLE_SECRET_FILE) \
                 or the job id (GIRANDOLE_JOB_ID) differs",
            ),
            ConnectError::Encryption { theirs } => {
                let [one, other] = if *theirs { ["the other side", "this one"] } else { ["this side", "the other one"] };
                write!(f, "{one} encrypts the connection, {other} does not: set GIRANDOLE_TLS alike on every rank")
            }
            ConnectError::NotAwaited => f.write_str("the other side does not expect this rank"),
            ConnectError::Crossed => f.write_str("the other side is about to connect to this one"),
            ConnectError::Gone(_) => f.write_str("the other side has closed its group"),
            ConnectError::NoMemory(obstacle) => write!(f, "{obstacle}"),
            ConnectError::OtherRank(rank) => write!(f, "rank {rank} answered instead"),
            ConnectError::Malformed(what) => write!(f, "the other side sent {what}"),
            ConnectError::File(reason) | ConnectError::Resolve(reason) => f.write_str(reason),
            ConnectError::NoRandomness => f.write_str("the system gave no random numbers"),
        }
    }
}
