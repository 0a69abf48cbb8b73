//! How two processes prove to each other that they hold the same job's secret. No sockets here: four messages of fixed
//! size, of which nothing but magic, version and nonce is looked at before the proofs were checked.
//!
//! ```text
//! client -> server   opening: magic, version, nonce (half of it chance, half a proof over the first half)
//! server -> client   opening: magic, version, nonce
//! client -> server   claim:   rank, world size, purpose, proof over both openings and the claim
//! server -> client   answer:  status, rank, world size, proof over all of the above and the answer
//! ```
//!
//! The proof in the first message, the knock, tells nothing of who has overheard and repeats it. But whoever only knows the protocol
//! is sent away at once and takes no place from a rank, and who repeats takes one place only.
//!
//! A client that encrypts says so in its opening, and all after that is encrypted.
//!
//! In the place of an answer, a claim that proves nothing gets bytes that say so: a connection that merely ends is one to be
//! made again.
//!
//! Each proof is HMAC-SHA256 under the secret, with a label of its own for each direction, so that none can be sent back
//! to whom it came from, and over nonces of both sides, so that none can be used twice.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::fault::{Fault, Try};
use crate::rendezvous::connection::fault::VERSION;
use crate::rendezvous::connection::tls::Identity;
use crate::{Error, Result, Secret, TcpConfig, Tls};

const MAGIC: [u8; 8] = *b"girandle";
/// In the place of the version: the server takes encrypted connections from there only.
const ENCRYPTED: u16 = u16::MAX;
/// There, too: the client's opening shows that it does not hold the job's secret.
const NO_SECRET: u16 = u16::MAX - 1;
/// Added to the version in a client's opening: what comes after it is encrypted.
const ENCRYPTS: u16 = 1 << 15;
/// Where the knock is in a client's opening.
const KNOCK: usize = 26;

pub(crate) const OPENING: usize = 42;
pub(crate) type Opening = [u8; OPENING];
/// What anybody can send who knows the protocol.
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
/// In the place of an answer: the claim does not prove anything.
const NO_PROOF: Answer = [0xff; 41];

/// What both sides must share: the secret, the job, and which meeting of that job it is.
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

    /// Those of a job, with the keys of its encryption.
    pub(crate) fn of(config: &TcpConfig) -> Result<Self> {
        let TcpConfig { secret, job_id, tls, .. } = config;
        let plain = Self::new(secret.as_ref(), job_id);
        let (Some(secret), false) = (secret, *tls == Tls::Off) else { return Ok(plain) };
        let identity = Identity::new(secret, job_id).map_err(|reason| Error::system("TLS", reason))?;
        Ok(Self { tls: Some((*tls, identity)), ..plain })
    }

    /// What encrypts a connection, where it is to be; `is_local` where both ends are on one host.
    pub(crate) fn tls(&self, is_local: bool) -> Option<&Identity> {
        self.tls.as_ref().filter(|(tls, _)| tls.covers(is_local)).map(|(_, identity)| identity)
    }

    /// The same, good only for those who also know `nonce`.
    pub(crate) fn bound_to(&self, nonce: &[u8; 32]) -> Self {
        let context = Sha256::new().chain_update(self.context).chain_update(nonce).finalize().into();
        Self { context, ..self.clone() }
    }

    /// What a client of this job ends its opening with.
    fn knock(&self, opening: &Opening) -> Hmac<Sha256> {
        self.proof(b"girandole  knock", &[&opening[..KNOCK]])
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
    /// To rank 0: the table of ranks, later life signs and causes of failure.
    Control = 1,
    /// Between any two ranks: tensors.
    Data = 2,
    /// To another rank's door: which ranks go on (see [`crate::rendezvous::meeting`]'s `regroup`).
    Door = 3,
}

/// Who a client says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) purpose: Purpose,
}

