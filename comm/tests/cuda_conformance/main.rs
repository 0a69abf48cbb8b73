//! The conformance suite on tensors of one CUDA device: over TCP with 2 and 4 ranks that share it, and over NCCL with one.
//!
//! `scripts/gpu-check.sh` runs this, by the arguments `tcp` or `nccl` and the number of ranks.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, dead_code)]

#[path = "../conformance/batch.rs"]
mod batch;
#[path = "../conformance/cases.rs"]
mod cases;
#[path = "../conformance/groups.rs"]
mod groups;
#[path = "../conformance/halves.rs"]
mod halves;
#[path = "../conformance/moves.rs"]
mod moves;
#[path = "../conformance/reference.rs"]
mod reference;
#[path = "../conformance/uneven.rs"]
mod uneven;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use candle_core::Device;
use comm::{Communicator, CudaLibrary, InitMethod, Result, Secret, Tcp, TcpConfig, Transport};

/// Runs `body` on every rank of a group of one backend.
trait Backend {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync));
}

/// Where the tensors are.
fn device() -> Device {
    DEVICE.get().unwrap().clone()
}

static DEVICE: OnceLock<Device> = OnceLock::new();

/// A thread for each rank; nothing where the number of ranks is another one.
struct Ranks {
    engine: &'static str,
    world_size: usize,
    transport: Transport,
}

impl Ranks {
    fn connect(&self, config: &TcpConfig) -> Result<Box<dyn Communicator>> {
        match self.engine {
            #[cfg(feature = "nccl")]
            "nccl" => Ok(Box::new(comm::Nccl::connect(config, &device())?)),
            _ => Ok(Box::new(Tcp::connect(config)?)),
        }
    }
}

impl Backend for Ranks {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync)) {
        if world_size != self.world_size {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let config = TcpConfig {
            world_size,
            init_method: InitMethod::File(folder.path().join("meeting")),
            timeout: Duration::from_secs(60),
            secret: Some(Secret::random().unwrap()),
            transport: self.transport,
            ..TcpConfig::default()
        };
        std::thread::scope(|scope| {
            for rank in 0..world_size {
                let config = TcpConfig { rank, ..config.clone() };
                scope.spawn(move || {
                    let run = || body(&*self.connect(&config)?);
                    run().unwrap_or_else(|error| panic!("rank {rank} of {world_size}: {error}"));
                });
            }
        });
    }
}

type Case = (&'static str, fn(&dyn Backend));

const CASES: [Case; 23] = [
    ("all_reduce", cases::all_reduce),
    ("reduce", cases::reduce),
    ("broadcast", cases::broadcast),
    ("all_gather", cases::all_gather),
    ("reduce_scatter", cases::reduce_scatter),
    ("gather", moves::gather),
    ("scatter", moves::scatter),
    ("all_to_all", moves::all_to_all),
    ("uneven parts", uneven::collectives),
    ("uneven all_to_all", uneven::all_to_all),
    ("counts that differ", uneven::mismatches),
    ("views", moves::views),
    ("large tensors", moves::chain),
    ("messages", cases::messages),
    ("batches", batch::rings),
    ("batches and single messages", batch::with_single_messages),
    ("coalesced", batch::coalesced),
    ("halves are rounded once", halves::are_rounded_once),
    ("groups", groups::at_the_same_time),
    ("groups that close", groups::closing),
    ("groups that are refused", groups::mistakes),
    ("queued operations keep their order", cases::queued),
    ("mistakes leave the group usable", cases::mistakes),
];

fn check(ranks: &Ranks) {
    let Ranks { engine, world_size, transport } = ranks;
    println!("{engine}, {world_size} rank(s), {transport:?}");
    for (name, case) in CASES {
        let began = Instant::now();
        case(ranks);
        println!("  {name}: ok, {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// What `tcp N` and `nccl N` stand for, all without an argument.
fn chosen(arguments: &[String]) -> std::result::Result<Vec<Ranks>, String> {
    let ranks = |engine, world_size, transport| Ranks { engine, world_size, transport };
    let over_tcp =
        |world_size| [Transport::Tcp, Transport::Shm].map(|transport| ranks("tcp", world_size, transport));
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [engine @ ("tcp" | "nccl"), count] => {
            let world_size = count.parse().map_err(|_| format!("{count}: give a number of ranks"))?;
            if engine == "tcp" {
                return Ok(over_tcp(world_size).into());
            }
            if cfg!(not(feature = "nccl")) {
                return Err("this build has no NCCL in it".into());
            }
            Ok(vec![ranks("nccl", world_size, Transport::Auto)])
        }
        // What cargo passes on is for tests of another kind.
        _ => {
            let nccl = cfg!(feature = "nccl").then(|| ranks("nccl", 1, Transport::Auto));
            Ok(over_tcp(2).into_iter().chain(over_tcp(4)).chain(nccl).collect())
        }
    }
}

fn open() -> std::result::Result<Device, String> {
    for library in [CudaLibrary::Driver, CudaLibrary::Cublas, CudaLibrary::Curand] {
        library.load().map_err(|error| error.to_string())?;
    }
    Device::new_cuda_with_stream(0).map_err(|error| format!("CUDA device 0 cannot be used: {error}"))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let begun = chosen(&arguments).and_then(|all| Ok((all, open()?)));
    match begun {
        Ok((all, device)) => {
            DEVICE.get_or_init(|| device);
            all.iter().for_each(check);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}
