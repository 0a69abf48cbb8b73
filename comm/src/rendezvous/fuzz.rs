//! Fuzz targets: messages of the rendezvous, and the contents of meeting files and stores.
#![allow(clippy::unwrap_used)]

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{Entry, HELLO_LIMIT, Hello, LIMIT, MAX_HOST, ToLeader, ToMember};
use super::{meeting_file, store};
use crate::connection::obstacle::Obstacle;
use crate::connection::wire::{HandshakeStream, message_len, parse};
use crate::rendezvous::text::sanitize;
use crate::transport::site::Site;

/// The first byte selects the message type; the rest is parsed as one message, and as a stream of such messages.
pub(crate) fn read(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 5 {
        0 => all(rest, HELLO_LIMIT, hello),
        1 => all(rest, LIMIT, |_: ToLeader| {}),
        2 => all(rest, 16 * LIMIT, to_member),
        3 => drop(parse::<store::PublishedAddress>(rest)),
        _ => meeting_file::fuzz(rest),
    }
}

fn all<T: Serialize + DeserializeOwned + Debug>(data: &[u8], limit: usize, look: impl Fn(T)) {
    one(data, &look);
    let mut data = data;
    while let Some((announced, rest)) = data.split_first_chunk::<4>() {
        let Ok(len) = message_len(*announced, limit) else { return };
        assert!(len <= limit);
        let Some((message, rest)) = rest.split_at_checked(len) else { return };
        one(message, &look);
        data = rest;
    }
}

fn one<T: Serialize + DeserializeOwned + Debug>(text: &[u8], look: &impl Fn(T)) {
    let Ok(message) = parse::<T>(text) else { return };
    let frame = HandshakeStream::frame(&message).unwrap();
    let again: T = parse(&frame[4..]).unwrap();
    assert_eq!(format!("{message:?}"), format!("{again:?}"));
    look(message);
}

fn site(site: &Site) {
    let own = Site::own(Some(Obstacle::Unwanted));
    assert_eq!(site.obstacle_to(&own), own.obstacle_to(site));
}

fn hello(hello: Hello) {
    assert!(!sanitize(&hello.host, MAX_HOST).contains(char::is_control));
    site(&hello.site);
}

fn to_member(message: ToMember) {
    if let ToMember::Table(table) = message {
        let infos = table.ranks.iter().map(Entry::info);
        infos.for_each(|info| assert!(info.host.chars().count() <= MAX_HOST));
        table.ranks.iter().for_each(|entry| site(&entry.site));
    }
}
