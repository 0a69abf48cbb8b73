//! Handshake in which two processes prove to each other that they hold the same job's secret. No sockets here: four
//! messages of fixed size, of which nothing but magic, version and nonce is used before the proofs are checked.
//!
//! ```text
//! client -> server   opening: magic, version, nonce (half of it chance, half a proof over the first half)
//! server -> client   opening: magic, version, nonce
//! client -> server   claim:   rank, world size, purpose, proof over both openings and the claim
//! server -> client   answer:  status, rank, world size, proof over all of the above and the answer
//! ```
//!
//! The proof in the first message does not exclude that an eavesdropper repeats it. But a peer that only
//! knows the protocol is refused at once and takes no slot from a rank, and one that repeats a message takes one slot
//! only.
//!
//! A client that encrypts says so in its opening, and all after that is encrypted.
//!
//! A claim without valid proof is answered with bytes that say so, in place of an answer: a connection that is merely
//! closed is tried again.
//!
//! Each proof is HMAC-SHA256 under the secret, with its own label, so that none can be sent back to where it came from.
//! Those of claim and answer cover the nonces of both sides, so that none can be used twice.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::connect_error::{ConnectError, ConnectResult};
use crate::connection::connect_error::VERSION;
use crate::connection::tls::Identity;
use crate::{Error, Result, Secret, TcpConfig, Tls};

const MAGIC: [u8; 8] = *b"girandle";
/// In place of the version: the server accepts only encrypted connections from there.
const ENCRYPTED: u16 = u16::MAX;
/// In place of the version: the client's opening shows that it does not hold the job's secret.
const NO_SECRET: u16 = u16::MAX - 1;
/// Added to the version in a client's opening: what comes after it is encrypted.
const ENCRYPTS: u16 = 1 << 15;
/// Offset of the proof in a client's opening.
const OPENING_PROOF: usize = 26;

pub(crate) const OPENING: usize = 42;
pub(crate) type Opening = [u8; OPENING];
/// An opening that anybody can send who knows the protocol.
#[cfg(test)]
pub(crate) const KNOWN: Opening = {
    let (mut message, version, mut at) = ([b'.'; OPENING], VERSION.to_le_bytes(), 0);
    while at < 10 {
        message[at] = if at < 8 { MAGIC[at] } else { version[at - 8] };
        at += 1;
    }
    message
};
pub(crate) type Claim = [u8; 41];
pub(crate) type Answer = [u8; 41];
const PROOF: usize = 32;
/// In place of an answer: the claim's proof is not valid.
const NO_PROOF: Answer = [0xff; 41];

/// What both sides must share: the secret, the job, and the meeting of that job.
#[derive(Clone)]
pub(crate) struct Credentials {
    key: [u8; 64],
    context: [u8; 32],
    tls: Option<(Tls, Identity)>,
}

impl Credentials {
    /// Without a secret the key is all zeros, which [`Secret`] never is.
    pub(crate) fn new(secret: Option<&Secret>, job_id: &str) -> Self {
        let key = secret.map_or([0; 64], Secret::block);
        Self { key, context: Sha256::digest(job_id.as_bytes()).into(), tls: None }
    }

    /// Returns the credentials of a job, with its TLS keys.
    pub(crate) fn of(config: &TcpConfig) -> Result<Self> {
        let TcpConfig { secret, job_id, tls, .. } = config;
        let plain = Self::new(secret.as_ref(), job_id);
        let (Some(secret), false) = (secret, *tls == Tls::Off) else { return Ok(plain) };
        let identity = Identity::new(secret, job_id).map_err(|reason| Error::system("TLS", reason))?;
        Ok(Self { tls: Some((*tls, identity)), ..plain })
    }

    /// Returns the TLS identity, where the connection is to be encrypted; `is_local` where both ends are on one host.
    pub(crate) fn tls(
        &self,
        is_local: impl FnOnce() -> ConnectResult<bool>,
    ) -> ConnectResult<Option<&Identity>> {
        let Some((tls, identity)) = &self.tls else { return Ok(None) };
        Ok(tls.covers(is_local()?).then_some(identity))
    }

    /// Returns the same credentials, valid only between processes that also know `nonce`.
    pub(crate) fn bound_to(&self, nonce: &[u8; 32]) -> Self {
        let context = Sha256::new().chain_update(self.context).chain_update(nonce).finalize().into();
        Self { context, ..self.clone() }
    }

    /// Returns the proof with which a client of this job ends its opening.
    fn opening_proof(&self, opening: &Opening) -> Hmac<Sha256> {
        self.proof(b"girandole  knock", &[&opening[..OPENING_PROOF]])
    }

    fn proof(&self, label: &[u8; 16], messages: &[&[u8]]) -> Hmac<Sha256> {
        let proof = Hmac::<Sha256>::new(&self.key.into()).chain_update(label).chain_update(self.context);
        messages.iter().fold(proof, |proof, message| proof.chain_update(message))
    }

