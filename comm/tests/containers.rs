//! Ranks in separate namespaces, as in containers: the transport is chosen by which ranks can reach each other, not by
//! host names.
#![cfg(all(target_os = "linux", not(portable)))]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, ReduceOp, Result, Secret, Tcp, TcpConfig, Transport};

const ROLE: &str = "CONTAINER_TEST_ROLE";
const WORLD_SIZE: usize = 3;
/// A container with its own network, and one that shares the host's network but no other namespace.
const CONTAINERS: [&[&str]; 2] =
    [&["--net"], &["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]];
const ADDRESSES: [&str; WORLD_SIZE] = ["10.9.0.1", "10.9.0.2", "10.9.0.1"];
/// A host with a separate, empty network.
const HOST: [&str; 6] = ["--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"];

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}: {status}");
}

fn this_test(mut command: Command, role: &str) -> Command {
    command.arg(std::env::current_exe().unwrap());
    command.args(["process", "--exact", "--nocapture", "--quiet"]).env(ROLE, role);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn connect(rank: usize, port: u16, transport: Transport) -> Result<Tcp> {
    Tcp::connect(&TcpConfig {
        rank,
        world_size: WORLD_SIZE,
        init_method: format!("tcp://{}:{port}", ADDRESSES[0]).parse()?,
        bind: ADDRESSES[rank].parse().unwrap(),
        timeout: Duration::from_secs(30),
        secret: Some(Secret::from_hex(&"5e".repeat(32))?),
        transport,
        ..TcpConfig::default()
    })
}

fn sum(comm: &Tcp, len: usize) {
    let tensor = Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
    comm.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), vec![WORLD_SIZE as f32; len]);
}

fn rank(rank: usize) {
    let comm = connect(rank, 29500, TcpConfig::default().transport).unwrap();
    [1, 1000, 300_000].into_iter().for_each(|len| sum(&comm, len));
    assert_eq!(comm.shared_memory_ranks(), [&[2][..], &[], &[0]][rank]);
    drop(comm);
    // A rank that requires shared memory gets an error that says why it is not possible.
    let wanted = if rank == 1 { Transport::Shm } else { Transport::Auto };
    let outcome = connect(rank, 29501, wanted).map(|comm| comm.barrier().and_then(comm::Work::wait));
    if rank == 1 {
        let message = outcome.unwrap_err().to_string();
        assert!(
            message.contains("do not reach each other (containers with networks of their own?)"),
            "{message}"
        );
    }
}

/// Waits for a line that begins with `start`, and returns the rest of it.
fn line(child: &mut Child, start: &str) -> String {
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map_while(std::io::Result::ok);
    lines.find_map(|line| line.strip_prefix(start).map(String::from)).unwrap()
}

fn host() {
    let start = |(index, namespaces): (usize, &&[&str])| {
        let mut container = Command::new("unshare");
        container.args(*namespaces);
        this_test(container, &(index + 1).to_string()).spawn().unwrap()
    };
    let mut containers: Vec<Child> = CONTAINERS.iter().enumerate().map(start).collect();
    let pid = line(&mut containers[0], "process ");
    ip("link set lo up");
    ip(&format!("link add veth0 type veth peer name veth1 netns {pid}"));
    ip("addr add 10.9.0.1/24 dev veth0");
    ip("link set veth0 up");
    for container in &mut containers {
        container.stdin.take().unwrap().write_all(b"go\n").unwrap();
    }
    rank(0);
    for mut container in containers {
        assert!(container.wait().unwrap().success());
    }
}

/// Not a test by itself: the entry point of the processes of the test below.
#[test]
fn process() {
    match std::env::var(ROLE).as_deref() {
        Err(_) => {}
        Ok("host") => host(),
        Ok(number) => {
            println!("\nprocess {}", std::process::id());
            stdin().read_line(&mut String::new()).unwrap();
            if number == "1" {
                ip("link set lo up");
                ip("addr add 10.9.0.2/24 dev veth1");
                ip("link set veth1 up");
            } else {
                assert!(Command::new("hostname").arg("elsewhere").status().unwrap().success());
            }
            rank(number.parse().unwrap());
        }
    }
}

/// All run on one kernel. One has its own network and the host's name; another has the host's network and its own name.
#[test]
fn memory_is_shared_where_it_can_be_handed_over() {
    let allowed =
        Command::new("unshare").args(HOST).args(["ip", "link", "add", "name", "a", "type", "veth"]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        println!("this system lets nobody make namespaces here: nothing is tested");
        return;
    }
    let mut host = Command::new("unshare");
    host.args(HOST);
    let output = this_test(host, "host").stderr(Stdio::piped()).stdin(Stdio::null()).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
