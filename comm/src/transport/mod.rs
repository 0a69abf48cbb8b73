//! Transports: streams of bytes to each peer ([`links`]) over TCP and shared memory ([`hybrid_links`] over both), or a
//! library that moves whole operations ([`carrier`]).

pub(crate) mod carrier;
pub(crate) mod hybrid_links;
pub(crate) mod links;
pub(crate) mod peer;
pub(crate) mod shm;
pub(crate) mod site;
pub(crate) mod tcp;
