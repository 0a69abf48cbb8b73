//! Fault tests: ranks that disagree, die, hang or are stopped, and an NCCL that fails. Every rank must report it, in
//! time. Also, groups closed at different times on different ranks must not block anybody.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Nccl, ReduceOp, Result, TcpConfig, Work};

use crate::shared::{alone_on_its_host, as_rank};

/// Environment variable with the role of a rank.
pub(crate) const ROLE: &str = "GIRANDOLE_CUDA_ROLE";
const RANKS: usize = 3;
/// Time-out of each rank's operations.
const TIMEOUT: Duration = Duration::from_secs(8);
/// Time limit of a whole case.
const LONGEST: Duration = Duration::from_secs(34);

/// The fault tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    /// All, with the faults that the stand-in NCCL makes; each rank has a GPU.
    StandIn,
    /// Those that any NCCL has, on ranks that share a GPU.
    Shared,
}

impl Faults {
    pub(crate) fn gpus(self) -> usize {
        if self == Faults::Shared { 1 } else { RANKS }
    }

    fn includes(self, fault: &Fault) -> bool {
        self == Faults::StandIn || (fault.nccl.is_empty() && fault.role != "one device")
    }
}

struct Fault {
    role: &'static str,
    /// The fault that the stand-in NCCL makes.
    nccl: &'static str,
    /// Ranks, and the words that their reports must contain.
    says: &'static [(usize, &'static [&'static str])],
}

impl Fault {
    /// Whether this rank never ends by itself.
    fn stops(&self, rank: usize) -> bool {
        rank == 1 && self.role.starts_with("stopped")
    }
}

/// Suffix of a report: which rank is at fault.
const OWN: &str = "(its own fault)";
const NOTICED: &str = "(another rank's fault)";
const FAILED: &[&str] = &["all_reduce #", "on rank 1 (host ", "ncclRemoteError, 6", NOTICED];
const FAILED_HERE: &[&str] = &["all_reduce #", "on rank 1 (host ", "ncclRemoteError, 6", OWN];
const REFUSED: &[&str] =
    &["all_reduce #", "on rank 1 (host ", "ncclInvalidUsage, 5", "a refused call", NOTICED];
const REFUSED_HERE: &[&str] =
    &["all_reduce #", "on rank 1 (host ", "ncclInvalidUsage, 5", "a refused call", OWN];
const HUNG: &[&str] = &["all_reduce #", "all ranks are in it", "within 8.0 s"];
const STUCK: &[&str] = &["all_reduce #", "it did not end in time"];
const STOPPED: &[&str] = &["rank 1 (host ", "did not take part in all_reduce #", "within 8.0 s"];
const FINE: &[&str] = &["fine"];

const FAULTS: &[Fault] = &[
    Fault {
        role: "another call",
        nccl: "",
        says: &[
            (0, &["rank 1 called broadcast #", "rank 0 called all_reduce #"]),
            (1, &["rank 1 called broadcast #"]),
            (2, &["rank 1 called broadcast #"]),
        ],
    },
    Fault {
        role: "another length",
        nccl: "",
        says: &[(0, &["rank 1 called all_reduce #"]), (2, &["rank 1 called all_reduce #"])],
    },
    Fault {
        role: "killed",
        nccl: "",
        says: &[(0, &["rank 1 (host ", "died during all_reduce #"]), (2, &["rank 1 (host ", "died"])],
    },
    // It is killed in the middle of the operation, and NCCL does not report it.
    Fault {
        role: "killed inside",
        nccl: "hang:1:2",
        says: &[(0, &["rank 1 (host ", "died during all_reduce #"]), (2, &["rank 1 (host ", "died"])],
    },
    Fault {
        role: "killed in the middle",
        nccl: "",
        says: &[(0, &["rank 1 (host ", "died"]), (2, &["rank 1 (host ", "died"])],
    },
    Fault { role: "stopped", nccl: "", says: &[(0, STOPPED), (2, STOPPED)] },
    Fault { role: "stopped inside", nccl: "hang:1:2", says: &[(0, STOPPED), (2, STOPPED)] },
    Fault { role: "hang", nccl: "hang:1:2", says: &[(0, HUNG), (1, HUNG), (2, HUNG)] },
    // No thread of the operation itself can end it.
    Fault { role: "stuck", nccl: "hang:1:2", says: &[(0, STUCK), (1, STUCK), (2, STUCK)] },
    Fault { role: "async error", nccl: "error:1:2", says: &[(0, FAILED), (1, FAILED_HERE), (2, FAILED)] },
    // No rank is in an operation when the error occurs.
    Fault { role: "idle", nccl: "late:1:2", says: &[(0, FAILED), (1, FAILED_HERE), (2, FAILED)] },
    Fault { role: "refused", nccl: "refuse:1:2", says: &[(0, REFUSED), (1, REFUSED_HERE), (2, REFUSED)] },
    Fault {
        role: "meet",
        nccl: "meet:1:0",
        says: &[(0, &["ncclCommInitRankConfig", "time-out"]), (1, &["ncclComm"]), (2, &["ncclComm"])],
    },
    Fault { role: "a group kept by others", nccl: "", says: &[(0, FINE), (1, FINE), (2, FINE)] },
    Fault { role: "groups closed in opposite order", nccl: "", says: &[(0, FINE), (1, FINE), (2, FINE)] },
    Fault { role: "a receive before its sender", nccl: "", says: &[(0, FINE), (1, FINE), (2, FINE)] },
    Fault { role: "one device", nccl: "", says: &[(0, &["one GPU for ranks 0 and 2", "--backend tcp"])] },
];

/// Returns the names of the faults.
pub(crate) fn roles(faults: Faults) -> impl Iterator<Item = &'static str> {
    FAULTS.iter().filter(move |fault| faults.includes(fault)).map(|fault| fault.role)
}

