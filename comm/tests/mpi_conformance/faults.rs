//! Fault tests: ranks that disagree, die, stop responding or leave. Every other rank must report it.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Mpi, ReduceOp, Result, TcpConfig, Work};

use crate::{absent, job};

/// Each fault, the ranks that detect it, and the words that their reports must contain.
const FAULTS: [(&str, &[usize], &[&str]); 8] = [
    (
        "another call",
        &[0, 1, 2],
        &["rank 1 called broadcast #1 (root 0, f32, 5 elements", "all_reduce #1 (sum"],
    ),
    (
        "another length",
        &[0, 1, 2],
        &["rank 1 called all_reduce #1 (sum, f32, 6", "all_reduce #1 (sum, f32, 5"],
    ),
    ("another message", &[0, 1], &["message #1 (from rank 0, f32, 7", "message #1 (from rank 0, f32, 5"]),
    ("a message in place of a collective", &[0, 1, 2], &["rank 1 called ", "rank 0 called all_reduce #1"]),
    ("standing still", &[0, 2], &["rank 1 (host ", "did not take part in all_reduce #1", "within 3.0 s"]),
    (
        absent::ROLE,
        &[0, 2],
        &["MPI_Comm_create_group", "not all of ranks [0, 1, 2] took part within the time-out"],
    ),
    ("leaving", &[0, 2], &["rank 1 (host ", "left the group before all_reduce #1"]),
    ("dying", &[0, 2], &["rank 1 (host ", "died during all_reduce #1"]),
];

pub(crate) fn all() {
    for (role, witnesses, words) in FAULTS {
        let printed = job::printed(&job::run(role, 3));
        for rank in witnesses {
            let line = printed.lines().find(|line| line.starts_with(&format!("rank {rank} says: ")));
            let line = line.unwrap_or_else(|| panic!("{role}: rank {rank} says nothing\n{printed}"));
            assert!(words.iter().all(|word| line.contains(word)), "{role}: {line}");
        }
        println!("{role}: ok");
    }
    killed();
}

/// The launcher ends the job at once. Whether the other ranks still report the missing rank is a race, but the launcher
/// reports the signal.
fn killed() {
    let output = job::run("killed", 3);
    let printed = job::printed(&output);
    assert!(!output.status.success(), "{printed}");
    assert!(printed.contains("rank 1 (host ") || printed.contains("signal 9"), "{printed}");
    println!("killed: ok");
}

pub(crate) fn play(role: &str, config: &TcpConfig) {
    let config = match role {
        "standing still" | absent::ROLE => TcpConfig { timeout: Duration::from_secs(3), ..config.clone() },
        _ => config.clone(),
    };
    let comm = Mpi::connect(&config).unwrap();
    let odd = comm.rank() == 1;
    let tensor = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let sum = |len: usize| comm.all_reduce(&tensor(len), ReduceOp::Sum);
    let result = match (role, odd) {
        ("another call", true) => comm.broadcast(&tensor(5), 0),
        ("another length", true) => sum(6),
        ("another message", true) => comm.recv(&tensor(7), 0),
        ("another message", false) if comm.rank() == 0 => {
            comm.send(&tensor(5), 1).and_then(finish_then(&comm))
        }
        ("another message", false) => comm.barrier(),
        ("a message in place of a collective", true) => comm.send(&tensor(5), 0).and_then(finish_then(&comm)),
        ("standing still", true) => {
            std::thread::sleep(Duration::from_secs(6));
            return;
        }
        (absent::ROLE, _) => comm.new_group(&[0, 1, 2]).and_then(|_| sum(5)),
        ("leaving", true) => {
            drop(comm);
            // Its process is still alive.
            std::thread::sleep(Duration::from_secs(4));
            return;
        }
        ("dying", true) => std::thread::scope(|scope| {
            // A panic unwinds while the process stays alive, so the launcher does not notice.
            let died = scope.spawn(|| {
                let _comm = comm;
                panic!("rank 1 dies, as it should");
            });
            let _ = died.join();
            std::thread::sleep(Duration::from_secs(4));
            std::process::exit(0);
        }),
        ("killed", true) => {
            sum(5).and_then(Work::wait).unwrap();
            std::process::Command::new("sh").args(["-c", "kill -9 $PPID"]).status().unwrap();
            return;
        }
        ("killed", false) => sum(5).and_then(Work::wait).and_then(|()| sum(5)),
        _ => sum(5),
    };
    let error = result.and_then(Work::wait).unwrap_err();
    println!("rank {} says: {error}", config.rank);
    // The launcher ends all others as soon as one fails, so each gives the others time to report.
    if role != "killed" {
        std::thread::sleep(Duration::from_secs(1));
    }
    std::process::exit(1);
}

/// A send may be done before the receiver checks it; the next call is not.
fn finish_then(comm: &Mpi) -> impl FnOnce(Work) -> Result<Work> {
    |work| {
        work.wait()?;
        comm.barrier()
    }
}