/// What a server makes of a client that holds the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// It may go on.
    Admitted = 0,
    /// Its group has another size.
    OtherWorldSize = 1,
    /// No such rank is awaited for this purpose, or not any more.
    NotAwaited = 2,
    /// The server makes this connection itself, or has it already.
    Crossed = 3,
    /// The server has closed its group, or the group has failed.
    Gone = 4,
}

/// What a server answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) status: Status,
    /// The server's own rank.
    pub(crate) rank: u32,
    /// The server's group's size.
    pub(crate) world_size: u32,
}

/// An opening with `word` in the place of the version.
fn opening(word: u16) -> Try<Opening> {
    let mut message = [0; OPENING];
    message[..8].copy_from_slice(&MAGIC);
    message[8..10].copy_from_slice(&word.to_le_bytes());
    getrandom::fill(&mut message[10..]).map_err(|_| Fault::NoRandomness)?;
    Ok(message)
}

fn word(opening: &Opening) -> u16 {
    u16::from_le_bytes([opening[8], opening[9]])
}

/// Whether all that this client sends after its opening is encrypted.
pub(crate) fn encrypts(client: &Opening) -> bool {
    word(client) & ENCRYPTS != 0
}

/// What a server says to the client with the opening `ours`.
fn check_server(theirs: &Opening, ours: &Opening) -> Try<()> {
    match word(theirs) {
        _ if theirs[..8] != MAGIC => Err(Fault::NotOurs),
        ENCRYPTED => Err(Fault::Encryption { theirs: true }),
        NO_SECRET => Err(Fault::ProofRefused),
        VERSION if ours == theirs => Err(Fault::NotOurs),
        VERSION => Ok(()),
        version => Err(Fault::Version(version)),
    }
}

fn check_client(theirs: &Opening) -> Try<()> {
    match word(theirs) & !ENCRYPTS {
        _ if theirs[..8] != MAGIC => Err(Fault::NotOurs),
        VERSION => Ok(()),
        version => Err(Fault::Version(version)),
    }
}

/// True where these are the first bytes of what a rank sends that does not encrypt, five or more of them.
pub(crate) fn is_plain(first: &[u8]) -> bool {
    first.len() >= 5 && MAGIC.starts_with(first)
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// The side that connects, after its opening.
pub(crate) struct Client<'a> {
    credentials: &'a Credentials,
    caller: Caller,
    opening: Opening,
}

impl<'a> Client<'a> {
    pub(crate) fn new(credentials: &'a Credentials, caller: Caller) -> Try<Self> {
        Self::opened(credentials, caller, opening(VERSION)?)
    }

    /// One that encrypts all after its opening.
    pub(crate) fn encrypting(credentials: &'a Credentials, caller: Caller) -> Try<Self> {
        Self::opened(credentials, caller, opening(VERSION | ENCRYPTS)?)
    }

    fn opened(credentials: &'a Credentials, caller: Caller, mut opening: Opening) -> Try<Self> {
        let knock = credentials.knock(&opening).finalize().into_bytes();
        opening[KNOCK..].copy_from_slice(&knock[..OPENING - KNOCK]);
        Ok(Self { credentials, caller, opening })
    }

    pub(crate) fn opening(&self) -> &Opening {
        &self.opening
    }

    /// What it means that the server says this, and does not encrypt it.
    pub(crate) fn refused(&self, server: &Opening) -> Fault {
        check_server(server, &self.opening).err().unwrap_or(Fault::Encryption { theirs: false })
    }

    /// The claim to send in reply to the server's opening, and who checks the answer.
    pub(crate) fn claim(self, server: Opening) -> Try<(Claim, Claimed<'a>)> {
        check_server(&server, &self.opening)?;
        let mut claim = [0; 41];
        claim[..4].copy_from_slice(&self.caller.rank.to_le_bytes());
        claim[4..8].copy_from_slice(&self.caller.world_size.to_le_bytes());
        claim[8] = self.caller.purpose as u8;
        let proof = self.credentials.client_proof(&self.opening, &server, &claim[..9]);
        claim[9..].copy_from_slice(&proof.finalize().into_bytes());
        Ok((claim, Claimed { credentials: self.credentials, client: self.opening, server, claim }))
    }
}

