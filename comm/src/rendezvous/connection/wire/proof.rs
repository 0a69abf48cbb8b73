//! The listening side of a handshake, which advances as the client's messages arrive.

use std::io;
use std::time::Instant;

use rustix::event::PollFlags;

use super::{Wire, shake, unusable};
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Admission, Credentials, OPENING, Opening, Server, encrypts};
use crate::rendezvous::connection::stream::Stream;
use crate::rendezvous::connection::tls::Session;

/// How far a client's handshake has come.
#[derive(Debug)]
pub(super) enum Proof {
    Opening(Part<OPENING>),
    /// The client's opening has arrived. The TLS handshake is under way; the server's opening is sent after it,
    /// encrypted.
    Encrypting {
        client: Opening,
        server: Opening,
        session: Box<Session>,
    },
    /// Both sides have sent their openings.
    Claim {
        client: Opening,
        server: Opening,
        claim: Part<41>,
    },
}

impl Default for Proof {
    fn default() -> Self {
        Self::Opening(Part::new())
    }
}

/// A message of `N` bytes, of which the first have arrived.
#[derive(Debug)]
pub(super) struct Part<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Part<N> {
    fn new() -> Self {
        Self { bytes: [0; N], filled: 0 }
    }

    /// Returns the whole message as soon as it has arrived.
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

/// Result of one step of a handshake.
pub(crate) enum Step<'a> {
    Proved(Admission<'a>),
    /// The next step waits for these poll events.
    Waits(PollFlags),
}

impl Wire {
    /// Runs the listening side of [`Wire::connect`], up to the answer.
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

    /// Advances the same as far as is possible without waiting. A client without proof uses no more of this process than
    /// this.
    pub(crate) fn step<'a>(&mut self, credentials: &'a Credentials) -> Try<Step<'a>> {
        loop {
            self.proof = match &mut self.proof {
                Proof::Opening(part) => match part.whole(&self.stream)? {
                    Some(client) => self.open(credentials, client)?,
                    None => return Ok(Step::Waits(PollFlags::IN)),
                },
                Proof::Encrypting { client, server, session } => {
                    let stranger =
                        |fault| if matches!(fault, Fault::ProofRefused) { Fault::BadProof } else { fault };
                    if let Some(flags) = shake(session, &self.stream).map_err(stranger)? {
                        return Ok(Step::Waits(flags));
                    }
                    let claim = Proof::Claim { client: *client, server: *server, claim: Part::new() };
                    if let Proof::Encrypting { server, session, .. } =
                        std::mem::replace(&mut self.proof, claim)
                    {
                        self.stream.secure(*session);
                        self.stream.say(&server);
                    }
                    continue;
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

    /// Answers a client's opening.
    fn open(&mut self, credentials: &Credentials, client: Opening) -> Try<Proof> {
        let server = match Server::new(credentials, client) {
            Ok(server) => *server.opening(),
            Err(fault @ Fault::Version(_)) => return Err(self.refuse(&Server::other_version()?, fault)),
            Err(fault @ Fault::BadProof) => return Err(self.refuse(&Server::no_secret()?, fault)),
            Err(fault) => return Err(fault),
        };
        match (credentials.tls(self.is_local()?), encrypts(&client)) {
            (Some(identity), true) => {
                let session = Box::new(Session::new(identity.server().map_err(unusable)?));
                Ok(Proof::Encrypting { client, server, session })
            }
            (None, false) => {
                self.stream.say(&server);
                Ok(Proof::Claim { client, server, claim: Part::new() })
            }
            (Some(_), false) => Err(self.refuse(&Server::encrypted()?, Fault::Encryption { theirs: false })),
            (None, true) => Err(self.refuse(&Server::other_version()?, Fault::Encryption { theirs: true })),
        }
    }

    /// Ends the connection with this message. What has arrived is read first: otherwise the system might reset the
    /// connection.
    fn refuse(&mut self, words: &Opening, fault: Fault) -> Fault {
        self.stream.say(words);
        self.hang_up();
        fault
    }

    /// Returns whether the other side has sent anything.
    pub(crate) fn has_spoken(&self) -> bool {
        !matches!(&self.proof, Proof::Opening(part) if part.filled == 0)
    }

    /// Returns whether the other side has sent its whole opening, with a valid proof.
    pub(crate) fn has_knocked(&self) -> bool {
        !matches!(self.proof, Proof::Opening(_))
    }

    /// Returns the client's opening, which differs for each connection unless an eavesdropper repeats it.
    pub(crate) fn knock(&self) -> Option<&Opening> {
        match &self.proof {
            Proof::Opening(_) => None,
            Proof::Encrypting { client, .. } | Proof::Claim { client, .. } => Some(client),
        }
    }
}