pub(crate) fn all(faults: Faults) {
    let only = crate::only();
    let is_asked = |fault: &&Fault| only.as_ref().is_none_or(|only| only == fault.role);
    for fault in FAULTS.iter().filter(|fault| faults.includes(fault)).filter(is_asked) {
        let began = Instant::now();
        let printed = run(fault, faults);
        for (rank, words) in fault.says {
            let line = printed[*rank].lines().find(|line| line.starts_with("says: ")).unwrap_or("");
            assert!(
                !line.is_empty() && words.iter().all(|word| line.contains(word)),
                "{}: rank {rank}: {}\nall: {printed:#?}",
                fault.role,
                printed[*rank]
            );
        }
        assert!(began.elapsed() < LONGEST, "{}: {:?}", fault.role, began.elapsed());
        println!("{}: ok ({:.1} s)", fault.role, began.elapsed().as_secs_f64());
    }
}

fn run(fault: &Fault, faults: Faults) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| -> Child {
        let mut command = as_rank(rank, RANKS, folder.path());
        command.env(ROLE, fault.role).env("STAND_IN_NCCL", fault.nccl).env("TMPDIR", folder.path());
        if faults == Faults::Shared {
            alone_on_its_host(&mut command, rank);
        }
        if fault.role == "stuck" {
            command.env("STAND_IN_STUCK", "1");
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut children: Vec<Child> = (0..RANKS).map(start).collect();
    let until = Instant::now() + LONGEST;
    let is_awaited =
        |(rank, child): (usize, &mut Child)| !fault.stops(rank) && child.try_wait().unwrap().is_none();
    while children.iter_mut().enumerate().any(is_awaited) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let finish = |mut child: Child| {
        // Has no effect if it has ended.
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    children.into_iter().map(finish).collect()
}

pub(crate) fn play(role: &str) -> ! {
    let config = TcpConfig { timeout: TIMEOUT, ..TcpConfig::from_env().unwrap() };
    match take_part(role, &config) {
        Ok(()) => println!("says: fine"),
        Err(error) => println!("says: {error} {}", if error.is_peer_failure() { NOTICED } else { OWN }),
    }
    std::process::exit(1);
}

/// Returns the device of a rank: its own, unless ranks share one.
fn device(role: &str, rank: usize) -> candle_core::Result<Device> {
    comm::open_cuda_device(match role {
        _ if std::env::var_os("NCCL_HOSTID").is_some() => 0,
        "one device" => rank % 2,
        _ => rank,
    })
}

fn take_part(role: &str, config: &TcpConfig) -> Result<()> {
    let odd = config.rank == 1;
    let device = device(role, config.rank)?;
    let comm = Nccl::connect(config, &device)?;
    let tensor = |len: usize| Tensor::zeros(len, DType::F32, &device);
    let sum = |len: usize| comm.all_reduce(&tensor(len)?, ReduceOp::Sum).and_then(Work::wait);
    sum(5)?;
    match role {
        "another call" if odd => comm.broadcast(&tensor(5)?, 0).and_then(Work::wait),
        "another length" if odd => sum(6),
        "killed" if odd => signal("KILL"),
        "killed in the middle" => {
            if odd {
                signal_in_a_second("KILL");
            }
            loop {
                sum(1 << 22)?;
            }
        }
        "stopped" if odd => signal("STOP"),
        "killed inside" | "stopped inside" if odd => {
            // All are in the operation by then, in which this rank's NCCL hangs.
            signal_in_a_second(if role == "killed inside" { "KILL" } else { "STOP" });
            sum(5)
        }
        "a group kept by others" => {
            let group = comm.new_group(&[0, 1, 2])?;
            let kept = group.filter(|_| comm.rank() > 0);
            sum(5)?;
            drop(kept);
            sum(5)
        }
        "a receive before its sender" => {
            let other = comm.new_group(&[0, 1, 2])?.unwrap();
            let posted = if odd { Some(comm.recv(&tensor(5)?, 0)?) } else { None };
            // Gives the receive time to begin. The wait for the whole device that follows comes before the barrier for
            // which the sender waits.
            std::thread::sleep(Duration::from_millis(300));
            device.as_cuda_device()?.cuda_stream().context().synchronize().unwrap();
            other.barrier()?.wait()?;
            let sent = if comm.rank() == 0 { Some(comm.send(&tensor(5)?, 1)?) } else { None };
            posted.into_iter().chain(sent).try_for_each(Work::wait)
        }
        "groups closed in opposite order" => {
            let (one, other) = (comm.new_group(&[0, 1, 2])?, comm.new_group(&[0, 1, 2])?);
            let (first, last) = if odd { (other, one) } else { (one, other) };
            drop(first);
            drop(last);
            sum(5)
        }
        "idle" => {
            sum(5)?;
            std::thread::sleep(Duration::from_secs(1));
            sum(5)
        }
        _ => sum(5),
    }
}

/// Sends a signal to this process in a second.
fn signal_in_a_second(name: &'static str) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        signal(name)
    });
}

/// Sends a signal to this process.
fn signal(name: &str) -> Result<()> {
    Command::new("sh").args(["-c", &format!("kill -{name} $PPID")]).status().unwrap();
    Ok(())
}
