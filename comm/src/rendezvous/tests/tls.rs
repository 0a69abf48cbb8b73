//! Ranks with encrypted connections, and ranks whose settings differ.

use super::*;
use crate::Tls;

fn encrypted(config: TcpConfig) -> TcpConfig {
    TcpConfig { tls: Tls::All, ..config }
}

fn short(config: TcpConfig) -> TcpConfig {
    TcpConfig { timeout: Duration::from_secs(5), ..config }
}

#[test]
fn they_meet_and_talk() {
    let (listener, port) = point();
    let mut ranks = vec![leading(encrypted(tcp(0, 4, port)), listener)];
    ranks.extend((1..4).map(|rank| joining(encrypted(tcp(rank, 4, port)))));
    check(&meetings(ranks));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    check(&meetings((0..3).map(|rank| joining(encrypted(file(rank, 3, &path)))).collect()));
}

/// Connections within a host are not encrypted where only those between hosts are to be.
#[test]
fn one_host_is_not_encrypted() {
    let (listener, port) = point();
    let hosts = TcpConfig { tls: Tls::Hosts, ..tcp(0, 2, port) };
    let meetings = meetings(vec![leading(hosts, listener), joining(tcp(1, 2, port))]);
    check(&meetings);
}

#[test]
fn one_that_encrypts_and_one_that_does_not_say_so() {
    let point_and_ranks = |tls: [Tls; 2]| {
        let (listener, port) = point();
        let [leader, member] = [0, 1].map(|rank| TcpConfig { tls: tls[rank], ..short(tcp(rank, 2, port)) });
        ends(vec![leading(leader, listener), joining(member)])
    };
    for (tls, said) in [
        ([Tls::All, Tls::Off], "the other side encrypts the connection, this one does not"),
        ([Tls::Off, Tls::All], "this side encrypts the connection, the other one does not"),
    ] {
        let ends = point_and_ranks(tls);
        let [leader, member] = [0, 1].map(|rank| ends[rank].as_ref().unwrap_err().to_string());
        assert!(member.contains(said) && member.contains("GIRANDOLE_TLS alike on every rank"), "{member}");
        assert!(leader.contains("rank 1 is missing"), "{leader}");
    }
}

#[test]
fn another_secret_is_named() {
    let (listener, port) = point();
    let wrong = TcpConfig { secret: Some(Secret::random().unwrap()), ..short(tcp(1, 2, port)) };
    let ends = ends(vec![leading(encrypted(short(tcp(0, 2, port))), listener), joining(encrypted(wrong))]);
    let [leader, member] = [0, 1].map(|rank| ends[rank].as_ref().unwrap_err().to_string());
    assert!(member.contains("did not accept this rank's proof: the secret"), "{member}");
    assert!(leader.contains("rank 1 is missing") && leader.contains("without proof"), "{leader}");
}