/// The side that connects, after its claim.
pub(crate) struct Claimed<'a> {
    credentials: &'a Credentials,
    client: Opening,
    server: Opening,
    claim: Claim,
}

impl Claimed<'_> {
    pub(crate) fn check(&self, answer: &Answer) -> Try<Verdict> {
        if *answer == NO_PROOF {
            return Err(Fault::ProofRefused);
        }
        let (said, proof) = answer.split_at(answer.len() - PROOF);
        let expected = self.credentials.server_proof(&self.client, &self.server, &self.claim, said);
        expected.verify_slice(proof).map_err(|_| Fault::BadProof)?;
        let status = match said[0] {
            0 => Status::Admitted,
            1 => Status::OtherWorldSize,
            2 => Status::NotAwaited,
            3 => Status::Crossed,
            4 => Status::Gone,
            _ => return Err(Fault::Malformed("an unknown status".into())),
        };
        Ok(Verdict { status, rank: number(&said[1..5]), world_size: number(&said[5..]) })
    }
}

/// The side that listens, after the client's opening.
pub(crate) struct Server<'a> {
    credentials: &'a Credentials,
    client: Opening,
    opening: Opening,
}

impl<'a> Server<'a> {
    pub(crate) fn new(credentials: &'a Credentials, client: Opening) -> Try<Self> {
        check_client(&client)?;
        let knock = credentials.knock(&client).verify_truncated_left(&client[KNOCK..]);
        knock.map_err(|_| Fault::BadProof)?;
        Ok(Self { credentials, client, opening: opening(VERSION)? })
    }

    /// The same after both openings.
    pub(crate) fn again(credentials: &'a Credentials, client: Opening, opening: Opening) -> Self {
        Self { credentials, client, opening }
    }

    /// What to send to a client of another version, or one that encrypts and should not, so that it can tell its user.
    pub(crate) fn other_version() -> Try<Opening> {
        opening(VERSION)
    }

    /// What to send to a client that should encrypt and does not.
    pub(crate) fn encrypted() -> Try<Opening> {
        opening(ENCRYPTED)
    }

    /// What to send to a client whose opening shows that it does not hold the job's secret.
    pub(crate) fn no_secret() -> Try<Opening> {
        opening(NO_SECRET)
    }

    /// What to send to a client that does not hold the job's secret, so that it can tell its user.
    pub(crate) fn no_proof() -> Answer {
        NO_PROOF
    }

    pub(crate) fn opening(&self) -> &Opening {
        &self.opening
    }

    pub(crate) fn check(self, claim: Claim) -> Try<Admission<'a>> {
        let (said, proof) = claim.split_at(claim.len() - PROOF);
        let expected = self.credentials.client_proof(&self.client, &self.opening, said);
        expected.verify_slice(proof).map_err(|_| Fault::BadProof)?;
        let purpose = match said[8] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            3 => Purpose::Door,
            _ => return Err(Fault::Malformed("an unknown purpose".into())),
        };
        let caller = Caller { rank: number(&said[..4]), world_size: number(&said[4..8]), purpose };
        Ok(Admission { server: self, claim, caller })
    }
}

/// The side that listens, once the client has proved itself.
pub(crate) struct Admission<'a> {
    server: Server<'a>,
    claim: Claim,
    pub(crate) caller: Caller,
}

impl Admission<'_> {
    pub(crate) fn answer(&self, verdict: Verdict) -> Answer {
        let Server { credentials, client, opening } = &self.server;
        let mut answer = [0; 41];
        answer[0] = verdict.status as u8;
        answer[1..5].copy_from_slice(&verdict.rank.to_le_bytes());
        answer[5..9].copy_from_slice(&verdict.world_size.to_le_bytes());
        let proof = credentials.server_proof(client, opening, &self.claim, &answer[..9]);
        answer[9..].copy_from_slice(&proof.finalize().into_bytes());
        answer
    }
}

#[cfg(test)]
mod tests;
