//! The conformance suite on CUDA tensors, over NCCL and over TCP, and what becomes of faults. It runs on GPUs, and on what
//! stands in for them: see `scripts/check-nccl.sh`.
//!
//! Without arguments: everything. `nccl N` and `tcp N` run the cases on N ranks, `faults` the faults. Where the machine lacks
//! what that needs, one line says what, and it exits with 2.
#![allow(clippy::unwrap_used, clippy::print_stdout, dead_code)]

#[path = "../conformance/batch.rs"]
mod batch;
#[path = "../conformance/cases.rs"]
mod cases;
mod faults;
#[path = "../conformance/groups.rs"]
mod groups;
#[path = "../conformance/halves.rs"]
mod halves;
#[path = "../conformance/list.rs"]
mod list;
#[path = "../conformance/moves.rs"]
mod moves;
#[path = "../conformance/overlaps.rs"]
mod overlaps;
#[path = "../conformance/reference.rs"]
mod reference;
#[path = "../conformance/uneven.rs"]
mod uneven;

use std::cell::RefCell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::cuda::cudarc::driver::result as driver;
use candle_core::{Device, Tensor};
use comm::{Communicator, CudaLibrary, InitMethod, Nccl, ReduceOp, Result, Secret, Tcp, TcpConfig};

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Where the tensors of the cases are.
fn device() -> Device {
    DEVICE.with_borrow(Device::clone)
}

/// Runs `body` on every rank of a group of one backend.
trait Backend {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync));
}

/// So many ranks, a thread each; nothing where a case wants another number of them.
struct Ranks {
    world_size: usize,
    connect: fn(&TcpConfig, &Device) -> Result<Box<dyn Communicator>>,
    /// The CUDA device of a rank.
    ordinal: fn(usize) -> usize,
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
            ..TcpConfig::default()
        };
        std::thread::scope(|scope| {
            for rank in 0..world_size {
                let config = TcpConfig { rank, ..config.clone() };
                scope.spawn(move || {
                    let run = || {
                        let device = Device::new_cuda((self.ordinal)(rank))?;
                        DEVICE.set(device.clone());
                        body(&*(self.connect)(&config, &device)?)
                    };
                    run().unwrap_or_else(|error| panic!("rank {rank} of {world_size}: {error}"));
                });
            }
        });
    }
}

/// A device each.
fn nccl(world_size: usize) -> Ranks {
    let connect = |config: &TcpConfig, device: &Device| {
        Nccl::connect(config, device).map(|comm| Box::new(comm) as Box<dyn Communicator>)
    };
    Ranks { world_size, connect, ordinal: |rank| rank }
}

/// All on one device.
fn tcp(world_size: usize) -> Ranks {
    let connect = |config: &TcpConfig, _: &Device| {
        Tcp::connect(config).map(|comm| Box::new(comm) as Box<dyn Communicator>)
    };
    Ranks { world_size, connect, ordinal: |_| 0 }
}

/// What was asked of the device before an operation comes before it, and what is asked after it sees its result, without a
/// word from the caller; what is asked meanwhile may use other tensors.
fn computing(backend: &dyn Backend) {
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            let ranks: usize = (1..=world_size).sum();
            for round in 0..20 {
                let len = 10_000 + round;
                let own = Tensor::full((comm.rank() + 1) as f32, len, &device())?;
                let mut tensor = own.zeros_like()?;
                for _ in 0..5 {
                    tensor = ((tensor + &own)? * 0.5)?;
                }
                tensor = (tensor * 32.0)?;
                let work = comm.all_reduce(&tensor, ReduceOp::Sum)?;
                let other = (&own * 2.0)?.sqr()?;
                drop(own);
                work.wait()?;
                let after = (&tensor * 2.0)?;
                assert_eq!(after.to_vec1::<f32>()?, vec![(2 * 31 * ranks) as f32; len], "round {round}");
                let square = (4 * (comm.rank() + 1) * (comm.rank() + 1)) as f32;
                assert_eq!(other.to_vec1::<f32>()?, vec![square; len], "round {round}");
            }
            Ok(())
        });
    }
}

fn conform(name: &str, ranks: &Ranks) {
    let began = Instant::now();
    let only = std::env::var("GIRANDOLE_CASE").ok();
    let own: list::Case = ("computing before and after", computing);
    let cases = list::CASES.into_iter().chain([own]);
    for (case, run) in cases.filter(|(case, _)| only.as_ref().is_none_or(|only| only == case)) {
        println!("{name}, {} ranks: {case}", ranks.world_size);
        run(ranks);
    }
    println!("{name}, {} ranks: conforms ({:.0} s)", ranks.world_size, began.elapsed().as_secs_f64());
}

/// What is to run.
#[derive(Default)]
struct Plan {
    /// Numbers of ranks.
    nccl: Vec<usize>,
    tcp: Vec<usize>,
    faults: bool,
}

impl Plan {
    fn new(words: &[String]) -> std::result::Result<Plan, String> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ranks = |count: &str| match count.parse() {
            Ok(count @ 1..=4) => Ok(vec![count]),
            _ => Err(format!("'{count}' is no number of ranks: give 1 to 4")),
        };
        match words[..] {
            [] => Ok(Plan { nccl: vec![1, 2, 3, 4], tcp: vec![2, 4], faults: true }),
            ["nccl", count] => Ok(Plan { nccl: ranks(count)?, ..Plan::default() }),
            ["tcp", count] => Ok(Plan { tcp: ranks(count)?, ..Plan::default() }),
            ["faults"] => Ok(Plan { faults: true, ..Plan::default() }),
            _ => Err(format!(
                "'{}' is not known: give `nccl N`, `tcp N`, `faults` or nothing",
                words.join(" ")
            )),
        }
    }

    /// What is missing on this machine.
    fn check(&self) -> std::result::Result<(), String> {
        let over_nccl = self.nccl.iter().copied().chain(self.faults.then_some(faults::RANKS)).max();
        let mut libraries = vec![CudaLibrary::Driver, CudaLibrary::Cublas, CudaLibrary::Curand];
        libraries.extend(over_nccl.map(|_| CudaLibrary::Nccl));
        libraries.into_iter().try_for_each(CudaLibrary::load).map_err(|error| error.to_string())?;
        let counted = driver::init().and_then(|()| driver::device::get_count());
        let gpus = counted.map_err(|error| format!("NVIDIA's driver cannot be used: {error}"))?;
        let needed = over_nccl.unwrap_or(1);
        if usize::try_from(gpus).is_ok_and(|gpus| gpus >= needed) {
            return Ok(());
        }
        Err(format!(
            "{needed} GPUs are needed, one for each rank over NCCL, and there are {gpus}: `nccl N` takes N, `tcp N` one"
        ))
    }

    fn run(&self) {
        self.nccl.iter().for_each(|count| conform("nccl", &nccl(*count)));
        self.tcp.iter().for_each(|count| conform("tcp", &tcp(*count)));
        if self.faults {
            faults::all();
        }
    }
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(faults::ROLE) {
        faults::play(&role);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    match Plan::new(&words).and_then(|plan| plan.check().map(|()| plan)) {
        Ok(plan) => plan.run(),
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
