//! Conformance suite on CUDA tensors, over NCCL and over TCP, and fault tests. It runs on GPUs, or with a stand-in for
//! CUDA and NCCL: see `scripts/check-nccl.sh`.
//!
//! Without arguments it runs everything that the stand-ins can do. `nccl N` and `tcp N` run the cases on N ranks, `shared N`
//! on N ranks that use one GPU over NCCL, `faults` the fault tests, and `shared-faults` those that need one GPU and no
//! stand-in; if `GIRANDOLE_CASE` is set, only the case or fault of that name. With NVIDIA's NCCL, N must be a power of two:
//! otherwise its averages differ in the last bit. If the machine lacks what is needed, the program prints one line that
//! says what, and exits with code 2.
#![allow(clippy::unwrap_used, clippy::print_stdout, dead_code)]

mod autograd;
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
mod shared;
#[path = "../conformance/uneven.rs"]
mod uneven;

use std::cell::RefCell;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::cuda::cudarc::driver::result as driver;
use candle_core::{DType, Device, Tensor};
use comm::launcher::CudaLibrary;
use comm::{Communicator, InitMethod, Message, Nccl, ReduceOp, Result, Secret, Tcp, TcpConfig};

use faults::Faults;

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Returns the device of the cases' tensors.
fn device() -> Device {
    DEVICE.with_borrow(Device::clone)
}

/// Runs `body` on every rank of a group of one backend.
trait Backend {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync));
}

/// A fixed number of ranks, each in a thread. Cases for another number of ranks are skipped.
struct Ranks {
    world_size: usize,
    connect: fn(&TcpConfig, &Device) -> Result<Arc<dyn Communicator>>,
    /// The CUDA device of a rank; `None` for the CPU.
    ordinal: fn(usize) -> Option<usize>,
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
                        let device = match (self.ordinal)(rank) {
                            Some(ordinal) => comm::open_cuda_device(ordinal)?,
                            None => Device::Cpu,
                        };
                        DEVICE.set(device.clone());
                        let result = (self.connect)(&config, &device).and_then(|comm| body(&*comm));
                        // Not by the end of the thread, which may come after that of the process, when CUDA is gone.
                        DEVICE.set(Device::Cpu);
                        result
                    };
                    run().unwrap_or_else(|error| panic!("rank {rank} of {world_size}: {error}"));
                });
            }
        });
    }
}

/// NCCL, with a device for each rank.
fn nccl(world_size: usize) -> Ranks {
    let connect = |config: &TcpConfig, device: &Device| {
        Nccl::connect(config, device).map(|comm| Arc::new(comm) as Arc<dyn Communicator>)
    };
    Ranks { world_size, connect, ordinal: Some }
}

/// TCP, with all ranks on one device.
fn tcp(world_size: usize) -> Ranks {
    let connect = |config: &TcpConfig, _: &Device| {
        Tcp::connect(config).map(|comm| Arc::new(comm) as Arc<dyn Communicator>)
    };
    Ranks { world_size, connect, ordinal: |_| Some(0) }
}

/// If the backend is not specified, all ranks use NCCL if each of them can, and otherwise all use TCP; both work.
fn choose(world_size: usize) {
    type Ordinal = fn(usize) -> Option<usize>;
    let (shared, mixed): (Ordinal, Ordinal) = (|_| Some(0), |rank| rank.checked_sub(1));
    let cases = [(Some as Ordinal, "nccl"), (shared, "tcp"), (mixed, "tcp")];
    for (ordinal, expected) in &cases[..if world_size == 1 { 1 } else { 3 }] {
        let ranks = Ranks { world_size, connect: Nccl::connect_or_tcp, ordinal: *ordinal };
        ranks.run(world_size, &|comm| {
            assert_eq!(comm.backend(), *expected);
            let tensor = Tensor::ones(5, DType::F32, &device())?;
            comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
            assert_eq!(tensor.to_vec1::<f32>()?, [world_size as f32; 5]);
            Ok(())
        });
    }
    println!("{world_size} ranks choose alike");
}

/// Device work enqueued before an operation runs before it, and work enqueued after it sees its result, without any
/// synchronisation by the caller. Work enqueued meanwhile may use other tensors.
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

/// One rank sends and receives in a batch, the other by single messages, before either has sent anything else.
fn one_message_each_way(backend: &dyn Backend) {
    backend.run(2, &|comm| {
        let own = Tensor::full(comm.rank() as f32, 2_000_000, &device())?;
        let got = own.zeros_like()?;
        let other = 1 - comm.rank();
        if comm.rank() == 0 {
            let receive = Message::Recv { tensor: got.clone(), from: other };
            comm.batch(vec![receive, Message::Send { tensor: own, to: other }])?.wait()?;
        } else {
            comm.recv(&got, other)?.wait()?;
            comm.send(&own, other)?.wait()?;
        }
        assert_eq!(got.to_vec1::<f32>()?, vec![other as f32; 2_000_000]);
        Ok(())
    });
}