    fn client_proof(&self, client: &Opening, server: &Opening, claim: &[u8]) -> Hmac<Sha256> {
        self.proof(b"girandole client", &[client, server, claim])
    }

    fn server_proof(&self, client: &Opening, server: &Opening, claim: &Claim, answer: &[u8]) -> Hmac<Sha256> {
        self.proof(b"girandole server", &[client, server, claim, answer])
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To rank 0: the table of ranks, later heartbeats and failure reports.
    Control = 1,
    /// Between any two ranks: tensors.
    Data = 2,
    /// To another rank's listener: forming a new group (see [`crate::rendezvous`]'s `regroup`).
    Regroup = 3,
    /// To the rank that passes the table of ranks on.
    Table = 4,
}

/// What a client claims to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClientClaim {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) purpose: Purpose,
}

/// A server's decision about a client that holds the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeStatus {
    /// Accepted.
    Admitted = 0,
    /// Its group has another size.
    OtherWorldSize = 1,
    /// No such rank is expected for this purpose, or not any more.
    NotAwaited = 2,
    /// The server dials this connection itself, or has it already.
    Crossed = 3,
    /// The server has closed its group, or the group has failed.
    Gone = 4,
}

/// A server's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) status: HandshakeStatus,
    /// The server's own rank.
    pub(crate) rank: u32,
    /// The server's group's size.
    pub(crate) world_size: u32,
}

/// Builds an opening with `word` in place of the version.
fn opening(word: u16) -> ConnectResult<Opening> {
    let mut message = [0; OPENING];
    message[..8].copy_from_slice(&MAGIC);
    message[8..10].copy_from_slice(&word.to_le_bytes());
    getrandom::fill(&mut message[10..]).map_err(|_| ConnectError::NoRandomness)?;
    Ok(message)
}

fn word(opening: &Opening) -> u16 {
    u16::from_le_bytes([opening[8], opening[9]])
}

/// Returns whether all that this client sends after its opening is encrypted.
pub(crate) fn encrypts(client: &Opening) -> bool {
    word(client) & ENCRYPTS != 0
}

/// Checks the opening of a server (`theirs`) that answers the opening `ours`.
fn check_server(theirs: &Opening, ours: &Opening) -> ConnectResult<()> {
    match word(theirs) {
        _ if theirs[..8] != MAGIC => Err(ConnectError::NotOurs),
        ENCRYPTED => Err(ConnectError::Encryption { theirs: true }),
        NO_SECRET => Err(ConnectError::ProofRefused),
        VERSION if ours == theirs => Err(ConnectError::NotOurs),
        VERSION => Ok(()),
        version => Err(ConnectError::Version(version)),
    }
}

fn check_client(theirs: &Opening) -> ConnectResult<()> {
    match word(theirs) & !ENCRYPTS {
        _ if theirs[..8] != MAGIC => Err(ConnectError::NotOurs),
        VERSION => Ok(()),
        version => Err(ConnectError::Version(version)),
    }
}

/// Returns whether these are the first bytes of an unencrypted opening, five or more of them.
pub(crate) fn is_plain(first: &[u8]) -> bool {
    first.len() >= 5 && MAGIC.starts_with(first)
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// The connecting side, after its opening.
pub(crate) struct Client<'a> {
    credentials: &'a Credentials,
    caller: ClientClaim,
    opening: Opening,
}

impl<'a> Client<'a> {
    pub(crate) fn new(credentials: &'a Credentials, caller: ClientClaim) -> ConnectResult<Self> {
        Self::opened(credentials, caller, opening(VERSION)?)
    }

    /// As [`Client::new`], for a client that encrypts all after its opening.
    pub(crate) fn encrypting(credentials: &'a Credentials, caller: ClientClaim) -> ConnectResult<Self> {
        Self::opened(credentials, caller, opening(VERSION | ENCRYPTS)?)
    }

    fn opened(
        credentials: &'a Credentials,
        caller: ClientClaim,
        mut opening: Opening,
    ) -> ConnectResult<Self> {
        let proof = credentials.opening_proof(&opening).finalize().into_bytes();
        opening[OPENING_PROOF..].copy_from_slice(&proof[..OPENING - OPENING_PROOF]);
        Ok(Self { credentials, caller, opening })
    }

    pub(crate) fn opening(&self) -> &Opening {
        &self.opening
    }

    /// Returns why the server answers with this opening, unencrypted.
    pub(crate) fn refused(&self, server: &Opening) -> ConnectError {
        check_server(server, &self.opening).err().unwrap_or(ConnectError::Encryption { theirs: false })
    }

