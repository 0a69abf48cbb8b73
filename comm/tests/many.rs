//! Many ranks: they connect, run operations, and hold few connections. Rank 0 is a process; each of a few others runs an
//! equal part of the other ranks, as threads. `MANY_RANKS=1000 cargo test --workspace --test many -- --nocapture` prints
//! the figures for more ranks.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, InitMethod, ReduceOp, Secret, Tcp, TcpConfig, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::with_default;
use tracing::{Event, Metadata, Subscriber};

/// Processes beside that of rank 0, for each of which the system limits the open files.
fn processes(world_size: usize) -> usize {
    3.max(world_size / 256)
}

const RANKS: &str = "MANY_RANKS";
const PART: &str = "MANY_PART";
const MEETING: &str = "MANY_MEETING";
const STACK: usize = 512 * 1024;

fn world_size() -> usize {
    std::env::var(RANKS).map_or(200, |ranks| ranks.parse().unwrap())
}

/// Rank 0 alone, so that its process's time is its own.
fn part(index: usize, world_size: usize) -> Range<usize> {
    let begin =
        |index: usize| index.min(1) + index.saturating_sub(1) * (world_size - 1) / processes(world_size);
    begin(index)..begin(index + 1)
}

/// What rank 0 says of a meeting that it has brought together (`rendezvous/leader.rs`).
#[derive(Default)]
struct MeetingCosts(Mutex<HashMap<&'static str, u64>>);

impl Visit for &MeetingCosts {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.lock().unwrap().insert(field.name(), value);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// Passes the costs of meetings to the test.
struct Listens(Arc<MeetingCosts>);

impl Subscriber for Listens {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "comm::rendezvous::leader"
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut &*self.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Connects rank 0, and checks what it costs: the table goes to 8 ranks, a short message to each other one, and rank 0 looks at
/// each rank about once.
fn connect_rank_0(config: &TcpConfig) -> Tcp {
    let costs = Arc::new(MeetingCosts::default());
    let comm = with_default(Listens(costs.clone()), || Tcp::connect(config)).unwrap();
    let costs = costs.0.lock().unwrap();
    let ranks = config.world_size as u64;
    let of = |name| costs[name];
    println!(
        "rank 0 of {ranks}: {} bytes sent, {} wake-ups, {} looks",
        of("bytes"),
        of("wake_ups"),
        of("looks")
    );
    assert_eq!(of("ranks"), ranks);
    assert!(of("bytes") < ranks * (8 * 200 + 400), "{} bytes", of("bytes"));
    assert!(of("wake_ups") <= ranks && of("looks") < 2 * ranks);
    comm
}

/// Returns the processor time of this process so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn sockets() -> usize {
    let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// Runs one rank. Returns how long it took to connect, to make a group of all ranks, and to run its operations.
fn work(config: &TcpConfig, all_done: &Barrier) -> [Duration; 3] {
    let (began, before) = (Instant::now(), processor_time());
    let comm = if config.rank == 0 { connect_rank_0(config) } else { Tcp::connect(config).unwrap() };
    let met = began.elapsed();
    let spent = processor_time() - before;
    let all: Vec<usize> = (0..config.world_size).collect();
    let group = comm.new_group(&all).unwrap();
    let grouped = began.elapsed() - met;
    if config.rank == 0 {
        let spent_on_group = processor_time() - before - spent;
        println!(
            "rank 0 of {}: {spent:.3?} of processor time to meet, {spent_on_group:.3?} for a group of all",
            config.world_size
        );
    }
    drop(group);
    let began_work = Instant::now();
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
    let worked = began_work.elapsed();
    // The process counts its sockets between these two waits, while all its ranks are connected.
    all_done.wait();
    all_done.wait();
    [met, grouped, worked]
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
        "ranks {ranks:?} of {world_size}: {each:.1} sockets a rank, met in {:.2} s, again in {:.2} s, worked {:.2} s",
        longest(0),
        longest(1),
        longest(2)
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
    let mut processes: Vec<_> = (0..=processes(world_size())).map(start).collect();
    assert!(processes.iter_mut().all(|process| process.0.wait().unwrap().success()));
}
