//! Foreign connections to all ports of a two-node job, throughout its lifetime.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;

use crate::common::{Folder, free_port, girandole, succeed, text};
use crate::launch::nodes::{LIMIT, Nodes};
use crate::launch::shell::ranks_of_process;

/// What the foreign connections send; an empty one sends nothing.
const WORDS: [&[u8]; 6] = [
    b"",
    b"girandle\x05\0................................",
    b"girandle\x05\0................................\x01\0\0\0\x02\0\0\0\x01................................",
    b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    &[0xff; 4096],
];
/// Additional memory that a process may use under these connections, compared to an undisturbed run.
const MEMORY_KIB: u64 = 50 * 1024;
const TRAIN: [&str; 3] = ["ddp-transformer", "--epochs", "40"];

/// Starts a node of the job, with its output redirected to files.
fn start(folder: &Folder, node: &str, port: &str) -> Child {
    let mut command = girandole();
    command.args([
        "launch", "--nnodes", "2", "--nproc-per-node", "2", "--master-port", port, "--node-rank", node,
    ]);
    command.arg("--").arg("girandole").args(TRAIN);
    let file = |name: &str| File::create(folder.path(&format!("{name}-{node}"))).unwrap();
    command.stdout(file("out")).stderr(file("err")).spawn().unwrap()
}

/// Returns the loopback ports on which these processes listen.
fn ports(pids: &[u32]) -> Vec<SocketAddr> {
    let links = |pid: &u32| std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = pids.iter().flat_map(links).filter_map(|file| std::fs::read_link(file.path()).ok());
    let sockets: Vec<String> = targets.map(|target| target.to_string_lossy().into_owned()).collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let owned = sockets.contains(&format!("socket:[{}]", columns[9]));
        let port = u16::from_str_radix(columns[1].split_once(':')?.1, 16).ok()?;
        (owned && columns[3] == "0A").then(|| SocketAddr::from(([127, 0, 0, 1], port)))
    };
    table.lines().skip(1).filter_map(listening).collect()
}

/// Returns the peak memory of these processes, in KiB; processes that have ended are left out.
fn peaks(pids: &[u32]) -> Vec<u64> {
    let peak = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().strip_suffix(" kB")?.parse().ok()
    };
    pids.iter().filter_map(peak).collect()
}

/// Returns the process ids of launchers and their ranks.
fn processes(launchers: &[u32]) -> Vec<u32> {
    let ranks = launchers.iter().flat_map(|launcher| ranks_of_process(*launcher));
    launchers.iter().copied().chain(ranks.map(|pid| pid.as_raw_nonzero().get() as u32)).collect()
}

/// Connects to all ports of a node until `over` is set, and counts the connections.
fn attack(launcher: u32, over: &AtomicBool, made: &AtomicUsize) {
    let mut held = VecDeque::new();
    while !over.load(Ordering::Relaxed) {
        let ports = ports(&processes(&[launcher]));
        for (port, words) in ports.iter().flat_map(|port| WORDS.map(|words| (*port, words))) {
            let Ok(mut stream) = TcpStream::connect_timeout(&port, Duration::from_secs(5)) else { continue };
            let turn = made.fetch_add(1, Ordering::Relaxed);
            let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
            // The write fails if the connection is closed at once.
            let _ = stream.write_all(words);
            match turn % 3 {
                0 => drop(set_socket_linger(&stream, Some(Duration::ZERO))),
                _ => held.push_back(stream),
            }
            if held.len() > 200 {
                held.pop_front();
            }
        }
    }
}

/// Runs the job; node 1 is started when `meet_alone_until` returns true, and `before` is called with each launcher's
/// process id. Returns the highest peak seen, and what node 0 has printed.
fn run(meet_alone_until: impl Fn() -> bool, port: &str, before: impl Fn(u32)) -> (u64, String) {
    let folder = Folder::new();
    let mut nodes = Nodes(vec![start(&folder, "0", port)]);
    before(nodes.0[0].id());
    let began = Instant::now();
    while !meet_alone_until() {
        assert!(began.elapsed() < LIMIT && nodes.0[0].try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    nodes.0.push(start(&folder, "1", port));
    before(nodes.0[1].id());
    let launchers = [nodes.0[0].id(), nodes.0[1].id()];
    let mut peak = 0;
    while nodes.0.iter_mut().any(|node| node.try_wait().unwrap().is_none()) {
        peak = peaks(&processes(&launchers)).into_iter().fold(peak, u64::max);
        assert!(began.elapsed() < 2 * LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    let read = |name: &str| std::fs::read_to_string(folder.path(name)).unwrap();
    for (number, node) in nodes.0.iter_mut().enumerate() {
        assert!(node.wait().unwrap().success(), "{}", read(&format!("err-{number}")));
    }
    (peak, read("out-0"))
}

#[test]
fn a_job_of_two_nodes_among_strangers() {
    let bare = succeed(girandole().args(TRAIN).args(["--world-size", "4"]));
    let (normal, quiet) = run(|| true, &free_port().to_string(), |_| {});
    let (over, made) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (peak, noisy) = std::thread::scope(|scope| {
        let attack = |launcher: u32| {
            let (over, made) = (&over, &made);
            scope.spawn(move || attack(launcher, over, made));
        };
        let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run(|| made.load(Ordering::Relaxed) >= 500, &free_port().to_string(), attack)
        }));
        over.store(true, Ordering::Relaxed);
        end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert_eq!((quiet.as_str(), noisy.as_str()), (&*text(&bare.stdout), &*text(&bare.stdout)));
    println!("{} strangers; at most {normal} KiB without, {peak} KiB with them", made.into_inner());
    assert!(peak <= normal + MEMORY_KIB, "{peak} KiB, without strangers {normal} KiB");
}
