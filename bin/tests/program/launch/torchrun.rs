//! Running under `torchrun`, whose agent keeps a store at `MASTER_PORT`, so that no rank can listen there. The store
//! of this test answers the three queries that ranks need, with the byte format of PyTorch 2.15.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::{free_port, girandole, succeed, text, without_times};

type Content = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

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

fn answer(stream: &mut TcpStream, content: &Content) -> Option<()> {
    match take(stream, 1)?[0] {
        0 => assert_eq!(take(stream, 4)?, 0x3C85_F7CE_u32.to_le_bytes()),
        1 => {
            let (key, value) = (words(stream)?, words(stream)?);
            content.lock().unwrap().insert(key, value);
        }
        3 => {
            let value = content.lock().unwrap()[&words(stream)?].clone();
            stream.write_all(&(value.len() as u64).to_le_bytes()).ok()?;
            stream.write_all(&value).ok()?;
        }
        5 => {
            assert_eq!(number(stream)?, 1);
            let there = content.lock().unwrap().contains_key(&words(stream)?);
            stream.write_all(&[u8::from(!there)]).ok()?;
        }
        other => panic!("query {other}"),
    }
    Some(())
}

/// Starts a store that serves until the test process ends; returns its port and content.
fn store() -> (u16, Content) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, content) = (listener.local_addr().unwrap().port(), Content::default());
    let shared = content.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let content = shared.clone();
            std::thread::spawn(move || while answer(&mut stream, &content).is_some() {});
        }
    });
    (port, content)
}

const SHORT: [&str; 5] = ["ddp-linear", "--epochs", "1", "--samples", "6400"];

fn rank(rank: &str, port: u16) -> Command {
    let mut command = girandole();
    command.env("RANK", rank).env("WORLD_SIZE", "2").args(SHORT);
    command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("TORCHELASTIC_RUN_ID", "run");
    command.env("TORCHELASTIC_RESTART_COUNT", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn ranks_meet_through_its_store() {
    let (port, content) = store();
    let second: Child = rank("1", port).spawn().unwrap();
    let first = succeed(&mut rank("0", port));
    let second = second.wait_with_output().unwrap();
    assert!(second.status.success(), "{}", text(&second.stderr));
    assert_eq!(without_times(&first), without_times(&succeed(girandole().args(SHORT))));
    let keys: Vec<_> = content.lock().unwrap().keys().map(|key| text(key)).collect();
    assert_eq!(keys, ["girandole/run/1/"]);
}

#[test]
fn a_store_that_is_not_there_is_told() {
    let port = free_port();
    for number in ["0", "1"] {
        let output = rank(number, port).args(["--timeout", "0.5"]).output().unwrap();
        let line = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(line.contains(&format!("localhost:{port} (torchrun's store)")), "{line}");
    }
}