/// The root has the tensors on its device, and all others receive them on the CPU.
fn tensors_of_one(backend: &dyn Backend) {
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            let root = world_size - 1;
            let own = Tensor::arange(0f32, 6., &device())?.reshape((2, 3))?.t()?;
            let nothing = Tensor::zeros(0, DType::F32, &device())?;
            let own = vec![("weight".to_string(), own), ("nothing".to_string(), nothing)];
            let all = comm::broadcast_tensors(comm, own, root)?;
            assert_eq!(all[0].1.device().is_cuda(), comm.rank() == root);
            assert_eq!(all[0].1.to_vec2::<f32>()?, [[0., 3.], [1., 4.], [2., 5.]]);
            assert_eq!((all[1].0.as_str(), all[1].1.elem_count()), ("nothing", 0));
            Ok(())
        });
    }
}

/// The cases that all backends share, and those for CUDA tensors only.
fn cases() -> impl Iterator<Item = list::Case> {
    let own: [list::Case; 5] = [
        ("computing before and after", computing),
        ("gradients through collectives", autograd::gradients),
        ("results that are views", autograd::views),
        ("tensors of one rank", tensors_of_one),
        ("one message each way", one_message_each_way),
    ];
    list::CASES.into_iter().chain(own)
}

/// Returns the name of the one case or fault to run, if `GIRANDOLE_CASE` is set.
fn only() -> Option<String> {
    std::env::var("GIRANDOLE_CASE").ok()
}

/// Runs the cases, except those that are left out.
fn conform(name: &str, world_size: usize, ranks: &dyn Backend, left_out: &[&str]) {
    let began = Instant::now();
    let only = only();
    let is_asked = |case: &str| only.as_ref().is_none_or(|only| only == case) && !left_out.contains(&case);
    for (case, run) in cases().filter(|(case, _)| is_asked(case)) {
        println!("{name}, {world_size} ranks: {case}");
        run(ranks);
    }
    println!("{name}, {world_size} ranks: conforms ({:.0} s)", began.elapsed().as_secs_f64());
}

/// The cases and faults to run.
#[derive(Default)]
struct Plan {
    /// The numbers of ranks to run the cases on.
    nccl: Vec<usize>,
    tcp: Vec<usize>,
    /// Over NCCL, in processes that share a GPU.
    shared: Vec<usize>,
    faults: Option<Faults>,
}

impl Plan {
    fn new(words: &[String]) -> std::result::Result<Plan, String> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ranks = |count: &str| match count.parse() {
            Ok(count @ 1..=4) => Ok(vec![count]),
            _ => Err(format!("'{count}' is no number of ranks: give 1 to 4")),
        };
        match words[..] {
            [] => Ok(Plan {
                nccl: vec![1, 2, 3, 4],
                tcp: vec![2, 4],
                shared: vec![2],
                faults: Some(Faults::StandIn),
            }),
            ["nccl", count] => Ok(Plan { nccl: ranks(count)?, ..Plan::default() }),
            ["tcp", count] => Ok(Plan { tcp: ranks(count)?, ..Plan::default() }),
            ["shared", count] => Ok(Plan { shared: ranks(count)?, ..Plan::default() }),
            ["faults"] => Ok(Plan { faults: Some(Faults::StandIn), ..Plan::default() }),
            ["shared-faults"] => Ok(Plan { faults: Some(Faults::Shared), ..Plan::default() }),
            _ => Err(format!(
                "'{}' is not known: give `nccl N`, `tcp N`, `shared N`, `faults`, `shared-faults` or nothing",
                words.join(" ")
            )),
        }
    }

    /// Checks that the name in `GIRANDOLE_CASE` is one of the cases or faults to run.
    fn check_case(&self) -> std::result::Result<(), String> {
        let Some(only) = only() else { return Ok(()) };
        let faults = self.faults.into_iter().flat_map(faults::roles);
        let cases =
            cases().filter(|_| !(self.nccl.is_empty() && self.tcp.is_empty() && self.shared.is_empty()));
        let names: Vec<&str> = cases.map(|(name, _)| name).chain(faults).collect();
        if names.contains(&only.as_str()) {
            return Ok(());
        }
        Err(format!("GIRANDOLE_CASE: '{only}' is not known here: give one of {}", names.join(", ")))
    }

    /// Checks that this machine has the libraries and GPUs that are needed.
    fn check(&self) -> std::result::Result<(), String> {
        let shared = (!self.shared.is_empty()).then_some(1);
        let gpus_of_faults = self.faults.map(Faults::gpus);
        let over_nccl = self.nccl.iter().copied().chain(shared).chain(gpus_of_faults).max();
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
            "{needed} GPUs are needed, one for each rank over NCCL, and there are {gpus}: `nccl N` takes N, `tcp N` and `shared N` one"
        ))
    }

    fn run(&self) {
        for &count in &self.nccl {
            conform("nccl", count, &nccl(count), &[]);
            choose(count);
        }
        self.tcp.iter().for_each(|count| conform("tcp", *count, &tcp(*count), &[]));
        match shared::Rank::from_env() {
            Some(rank) => conform("nccl on one GPU", rank.config.world_size, &rank, shared::LEFT_OUT),
            None => self.shared.iter().for_each(|count| shared::conform(*count)),
        }
        if let Some(faults) = self.faults {
            faults::all(faults);
        }
    }
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(faults::ROLE) {
        faults::play(&role);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    match Plan::new(&words).and_then(|plan| plan.check_case().and_then(|()| plan.check()).map(|()| plan)) {
        Ok(plan) => plan.run(),
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
