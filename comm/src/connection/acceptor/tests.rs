//! Acceptor tests: unauthenticated connections of all kinds, and ranks among them.

use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::mpsc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

use crate::connection::handshake::{Client, ClientClaim, KNOWN, Purpose};
use crate::{Secret, TcpConfig, Tls};

const HOUR: Duration = Duration::from_secs(3600);
const LIMITS: Limits = Limits { handshake: HOUR, at_once: 2, idle_grace: HOUR, handshake_grace: HOUR };

/// What becomes of a connection.
#[derive(Debug, PartialEq)]
enum Came {
    Rank(u32),
    TurnedAway,
    /// A rank's thread has ended.
    Ended,
}

/// Greets ranks, and waits for one more byte of each.
struct Host(Credentials, mpsc::Sender<Came>);

impl ConnectionHandler for Host {
    fn credentials(&self) -> &Credentials {
        &self.0
    }

    fn serve(&self, mut wire: HandshakeStream, admission: Admission, _: Instant) -> ConnectResult<()> {
        self.1.send(Came::Rank(admission.caller.rank)).unwrap();
        let outcome = wire.read::<1>(Instant::now() + HOUR).map(drop);
        let _ = self.1.send(Came::Ended);
        outcome
    }

    fn rejected(&self) {
        let _ = self.1.send(Came::TurnedAway);
    }
}

fn serve(limits: Limits) -> (Acceptor, SocketAddr, mpsc::Receiver<Came>) {
    serve_as(Credentials::new(None, ""), limits)
}

fn serve_as(credentials: Credentials, limits: Limits) -> (Acceptor, SocketAddr, mpsc::Receiver<Came>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, (here, came)) = (listener.local_addr().unwrap(), mpsc::channel());
    let host = Arc::new(Host(credentials, here));
    (Acceptor::start(vec![listener], limits, host, &PollThread::default()).unwrap(), address, came)
}

#[test]
fn ranks_come_over_each_of_several_addresses() {
    let listeners = ["127.0.0.1:0", "127.0.0.2:0"].map(|address| TcpListener::bind(address).unwrap());
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let (here, came) = mpsc::channel();
    let host = Arc::new(Host(Credentials::new(None, ""), here));
    let _acceptor =
        Acceptor::start(listeners.into(), Limits::default(), host, &PollThread::default()).unwrap();
    let mut streams = Vec::new();
    for (rank, address) in (1..).zip([addresses[1], addresses[0], addresses[1]]) {
        streams.push(prove(connect(address), rank).unwrap());
        assert!(matches!(came.recv().unwrap(), Came::Rank(number) if number == rank));
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).unwrap()
}

/// Completes the client's side of a handshake.
fn prove(mut stream: TcpStream, rank: u32) -> io::Result<TcpStream> {
    let credentials = Credentials::new(None, "");
    let caller = ClientClaim { rank, world_size: 8, purpose: Purpose::Control };
    let client = Client::new(&credentials, caller).unwrap();
    stream.write_all(client.opening())?;
    let mut opening = [0; 42];
    stream.read_exact(&mut opening)?;
    stream.write_all(&client.claim(opening).unwrap().0)?;
    Ok(stream)
}

/// Sends a valid opening and reads the server's, but sends no claim; `None` where the connection was closed.
fn speak(address: SocketAddr) -> Option<TcpStream> {
    speak_over(connect(address))
}

const CALLER: ClientClaim = ClientClaim { rank: 1, world_size: 8, purpose: Purpose::Control };

fn speak_over(mut stream: TcpStream) -> Option<TcpStream> {
    stream.write_all(Client::new(&Credentials::new(None, ""), CALLER).unwrap().opening()).ok()?;
    stream.read_exact(&mut [0; 42]).ok()?;
    Some(stream)
}

fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    stream.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

