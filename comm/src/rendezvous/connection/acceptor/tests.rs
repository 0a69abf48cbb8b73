//! Strangers of all kinds, and ranks among them.

use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::mpsc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

const HOUR: Duration = Duration::from_secs(3600);
const LIMITS: Limits = Limits { handshake: HOUR, at_once: 2, silence: HOUR, patience: HOUR };

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// One whose greeting is to wait for a second byte; each name comes when it has been read.
fn serve(limits: Limits) -> (Acceptor, SocketAddr, mpsc::Receiver<u8>) {
    let ((listener, address), (here, came)) = (listener(), mpsc::channel());
    let greet = move |mut wire: Wire, deadline, _slot: GuestSlot<'_>| {
        let [name] = wire.read::<1>(deadline)?;
        here.send(name).unwrap();
        wire.read::<1>(deadline).map(drop)
    };
    (Acceptor::start(listener, limits, Arc::new(greet)).unwrap(), address, came)
}

fn say(address: SocketAddr, name: u8) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&[name]).unwrap();
    stream
}

/// One that comes again where it is sent away, as ranks do: among silent ones, whose word takes a moment is taken for one of them.
fn say_until_heard(address: SocketAddr, name: u8, came: &mpsc::Receiver<u8>) -> TcpStream {
    loop {
        let stream = say(address, name);
        stream.set_nonblocking(true).unwrap();
        let is_open = || stream.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        while is_open() {
            if let Ok(heard) = came.recv_timeout(Duration::from_millis(5)) {
                assert_eq!(heard, name);
                return stream;
            }
        }
    }
}

fn assert_open(mut stream: TcpStream) {
    stream.set_nonblocking(true).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "it is still there");
}

#[test]
fn all_are_sent_away_when_it_stops() {
    let (acceptor, address, came) = serve(LIMITS);
    let (mut silent, mut talking) = (TcpStream::connect(address).unwrap(), say(address, 1));
    came.recv().unwrap();
    drop(acceptor);
    for stream in [&mut silent, &mut talking] {
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
    }
    // Its port may be another's by now.
    assert!(came.recv().is_err(), "nobody greets any more");
}

#[test]
fn one_too_many_takes_the_place_of_the_oldest() {
    let (_acceptor, address, came) = serve(Limits { patience: Duration::ZERO, ..LIMITS });
    let connect = |name| {
        let stream = say(address, name);
        assert_eq!(came.recv().unwrap(), name);
        stream
    };
    let (mut first, mut second, third) = (connect(1), connect(2), connect(3));
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "the first was sent away");
    let _fourth = connect(4);
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "then the second");
    assert_open(third);
}

#[test]
fn one_too_many_is_sent_away_while_all_are_new() {
    let (_acceptor, address, came) = serve(Limits { at_once: 1, ..LIMITS });
    let first = say(address, 1);
    came.recv().unwrap();
    assert!(matches!(say(address, 2).read(&mut [0]), Ok(0) | Err(_)));
    drop(first);
    // Its place becomes free some time after it is gone.
    while came.try_recv().is_err() {
        let mut again = say(address, 3);
        again.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let _ = again.read(&mut [0]);
    }
}

#[test]
fn the_silent_take_no_place_from_those_who_speak() {
    let (_acceptor, address, came) = serve(LIMITS);
    let silent = [TcpStream::connect(address).unwrap(), TcpStream::connect(address).unwrap()];
    let talking = [1, 2].map(|name| say_until_heard(address, name, &came));
    let mut one_more = TcpStream::connect(address).unwrap();
    assert_eq!(one_more.read(&mut [0]).unwrap(), 0, "one too many that says nothing");
    talking.into_iter().chain(silent).for_each(assert_open);
}

#[test]
fn who_is_no_stranger_any_more_is_never_sent_away() {
    let ((listener, address), (here, came)) = (listener(), mpsc::channel());
    let greet = move |mut wire: Wire, deadline, slot: GuestSlot<'_>| {
        let [name] = wire.read::<1>(deadline)?;
        drop(slot);
        here.send(name).unwrap();
        wire.read::<1>(deadline).map(drop)
    };
    let limits = Limits { at_once: 1, patience: Duration::ZERO, ..LIMITS };
    let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
    let streams = [1, 2, 3].map(|name| {
        let stream = say(address, name);
        assert_eq!(came.recv().unwrap(), name);
        stream
    });
    streams.into_iter().for_each(assert_open);
}

#[test]
fn who_drips_is_cut_off_at_the_deadline() {
    let (listener, address) = listener();
    let limits = Limits { handshake: Duration::from_millis(100), ..LIMITS };
    let (end, ended) = mpsc::channel();
    let greet = move |mut wire: Wire, deadline, _slot: GuestSlot<'_>| {
        let fault = wire.read::<1000>(deadline).map(drop);
        end.send(format!("{fault:?}")).unwrap();
        fault
    };
    let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
    let mut silent = TcpStream::connect(address).unwrap();
    let mut dripping = TcpStream::connect(address).unwrap();
    let outcome = loop {
        let _ = dripping.write(&[7]);
        if let Ok(outcome) = ended.recv_timeout(Duration::from_millis(5)) {
            break outcome;
        }
    };
    assert_eq!(outcome, "Err(TimedOut)");
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
}

const ALONE: &str = "GIRANDOLE_TEST_ALONE";

/// In a process of its own: its limit of open files is below what the acceptor waits for, so that the system refuses to wait.
fn out_of_files_for_a_while() {
    let (_acceptor, address, came) = serve(LIMITS);
    let mut socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..limit }).unwrap();
    socket.connect(&address.into()).unwrap();
    // Nothing shows that it has been refused.
    thread::sleep(Duration::from_millis(300));
    setrlimit(Resource::Nofile, limit).unwrap();
    socket.write_all(&[7]).unwrap();
    assert_eq!(came.recv(), Ok(7));
}

#[test]
fn it_goes_on_when_there_are_files_again() {
    if std::env::var_os(ALONE).is_some() {
        return out_of_files_for_a_while();
    }
    let name = "rendezvous::connection::acceptor::tests::it_goes_on_when_there_are_files_again";
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