    /// Returns the claim to send in reply to the server's opening, and the state that checks the answer.
    pub(crate) fn claim(self, server: Opening) -> ConnectResult<(Claim, ClientAfterClaim<'a>)> {
        check_server(&server, &self.opening)?;
        let mut claim = [0; 41];
        claim[..4].copy_from_slice(&self.caller.rank.to_le_bytes());
        claim[4..8].copy_from_slice(&self.caller.world_size.to_le_bytes());
        claim[8] = self.caller.purpose as u8;
        let proof = self.credentials.client_proof(&self.opening, &server, &claim[..9]);
        claim[9..].copy_from_slice(&proof.finalize().into_bytes());
        Ok((claim, ClientAfterClaim { credentials: self.credentials, client: self.opening, server, claim }))
    }
}

/// The connecting side, after its claim.
pub(crate) struct ClientAfterClaim<'a> {
    credentials: &'a Credentials,
    client: Opening,
    server: Opening,
    claim: Claim,
}

impl ClientAfterClaim<'_> {
    pub(crate) fn check(&self, answer: &Answer) -> ConnectResult<Verdict> {
        if *answer == NO_PROOF {
            return Err(ConnectError::ProofRefused);
        }
        let (said, proof) = answer.split_at(answer.len() - PROOF);
        let expected = self.credentials.server_proof(&self.client, &self.server, &self.claim, said);
        expected.verify_slice(proof).map_err(|_| ConnectError::BadProof)?;
        let status = match said[0] {
            0 => HandshakeStatus::Admitted,
            1 => HandshakeStatus::OtherWorldSize,
            2 => HandshakeStatus::NotAwaited,
            3 => HandshakeStatus::Crossed,
            4 => HandshakeStatus::Gone,
            _ => return Err(ConnectError::Malformed("an unknown status".into())),
        };
        Ok(Verdict { status, rank: number(&said[1..5]), world_size: number(&said[5..]) })
    }
}

/// The listening side, after the client's opening.
pub(crate) struct Server<'a> {
    credentials: &'a Credentials,
    client: Opening,
    opening: Opening,
}

impl<'a> Server<'a> {
    pub(crate) fn new(credentials: &'a Credentials, client: Opening) -> ConnectResult<Self> {
        check_client(&client)?;
        let proof = credentials.opening_proof(&client).verify_truncated_left(&client[OPENING_PROOF..]);
        proof.map_err(|_| ConnectError::BadProof)?;
        Ok(Self { credentials, client, opening: opening(VERSION)? })
    }

    /// Restores the state after both openings.
    pub(crate) fn resume(credentials: &'a Credentials, client: Opening, opening: Opening) -> Self {
        Self { credentials, client, opening }
    }

    /// Opening for a client of another version, or one that encrypts and should not, so that it can report that.
    pub(crate) fn other_version() -> ConnectResult<Opening> {
        opening(VERSION)
    }

    /// Opening for a client that should encrypt and does not.
    pub(crate) fn encrypted() -> ConnectResult<Opening> {
        opening(ENCRYPTED)
    }

    /// Opening for a client whose own opening shows that it does not hold the job's secret.
    pub(crate) fn no_secret() -> ConnectResult<Opening> {
        opening(NO_SECRET)
    }

    /// Answer to a client whose claim shows that it does not hold the job's secret, so that it can report that.
    pub(crate) fn no_proof() -> Answer {
        NO_PROOF
    }

    pub(crate) fn opening(&self) -> &Opening {
        &self.opening
    }

    pub(crate) fn check(self, claim: Claim) -> ConnectResult<Admission> {
        let (said, proof) = claim.split_at(claim.len() - PROOF);
        let expected = self.credentials.client_proof(&self.client, &self.opening, said);
        expected.verify_slice(proof).map_err(|_| ConnectError::BadProof)?;
        let purpose = match said[8] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            3 => Purpose::Regroup,
            4 => Purpose::Table,
            _ => return Err(ConnectError::Malformed("an unknown purpose".into())),
        };
        let caller = ClientClaim { rank: number(&said[..4]), world_size: number(&said[4..8]), purpose };
        let Self { credentials, client, opening } = self;
        Ok(Admission { credentials: credentials.clone(), client, opening, claim, caller })
    }
}

/// The listening side, once the client's proof is verified.
pub(crate) struct Admission {
    credentials: Credentials,
    client: Opening,
    opening: Opening,
    claim: Claim,
    pub(crate) caller: ClientClaim,
}

impl Admission {
    pub(crate) fn answer(&self, verdict: Verdict) -> Answer {
        let mut answer = [0; 41];
        answer[0] = verdict.status as u8;
        answer[1..5].copy_from_slice(&verdict.rank.to_le_bytes());
        answer[5..9].copy_from_slice(&verdict.world_size.to_le_bytes());
        let Self { credentials, client, opening, claim, .. } = self;
        let proof = credentials.server_proof(client, opening, claim, &answer[..9]);
        answer[9..].copy_from_slice(&proof.finalize().into_bytes());
        answer
    }
}

#[cfg(test)]
mod tests;