fn assert_closed(stream: &mut TcpStream) {
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn all_are_sent_away_when_it_stops() {
    let (acceptor, address, came) = serve(LIMITS);
    let (mut silent, mut speaking) = (connect(address), speak(address).unwrap());
    let mut rank = prove(connect(address), 3).unwrap();
    assert_eq!(came.recv(), Ok(Came::Rank(3)));
    drop(acceptor);
    [&mut silent, &mut speaking, &mut rank].into_iter().for_each(assert_closed);
    assert_eq!(came.iter().collect::<Vec<_>>(), [Came::Ended]);
}

#[test]
fn one_too_many_takes_the_place_of_the_oldest() {
    let (_acceptor, address, came) = serve(Limits { handshake_grace: Duration::ZERO, ..LIMITS });
    let (mut first, mut second) = (speak(address).unwrap(), speak(address).unwrap());
    let third = speak(address).unwrap();
    assert_closed(&mut first);
    let _fourth = speak(address).unwrap();
    assert_closed(&mut second);
    assert!(is_open(&third));
    assert_eq!([came.recv(), came.recv()], [Ok(Came::TurnedAway), Ok(Came::TurnedAway)]);
}

#[test]
fn one_too_many_is_sent_away_while_all_are_new() {
    let (_acceptor, address, came) = serve(Limits { at_once: 1, ..LIMITS });
    let first = speak(address).unwrap();
    // The repeated opening is answered before the repetition is noticed.
    speak(address).iter_mut().for_each(assert_closed);
    assert!(is_open(&first));
    drop(first);
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    assert!(is_open(&speak(address).unwrap()));
}

/// A connection from another address, which has fewer, gets a slot.
#[cfg(target_os = "linux")]
#[test]
fn one_address_does_not_take_all_places() {
    let from = |host: u8, address: SocketAddr| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, host], 0)).into()).unwrap();
        socket.connect(&address.into()).unwrap();
        TcpStream::from(socket)
    };
    let (_acceptor, address, came) = serve(LIMITS);
    let (mut first, second) = (speak(address).unwrap(), speak(address).unwrap());
    let other = speak_over(from(2, address)).unwrap();
    assert_closed(&mut first);
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    // Each address has one slot: a third one gets none.
    assert!(
        speak_over(from(3, address)).is_none_or(|mut third| matches!(third.read(&mut [0]), Ok(0) | Err(_)))
    );
    assert!(is_open(&second) && is_open(&other));

    let (_acceptor, address, _came) = serve(LIMITS);
    let (mut first, second) = (from(1, address), from(1, address));
    let other = from(2, address);
    assert_closed(&mut first);
    assert!(is_open(&second) && is_open(&other));
}

/// A client that only knows the protocol is refused at its first message, and takes no slot.
#[test]
fn who_does_not_hold_the_secret_takes_no_place() {
    let (_acceptor, address, came) = serve(Limits { at_once: 1, ..LIMITS });
    let secret = Secret::from_hex(&"a".repeat(64)).unwrap();
    for bytes in [KNOWN, *Client::new(&Credentials::new(Some(&secret), ""), CALLER).unwrap().opening()] {
        let mut stranger = connect(address);
        stranger.write_all(&bytes).unwrap();
        assert_eq!(came.recv(), Ok(Came::TurnedAway));
        stranger.read_exact(&mut [0; 42]).unwrap();
        assert_closed(&mut stranger);
    }
    assert!(is_open(&speak(address).unwrap()));
}

/// A TLS hello is no opening; and a replayed opening counts as a replay, whatever encryption follows it.
#[test]
fn encryption_begins_after_the_knock() {
    let secret = Some(Secret::from_hex(&"a".repeat(64)).unwrap());
    let credentials = Credentials::of(&TcpConfig { secret, tls: Tls::All, ..TcpConfig::default() }).unwrap();
    let (acceptor, address, came) = serve_as(credentials.clone(), Limits { at_once: 1, ..LIMITS });
    let hello = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &[7; 506]].concat();
    for bytes in [&hello[..], &KNOWN] {
        let mut stranger = connect(address);
        stranger.write_all(bytes).unwrap();
        assert_eq!(came.recv(), Ok(Came::TurnedAway));
        let mut rest = Vec::new();
        let _ = stranger.read_to_end(&mut rest);
    }
    let overheard = *Client::encrypting(&credentials, CALLER).unwrap().opening();
    let repeat = || {
        let mut stream = connect(address);
        stream.write_all(&[&overheard[..], &hello].concat()).unwrap();
        stream
    };
    // An invalid hello ends the connection.
    assert!(matches!(repeat().read_to_end(&mut Vec::new()), Ok(_) | Err(_)));
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    let rank =
        thread::spawn(move || HandshakeStream::connect(address, &credentials, CALLER, Instant::now() + HOUR));
    assert_eq!(came.recv(), Ok(Came::Rank(1)));
    // Nothing answers it here.
    drop(acceptor);
    assert!(rank.join().unwrap().is_err());
}

