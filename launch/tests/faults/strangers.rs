//! Foreign processes connect to the ranks' ports, during the rendezvous and during the work.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::process::Pid;

use crate::group::{Group, Setup};

/// Returns the ports on which a process listens, found through its open sockets.
pub(crate) fn ports(pid: Pid) -> Vec<SocketAddr> {
    let pid = pid.as_raw_nonzero();
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok()?.to_str().map(String::from));
    let sockets: Vec<String> = targets
        .filter_map(|target| target.strip_prefix("socket:[")?.strip_suffix(']').map(String::from))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listening = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (address, port) = columns[1].split_once(':')?;
        let loopback =
            address == "0100007F" && columns[3] == "0A" && sockets.iter().any(|own| own == columns[9]);
        loopback.then(|| SocketAddr::from(([127, 0, 0, 1], u16::from_str_radix(port, 16).unwrap())))
    };
    table.lines().skip(1).filter_map(listening).collect()
}

/// Waits until ranks 0 to 2 wait for rank 3, and returns their ports: the rendezvous port and one data port for each.
pub(crate) fn waiting(group: &Group) -> Vec<SocketAddr> {
    loop {
        let found = [0, 1, 2].map(|rank| ports(group.pid(rank)));
        // A rank only listens for data once it is registered with rank 0.
        if found[0].len() == 2 && found[1].len() == 1 && found[2].len() == 1 {
            return found.concat();
        }
        std::thread::yield_now();
    }
}

/// Ranks 0 to 2 wait, strangers connect, then the last rank joins; with `again`, strangers connect again while the
/// group works. The strangers' connections are held until the end.
fn visit<T>(again: bool, strangers: impl Fn(&Group, &[SocketAddr]) -> T) {
    // The first call uses the ring; the barrier makes ranks connect that are not neighbours.
    let script = "all_reduce f32 100000 sum; ready; await; barrier; all_reduce f32 10 sum";
    let mut group = Group::empty(4, &Setup::default());
    (0..3).for_each(|rank| group.add(rank, script));
    let ports = waiting(&group);
    let meeting = group.meeting_point();
    let held = strangers(&group, &ports);
    group.add(3, script);
    group.ready(group.all());
    // The rendezvous port is closed; the data ports stay open.
    assert!(TcpStream::connect(meeting).is_err());
    let ports: Vec<SocketAddr> = group.all().flat_map(|rank| self::ports(group.pid(rank))).collect();
    assert_eq!(ports.len(), 4);
    let held = (held, again.then(|| strangers(&group, &ports)));
    group.tell_all(0..4);
    group.assert_all_done();
    assert!(ports.iter().all(|port| TcpStream::connect(port).is_err()));
    drop(held);
}

fn connect(port: &SocketAddr) -> TcpStream {
    TcpStream::connect(port).unwrap()
}

#[test]
fn that_say_nothing() {
    visit(true, |_, ports| ports.iter().flat_map(|port| [connect(port), connect(port)]).collect::<Vec<_>>());
}

#[test]
fn that_go_at_once() {
    visit(true, |_, ports| {
        for port in ports {
            drop(connect(port));
            connect(port).shutdown(Shutdown::Write).unwrap();
        }
    });
}

#[test]
fn that_talk_rubbish() {
    let http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    let magic_only = b"girandle".to_vec();
    let another_version = [&b"girandle\xff\xff"[..], &[7; 32]].concat();
    let no_proof = [&b"girandle\x06\x00"[..], &[7; 32], &[0; 41]].concat();
    let long = vec![0xff; 1 << 20];
    let rubbish = [http, magic_only, another_version, no_proof, long];
    visit(true, |_, ports| {
        let mut held = Vec::new();
        for (port, text) in ports.iter().flat_map(|port| rubbish.iter().map(move |text| (port, text))) {
            let mut stream = connect(port);
            stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
            // The rest cannot be written if the rank has closed the connection.
            let _ = stream.write_all(text);
            held.push(stream);
        }
        held
    });
}

#[test]
fn with_another_secret() {
    visit(false, |group, _| {
        let setup = Setup { secret: "1d".repeat(32), timeout: Duration::from_secs(1), ..Setup::default() };
        let ending = group.pretender(3, &setup);
        let failure = ending.failure.as_ref().unwrap();
        assert_eq!(failure.kind, "Rendezvous", "{ending:#?}");
        assert!(failure.text.contains("secret"), "{}", failure.text);
        assert_eq!(ending.code, Some(1));
    });
}

/// More than are served at once: ranks are accepted when the first connections have timed out.
#[test]
fn two_hundred_at_once() {
    visit(true, |_, ports| {
        ports.iter().flat_map(|port| (0..200).map(move |_| connect(port))).collect::<Vec<_>>()
    });
}
