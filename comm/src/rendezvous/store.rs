//! Client of the key-value store that `torchrun` keeps at `MASTER_PORT` for its ranks. No rank can listen there, so rank
//! 0 opens a port of its own and publishes it in the store.
//!
//! Of the store's protocol (PyTorch's `TCPStore`) three queries are needed; numbers are little-endian, a text is its
//! length in 8 bytes and its bytes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::connection::connect_error::{ConnectError, ConnectResult};

const VALIDATE: u8 = 0;
const MAGIC: u32 = 0x3C85_F7CE;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
const READY: u8 = 0;
/// Longer than any value that rank 0 stores.
const LIMIT: u64 = 4096;

/// The value that rank 0 stores: where it listens, and a nonce that is different in each run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PublishedAddress {
    pub(super) address: SocketAddr,
    pub(super) nonce: [u8; 32],
}

/// A connection to the store.
pub(super) struct Store(TcpStream);

impl Store {
    /// Connects to the first address that answers.
    pub(super) fn connect(addresses: &[SocketAddr], until: Instant) -> ConnectResult<Self> {
        let mut last = ConnectError::Closed;
        for address in addresses {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(left))?;
                    stream.set_write_timeout(Some(left))?;
                    let mut store = Self(stream);
                    store.0.write_all(&[&[VALIDATE][..], &MAGIC.to_le_bytes()].concat())?;
                    return Ok(store);
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    /// Stores a value under a key, and checks that it is there.
    pub(super) fn publish(&mut self, key: &str, word: &PublishedAddress) -> ConnectResult<()> {
        let json = serde_json::to_vec(word).map_err(|error| ConnectError::Malformed(error.to_string()))?;
        self.0.write_all(&[&[SET][..], &text(key.as_bytes()), &text(&json)].concat())?;
        match self.has(key)? {
            true => Ok(()),
            false => Err(ConnectError::Malformed("no sign that it keeps what it is given".into())),
        }
    }

    /// Returns the value under a key, if it is there by now.
    pub(super) fn lookup(&mut self, key: &str) -> ConnectResult<Option<PublishedAddress>> {
        if !self.has(key)? {
            return Ok(None);
        }
        self.0.write_all(&[&[GET][..], &text(key.as_bytes())].concat())?;
        let len = u64::from_le_bytes(self.read()?);
        if len > LIMIT {
            return Err(ConnectError::Malformed(format!("{len} bytes where rank 0's word should be")));
        }
        let mut json = vec![0; len as usize];
        self.0.read_exact(&mut json).map_err(convert_timeout)?;
        serde_json::from_slice(&json).map(Some).map_err(|error| ConnectError::Malformed(error.to_string()))
    }

    fn has(&mut self, key: &str) -> ConnectResult<bool> {
        self.0.write_all(&[&[CHECK][..], &1_u64.to_le_bytes(), &text(key.as_bytes())].concat())?;
        Ok(self.read()? == [READY])
    }

    fn read<const N: usize>(&mut self) -> ConnectResult<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).map_err(convert_timeout)?;
        Ok(bytes)
    }
}

/// Converts an error: a time-out of the socket is reported as `WouldBlock`.
fn convert_timeout(error: std::io::Error) -> ConnectError {
    match error.kind() {
        std::io::ErrorKind::WouldBlock => ConnectError::TimedOut,
        _ => error.into(),
    }
}

fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// A store for tests, with the queries that are used.
#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    fn take(stream: &mut TcpStream, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    fn number(stream: &mut TcpStream) -> Option<usize> {
        Some(u64::from_le_bytes(take(stream, 8)?.try_into().ok()?) as usize)
    }

    fn words(stream: &mut TcpStream) -> Option<Vec<u8>> {
        let len = number(stream)?;
        take(stream, len)
    }

    type Content = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

    fn serve(stream: &mut TcpStream, content: &Content) -> Option<()> {
        assert_eq!(take(stream, 5)?, [0, 0xCE, 0xF7, 0x85, 0x3C]);
        loop {
            match take(stream, 1)?[0] {
                SET => {
                    let (key, value) = (words(stream)?, words(stream)?);
                    content.lock().unwrap().insert(key, value);
                }
                GET => {
                    let value = content.lock().unwrap()[&words(stream)?].clone();
                    stream.write_all(&text(&value)).ok()?;
                }
                CHECK => {
                    assert_eq!(number(stream)?, 1);
                    let there = content.lock().unwrap().contains_key(&words(stream)?);
                    stream.write_all(&[u8::from(!there)]).ok()?;
                }
                other => panic!("query {other}"),
            }
        }
    }

    /// Serves for as long as the test's process lives.
    pub(crate) fn open() -> (SocketAddr, Content) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, content) = (listener.local_addr().unwrap(), Content::default());
        let shared = content.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let content = shared.clone();
                std::thread::spawn(move || serve(&mut stream, &content));
            }
        });
        (address, content)
    }

    fn connect(address: SocketAddr) -> ConnectResult<Store> {
        Store::connect(&[address], Instant::now() + Duration::from_secs(30))
    }

    #[test]
    fn a_word_that_is_left_is_found() {
        let (address, _) = open();
        let mut store = connect(address).unwrap();
        assert_eq!(store.lookup("key").unwrap(), None);
        for nonce in [[1; 32], [2; 32]] {
            let word = PublishedAddress { address, nonce };
            store.publish("key", &word).unwrap();
            assert_eq!(connect(address).unwrap().lookup("key").unwrap(), Some(word));
        }
    }

    #[test]
    fn rubbish_is_no_word() {
        let (address, content) = open();
        for rubbish in [&b""[..], b"{}", b"\xff", &[b'['; 100_000]] {
            content.lock().unwrap().insert(b"key".to_vec(), rubbish.to_vec());
            let found = connect(address).unwrap().lookup("key");
            assert!(matches!(found, Err(ConnectError::Malformed(_))), "{found:?}");
        }
    }
}
