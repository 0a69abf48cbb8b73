//! The listening side of a handshake, as far as the other one has come with its proof.

use std::io;
use std::time::Instant;

use rustix::event::PollFlags;

use super::{Wire, must_wait, shake, unusable};
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Admission, Credentials, Opening, Server};
use crate::rendezvous::connection::stream::Stream;
use crate::rendezvous::connection::tls::{HELLO, Session};

/// How far a client has come.
#[derive(Debug)]
pub(super) enum Proof {
    /// It has said nothing yet.
    Awaited,
    Encrypting(Box<Session>),
    Opening(Part<42>),
    /// Both have sent their openings.
    Claim {
        client: Opening,
        server: Opening,
        claim: Part<41>,
    },
}

/// The first bytes of a message of `N`.
#[derive(Debug)]
pub(super) struct Part<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Part<N> {
    fn new() -> Self {
        Self { bytes: [0; N], filled: 0 }
    }

    /// All of it, as soon as that has come.
    fn whole(&mut self, stream: &Stream) -> io::Result<Option<[u8; N]>> {
        while self.filled < N {
            match stream.recv(&mut self.bytes[self.filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(self.bytes))
    }
}

/// What came of one step of a proof.
pub(crate) enum Step<'a> {
    Proved(Admission<'a>),
    /// The next step needs this.
    Waits(PollFlags),
}

impl Wire {
    /// The listening side of [`Wire::connect`], up to the answer.
    pub(crate) fn accept<'a>(
        &mut self,
        credentials: &'a Credentials,
        deadline: Instant,
    ) -> Try<Admission<'a>> {
        loop {
            match self.step(credentials)? {
                Step::Proved(admission) => return Ok(admission),
                Step::Waits(flags) => self.wait(flags, deadline)?,
            }
        }
    }

    /// The same as far as it comes without waiting: what a stranger has of this process is no more than this.
    pub(crate) fn step<'a>(&mut self, credentials: &'a Credentials) -> Try<Step<'a>> {
        loop {
            self.proof = match &mut self.proof {
                Proof::Awaited => {
                    let mut first = [0];
                    match self.stream.socket().peek(&mut first) {
                        Ok(0) => return Err(Fault::Closed),
                        Ok(_) => self.agree_on_encryption(credentials, first[0])?,
                        Err(error) => match must_wait(error)? {
                            true => return Ok(Step::Waits(PollFlags::IN)),
                            false => continue,
                        },
                    }
                }
                Proof::Encrypting(session) => {
                    let stranger =
                        |fault| if matches!(fault, Fault::ProofRefused) { Fault::BadProof } else { fault };
                    if let Some(flags) = shake(session, &self.stream).map_err(stranger)? {
                        return Ok(Step::Waits(flags));
                    }
                    let opening = Proof::Opening(Part::new());
                    if let Proof::Encrypting(session) = std::mem::replace(&mut self.proof, opening) {
                        self.stream.secure(*session);
                    }
                    continue;
                }
                Proof::Opening(part) => {
                    let Some(client) = part.whole(&self.stream)? else {
                        return Ok(Step::Waits(PollFlags::IN));
                    };
                    let server = match Server::new(credentials, client) {
                        Err(fault @ Fault::Version(_)) => {
                            self.stream.say(&Server::other_version()?);
                            return Err(fault);
                        }
                        Err(Fault::BadProof) => {
                            self.stream.say(&Server::no_secret()?);
                            return Err(Fault::BadProof);
                        }
                        other => *other?.opening(),
                    };
                    self.stream.say(&server);
                    Proof::Claim { client, server, claim: Part::new() }
                }
                Proof::Claim { client, server, claim } => {
                    let Some(claim) = claim.whole(&self.stream)? else {
                        return Ok(Step::Waits(PollFlags::IN));
                    };
                    let admission = Server::again(credentials, *client, *server).check(claim);
                    if matches!(admission, Err(Fault::BadProof)) {
                        self.stream.say(&Server::no_proof());
                    }
                    return admission.map(Step::Proved);
                }
            };
        }
    }

    /// Whether the other side has said anything.
    pub(crate) fn has_spoken(&self) -> bool {
        !matches!(self.proof, Proof::Awaited)
    }

    /// Whether it has said as much as a rank says at once: all that a stranger may not know, or the beginning of encryption.
    pub(crate) fn has_knocked(&self) -> bool {
        !matches!(self.proof, Proof::Awaited | Proof::Opening(_))
    }

    /// What it has knocked with, different each time unless somebody has overheard and repeats it.
    pub(crate) fn knock(&self) -> Option<&Opening> {
        match &self.proof {
            Proof::Claim { client, .. } => Some(client),
            _ => None,
        }
    }

    /// The listening side encrypts what begins with a client's hello, and refuses what should.
    fn agree_on_encryption(&self, credentials: &Credentials, first: u8) -> Try<Proof> {
        let identity = credentials.tls(self.is_local()?);
        match (identity, first == HELLO) {
            (Some(identity), true) => {
                Ok(Proof::Encrypting(Box::new(Session::new(identity.server().map_err(unusable)?))))
            }
            (None, false) => Ok(Proof::Opening(Part::new())),
            (Some(_), false) => {
                self.stream.say(&Server::encrypted()?);
                Err(Fault::Encryption { theirs: false })
            }
            (None, true) => {
                self.stream.say(&Server::other_version()?);
                Err(Fault::Encryption { theirs: true })
            }
        }
    }
}
