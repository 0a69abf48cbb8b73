//! The listening side of a handshake, which advances as the client's messages arrive.

use std::io;
use std::time::Instant;

use rustix::event::PollFlags;

use super::{HandshakeStream, advance_tls_handshake, unusable};
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, Credentials, OPENING, Opening, Server, encrypts};
use crate::connection::stream::Stream;
use crate::connection::tls::Session;

/// How far a client's handshake has come.
#[derive(Debug)]
pub(super) enum ServerHandshake {
    Opening(PartialMessage<OPENING>),
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
        claim: PartialMessage<41>,
    },
}

impl Default for ServerHandshake {
    fn default() -> Self {
        Self::Opening(PartialMessage::new())
    }
}

/// A message of `N` bytes, of which the first have arrived.
#[derive(Debug)]
pub(super) struct PartialMessage<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> PartialMessage<N> {
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
pub(crate) enum HandshakeStep {
    Proved(Box<Admission>),
    /// The next step waits for these poll events.
    Waits(PollFlags),
}

impl HandshakeStream {
    /// Runs the listening side of [`HandshakeStream::connect`], up to the answer.
    pub(crate) fn accept(
        &mut self,
        credentials: &Credentials,
        deadline: Instant,
    ) -> ConnectResult<Admission> {
        loop {
            match self.step(credentials)? {
                HandshakeStep::Proved(admission) => return Ok(*admission),
                HandshakeStep::Waits(flags) => self.wait(flags, deadline)?,
            }
        }
    }

    /// Advances the same as far as is possible without waiting. A client without proof uses no more of this process than
    /// this.
    pub(crate) fn step(&mut self, credentials: &Credentials) -> ConnectResult<HandshakeStep> {
        loop {
            self.proof = match &mut self.proof {
                ServerHandshake::Opening(part) => match part.whole(&self.stream)? {
                    Some(client) => self.open(credentials, client)?,
                    None => return Ok(HandshakeStep::Waits(PollFlags::IN)),
                },
                ServerHandshake::Encrypting { client, server, session } => {
                    let stranger = |fault| {
                        if matches!(fault, ConnectError::ProofRefused) {
                            ConnectError::BadProof
                        } else {
                            fault
                        }
                    };
                    if let Some(flags) = advance_tls_handshake(session, &self.stream).map_err(stranger)? {
                        return Ok(HandshakeStep::Waits(flags));
                    }
                    let claim = ServerHandshake::Claim {
                        client: *client,
                        server: *server,
                        claim: PartialMessage::new(),
                    };
                    if let ServerHandshake::Encrypting { server, session, .. } =
                        std::mem::replace(&mut self.proof, claim)
                    {
                        self.stream.secure(*session);
                        self.stream.say(&server);
                    }
                    continue;
                }
                ServerHandshake::Claim { client, server, claim } => {
                    let Some(claim) = claim.whole(&self.stream)? else {
                        return Ok(HandshakeStep::Waits(PollFlags::IN));
                    };
                    let admission = Server::resume(credentials, *client, *server).check(claim);
                    if matches!(admission, Err(ConnectError::BadProof)) {
                        self.stream.say(&Server::no_proof());
                    }
                    return admission.map(|admission| HandshakeStep::Proved(Box::new(admission)));
                }
            };
        }
    }

    /// Answers a client's opening.
    fn open(&mut self, credentials: &Credentials, client: Opening) -> ConnectResult<ServerHandshake> {
        let server = match Server::new(credentials, client) {
            Ok(server) => *server.opening(),
            Err(fault @ ConnectError::Version(_)) => {
                return Err(self.refuse(&Server::other_version()?, fault));
            }
            Err(fault @ ConnectError::BadProof) => return Err(self.refuse(&Server::no_secret()?, fault)),
            Err(fault) => return Err(fault),
        };
        match (credentials.tls(|| self.is_local())?, encrypts(&client)) {
            (Some(identity), true) => {
                let session = Box::new(Session::new(identity.server().map_err(unusable)?));
                Ok(ServerHandshake::Encrypting { client, server, session })
            }
            (None, false) => {
                self.stream.say(&server);
                Ok(ServerHandshake::Claim { client, server, claim: PartialMessage::new() })
            }
            (Some(_), false) => {
                Err(self.refuse(&Server::encrypted()?, ConnectError::Encryption { theirs: false }))
            }
            (None, true) => {
                Err(self.refuse(&Server::other_version()?, ConnectError::Encryption { theirs: true }))
            }
        }
    }

    /// Ends the connection with this message. What has arrived is read first: otherwise the system might reset the
    /// connection.
    fn refuse(&mut self, words: &Opening, fault: ConnectError) -> ConnectError {
        self.stream.say(words);
        self.close_gracefully();
        fault
    }

    /// Returns whether the other side has sent anything.
    pub(crate) fn has_received(&self) -> bool {
        !matches!(&self.proof, ServerHandshake::Opening(part) if part.filled == 0)
    }

    /// Returns whether the other side has sent its whole opening, with a valid proof.
    pub(crate) fn has_opening(&self) -> bool {
        !matches!(self.proof, ServerHandshake::Opening(_))
    }

    /// Returns the client's opening, which differs for each connection unless an eavesdropper repeats it.
    pub(crate) fn client_opening(&self) -> Option<&Opening> {
        match &self.proof {
            ServerHandshake::Opening(_) => None,
            ServerHandshake::Encrypting { client, .. } | ServerHandshake::Claim { client, .. } => {
                Some(client)
            }
        }
    }
}
