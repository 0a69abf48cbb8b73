//! Shared memory between ranks, as processes and as threads: which ranks use it, and what is left when one is killed.
#![cfg(all(target_os = "linux", not(portable)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "all of it is test")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Error, InitMethod, Operation, ReduceOp, Result, Secret, Tcp, TcpConfig, Transport};

const ROLE: &str = "SHM_TEST_ROLE";
const RANK: &str = "SHM_TEST_RANK";
const MEETING: &str = "SHM_TEST_MEETING";
const WORLD_SIZE: usize = 3;

fn config(rank: usize, meeting: &Path, transport: Transport) -> TcpConfig {
    TcpConfig {
        rank,
        world_size: WORLD_SIZE,
        init_method: InitMethod::File(meeting.into()),
        timeout: Duration::from_secs(30),
        secret: Some(Secret::from_hex(&"5e".repeat(32)).unwrap()),
        transport,
        ..TcpConfig::default()
    }
}

fn connect(rank: usize, meeting: &Path, transport: Transport) -> Result<Tcp> {
    Tcp::connect(&config(rank, meeting, transport))
}

fn sum(comm: &Tcp, len: usize) -> Result<()> {
    let tensor = Tensor::ones(len, DType::F32, &Device::Cpu)?;
    comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    assert_eq!(tensor.to_vec1::<f32>()?, vec![comm.world_size() as f32; len]);
    Ok(())
}

/// Entry point of the processes of the tests below, which are the ranks.
#[test]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let rank: usize = std::env::var(RANK).unwrap().parse().unwrap();
    let comm = connect(rank, Path::new(&std::env::var_os(MEETING).unwrap()), Transport::Shm).unwrap();
    sum(&comm, 1_000_000).unwrap();
    if role == "first leaves" && rank == 0 {
        drop(comm);
        println!("\nleft");
        return;
    }
    println!("\nready");
    let error = loop {
        let tensor = Tensor::zeros(100_000, DType::F32, &Device::Cpu).unwrap();
        let operation = match role.as_str() {
            "first leaves" if rank == 2 => {
                std::thread::sleep(Duration::from_secs(60));
                return;
            }
            "first leaves" => Operation::Recv { tensor, from: 2 },
            _ => Operation::AllReduce { tensor, op: ReduceOp::Sum },
        };
        if let Err(error) = comm.run(operation) {
            break error;
        }
    };
    println!("error {error}");
}

struct Rank(Child, BufReader<std::process::ChildStdout>);

impl Rank {
    fn start(rank: usize, role: &str, meeting: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["process", "--exact", "--nocapture", "--quiet"])
            .env(ROLE, role)
            .env(RANK, rank.to_string())
            .env(MEETING, meeting)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self(child, stdout)
    }

    fn line(&mut self, start: &str) -> String {
        let found =
            self.1.by_ref().lines().map_while(std::io::Result::ok).find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no line with {start}"))
    }

    fn holds(&self) -> String {
        let folder = format!("/proc/{}", self.0.id());
        let files = fs::read_dir(format!("{folder}/fd")).unwrap();
        let files = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok());
        let files: Vec<String> = files.map(|file| file.display().to_string()).collect();
        fs::read_to_string(format!("{folder}/maps")).unwrap() + &files.join("\n")
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(role: &str, meeting: &Path) -> Vec<Rank> {
    (0..WORLD_SIZE).map(|rank| Rank::start(rank, role, meeting)).collect()
}

#[test]
fn a_killed_rank_is_named_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start("all", &folder.path().join("meeting"));
    for rank in &mut ranks {
        rank.line("ready");
        let holds = rank.holds();
        assert!(holds.contains("/memfd:girandole (deleted)"), "memory without a name: {holds}");
        assert!(!holds.contains("/dev/shm"), "{holds}");
    }
    ranks[1].0.kill().unwrap();
    let killed = Instant::now();
    for rank in [0, 2] {
        let error = ranks[rank].line("error");
        assert!(error.contains("rank 1") && error.contains("died"), "{error}");
    }
    assert!(killed.elapsed() < Duration::from_secs(5));
    let names = fs::read_dir("/dev/shm").unwrap().map(|file| file.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_string_lossy().contains("girandole")).count(), 0);
}

#[test]
fn a_rank_that_is_killed_after_rank_0_has_left_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start("first leaves", &folder.path().join("meeting"));
    ranks[0].line("left");
    ranks[2].line("ready");
    ranks[1].line("ready");
    std::thread::sleep(Duration::from_millis(100));
    ranks[2].0.kill().unwrap();
    let killed = Instant::now();
    let error = ranks[1].line("error");
    assert!(error.contains("rank 2") && error.contains("died"), "{error}");
    assert!(killed.elapsed() < Duration::from_secs(5));
}

/// Runs the ranks as threads. Returns, for each, the result of `body` for its communicator.
fn threads<T: Send>(transports: [Transport; WORLD_SIZE], body: impl Fn(Result<Tcp>) -> T + Sync) -> Vec<T> {
    let folder = tempfile::tempdir().unwrap();
    let meeting = folder.path().join("meeting");
    std::thread::scope(|scope| {
        let start = |(rank, transport)| {
            let (meeting, body) = (&meeting, &body);
            scope.spawn(move || body(connect(rank, meeting, transport)))
        };
        let threads: Vec<_> = transports.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_of_one_host_share_memory_unasked() {
    let shared = threads([Transport::Auto; 3], |comm| comm.unwrap().shared_memory_ranks().to_vec());
    assert_eq!(shared, [[1, 2], [0, 2], [0, 1]]);
    let shared = threads([Transport::Tcp; 3], |comm| comm.unwrap().shared_memory_ranks().len());
    assert_eq!(shared, [0; 3]);
}

#[test]
fn memory_and_sockets_mix() {
    let shared = threads([Transport::Auto, Transport::Auto, Transport::Tcp], |comm| {
        let comm = comm.unwrap();
        for len in [0, 1, 1000, 50_000, 2_000_000, 7, 300_001] {
            sum(&comm, len).unwrap();
            comm.barrier().unwrap().wait().unwrap();
        }
        comm.shared_memory_ranks().to_vec()
    });
    assert_eq!(shared, [vec![1], vec![0], vec![]]);
}

#[test]
fn asked_for_and_impossible_is_an_error_that_says_why() {
    let ends = threads([Transport::Shm, Transport::Auto, Transport::Tcp], |comm| comm.map(drop));
    let error = ends[0].as_ref().unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("rank 2") && message.contains("told to use TCP"), "{message}");
}

#[test]
fn a_message_of_a_rank_that_has_left_is_still_received() {
    threads([Transport::Shm; 3], |comm| {
        let comm = comm.unwrap();
        let tensor = Tensor::ones(50_000, DType::F32, &Device::Cpu).unwrap();
        comm.barrier().unwrap().wait().unwrap();
        match comm.rank() {
            1 => comm.send(&tensor, 0).unwrap().wait().unwrap(),
            0 => {
                std::thread::sleep(Duration::from_millis(200));
                let incoming = tensor.zeros_like().unwrap();
                comm.recv(&incoming, 1).unwrap().wait().unwrap();
                assert_eq!(incoming.to_vec1::<f32>().unwrap(), vec![1.0; 50_000]);
                let error = comm.recv(&incoming, 1).unwrap().wait().unwrap_err();
                assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
            }
            _ => {}
        }
    });
}
