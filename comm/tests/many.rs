//! Many ranks: they connect, run operations, and hold few connections. Each of a few processes runs an equal part of
//! the ranks, as threads. `MANY_RANKS=1000 cargo test --workspace --test many -- --nocapture` prints the figures for
//! more ranks.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, InitMethod, ReduceOp, Secret, Tcp, TcpConfig, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const PROCESSES: usize = 4;
const RANKS: &str = "MANY_RANKS";
const PART: &str = "MANY_PART";
const MEETING: &str = "MANY_MEETING";
const STACK: usize = 512 * 1024;

fn world_size() -> usize {
    std::env::var(RANKS).map_or(200, |ranks| ranks.parse().unwrap())
}

fn part(index: usize, world_size: usize) -> Range<usize> {
    index * world_size / PROCESSES..(index + 1) * world_size / PROCESSES
}

fn sockets() -> usize {
    let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// Runs one rank. Returns how long it took to connect, and to run its operations.
fn work(config: &TcpConfig, all_done: &Barrier) -> [Duration; 2] {
    let began = Instant::now();
    let comm = Tcp::connect(config).unwrap();
    let met = began.elapsed();
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let sum = Tensor::new(&[rank as i64, 1], &Device::Cpu).unwrap();
    comm.all_reduce(&sum, ReduceOp::Sum).unwrap().wait().unwrap();
    let expected = world_size * (world_size - 1) / 2;
    assert_eq!(sum.to_vec1::<i64>().unwrap(), [expected as i64, world_size as i64]);
    let news = Tensor::new(&[rank as f32 + 1.0; 3], &Device::Cpu).unwrap();
    comm.broadcast(&news, world_size / 3).unwrap().wait().unwrap();
    assert_eq!(news.to_vec1::<f32>().unwrap(), [(world_size / 3) as f32 + 1.0; 3]);
    // The ring has 2(P - 1) steps of P ranks, which take long on few cores.
    if world_size <= 200 {
        let ring = Tensor::ones(20_000, DType::F32, &Device::Cpu).unwrap();
        comm.all_reduce(&ring, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(ring.to_vec1::<f32>().unwrap(), vec![world_size as f32; 20_000]);
    }
    // One rank is slow, and all others ask what it is doing.
    if rank == world_size / 2 {
        std::thread::sleep(Duration::from_millis(1500));
    }
    comm.barrier().unwrap().wait().unwrap();
    let worked = began.elapsed() - met;
    // The process counts its sockets between these two waits, while all its ranks are connected.
    all_done.wait();
    all_done.wait();
    [met, worked]
}

/// Entry point of a process that runs a part of the ranks.
#[test]
fn process() {
    let (Ok(index), Some(meeting)) = (std::env::var(PART), std::env::var_os(MEETING)) else { return };
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let world_size = world_size();
    let ranks = part(index.parse().unwrap(), world_size);
    let all_done = Barrier::new(ranks.len() + 1);
    let before = sockets();
    let (times, open) = std::thread::scope(|scope| {
        let start = |rank| {
            let config = TcpConfig {
                rank,
                world_size,
                init_method: InitMethod::File(Path::new(&meeting).into()),
                timeout: Duration::from_secs(120),
                secret: Some(Secret::from_hex(&"5e".repeat(32)).unwrap()),
                transport: Transport::Tcp,
                ..TcpConfig::default()
            };
            let (all_done, thread) = (&all_done, std::thread::Builder::new().stack_size(STACK));
            thread.spawn_scoped(scope, move || work(&config, all_done)).unwrap()
        };
        let threads: Vec<_> = ranks.clone().map(start).collect();
        all_done.wait();
        let open = sockets() - before;
        all_done.wait();
        (threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>(), open)
    });
    // Rank 0's control connections, one to each other rank.
    let of_rank_0 = if ranks.start == 0 { world_size - 1 } else { 0 };
    let each = (open - of_rank_0) as f64 / ranks.len() as f64;
    let longest = |which: usize| times.iter().map(|times| times[which]).max().unwrap().as_secs_f64();
    println!(
        "ranks {ranks:?} of {world_size}: {each:.1} sockets a rank, met in {:.2} s, worked {:.2} s",
        longest(0),
        longest(1)
    );
    // A listener, six sockets within the process, one control connection; connections for a barrier and for small sums,
    // and to both neighbours.
    let log = f64::from(world_size.next_power_of_two().ilog2());
    assert!(each <= 10.0 + 4.0 * log, "{each} sockets a rank");
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ranks_hold_few_connections() {
    let folder = tempfile::tempdir().unwrap();
    let start = |index: usize| {
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["process", "--exact", "--nocapture", "--quiet"])
            .env(PART, index.to_string())
            .env(MEETING, folder.path().join("meeting"))
            .stdin(Stdio::null())
            .spawn();
        Process(process.unwrap())
    };
    let mut processes: Vec<_> = (0..PROCESSES).map(start).collect();
    assert!(processes.iter_mut().all(|process| process.0.wait().unwrap().success()));
}