#[test]
fn who_repeats_what_another_has_said_takes_no_second_place() {
    let (_acceptor, address, came) = serve(LIMITS);
    let overheard = *Client::new(&Credentials::new(None, ""), CALLER).unwrap().opening();
    let repeat = || {
        let mut stream = connect(address);
        stream.write_all(&overheard).unwrap();
        stream.read_exact(&mut [0; 42]).unwrap();
        stream
    };
    let first = repeat();
    assert_closed(&mut repeat());
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    assert!(is_open(&first) && is_open(&speak(address).unwrap()));
    drop(first);
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    assert!(is_open(&repeat()));
}

/// An incomplete opening counts as silence.
#[test]
fn who_does_not_say_all_takes_a_place_of_the_silent() {
    let (_acceptor, address, came) = serve(Limits { at_once: 1, idle_grace: Duration::ZERO, ..LIMITS });
    let speaking = speak(address).unwrap();
    let begin = || {
        let mut stream = connect(address);
        stream.write_all(&KNOWN[..41]).unwrap();
        stream
    };
    let mut first = begin();
    let mut second = begin();
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    assert_closed(&mut first);
    // With the last byte it counts as an opening.
    second.write_all(b".").unwrap();
    assert_eq!(came.recv(), Ok(Came::TurnedAway));
    second.read_exact(&mut [0; 42]).unwrap();
    assert!(is_open(&speaking));
}

#[test]
fn the_silent_take_no_place_from_those_who_speak() {
    let (_acceptor, address, _came) = serve(LIMITS);
    let silent = [connect(address), connect(address)];
    // A client whose first message takes a moment may be closed as a silent one, and connects again as ranks do.
    let speaking = [(); 2].map(|()| std::iter::repeat_with(|| speak(address)).flatten().next().unwrap());
    assert_closed(&mut connect(address));
    assert!(silent.iter().chain(&speaking).all(is_open));
}

#[test]
fn who_is_no_stranger_any_more_is_never_sent_away() {
    let (_acceptor, address, came) = serve(Limits { at_once: 1, handshake_grace: Duration::ZERO, ..LIMITS });
    let streams = [1, 2, 3].map(|rank| {
        let stream = prove(connect(address), rank).unwrap();
        assert_eq!(came.recv(), Ok(Came::Rank(rank)));
        stream
    });
    assert!(streams.iter().all(is_open));
}

#[test]
fn who_drips_is_cut_off_at_the_deadline() {
    let (_acceptor, address, came) = serve(Limits { handshake: Duration::from_millis(100), ..LIMITS });
    let (mut silent, mut dripping) = (connect(address), connect(address));
    let mut opening = b"girandle".iter().cycle();
    loop {
        let _ = dripping.write(&[*opening.next().unwrap()]);
        if let Ok(came) = came.recv_timeout(Duration::from_millis(5)) {
            break assert_eq!(came, Came::TurnedAway);
        }
    }
    assert_closed(&mut silent);
}

/// Returns the number of threads of this process that greet.
#[cfg(target_os = "linux")]
fn greeting() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "girandole-greet").count()
}

/// Runs in its own process, without threads of other tests.
#[cfg(target_os = "linux")]
#[test]
fn strangers_have_no_threads() {
    if std::env::var_os(ALONE).is_none() {
        return alone("strangers_have_no_threads");
    }
    let (_acceptor, address, came) = serve(Limits { at_once: 51, ..LIMITS });
    let speaking: Vec<TcpStream> = (0..50).map(|_| speak(address).unwrap()).collect();
    assert_eq!(greeting(), 0);
    let _rank = prove(connect(address), 1).unwrap();
    assert_eq!(came.recv(), Ok(Came::Rank(1)));
    assert_eq!(greeting(), 1);
    assert!(speaking.iter().all(is_open));
}

const ALONE: &str = "GIRANDOLE_TEST_ALONE";

/// Runs in its own process: its limit of open files is below what the acceptor polls, so that `poll` fails.
fn out_of_files_for_a_while() {
    let (_acceptor, address, came) = serve(LIMITS);
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..limit }).unwrap();
    socket.connect(&address.into()).unwrap();
    // Nothing shows when `poll` has failed.
    thread::sleep(Duration::from_millis(300));
    setrlimit(Resource::Nofile, limit).unwrap();
    prove(socket.into(), 7).unwrap();
    assert_eq!(came.recv(), Ok(Came::Rank(7)));
}

#[test]
fn it_goes_on_when_there_are_files_again() {
    match std::env::var_os(ALONE) {
        Some(_) => out_of_files_for_a_while(),
        None => alone("it_goes_on_when_there_are_files_again"),
    }
}

/// Runs a test in its own process.
fn alone(test: &str) {
    let name = format!("connection::acceptor::tests::{test}");
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&name, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
