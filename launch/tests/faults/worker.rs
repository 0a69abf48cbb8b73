//! A rank: runs its script, and reports the outcome in lines that begin with `@`.

use std::fmt::Debug;
use std::process::exit;
use std::time::{Duration, Instant};

use comm::{Communicator, Error, InitMethod, Result, Tcp, TcpConfig};
use launch::{EXIT_PEER_FAILED, SpawnConfig, is_worker, spawn, worker_guard};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use crate::dice::Dice;
use crate::player::Player;
use crate::rank::ends_with_its_parent;
use crate::script::{Action, operations, parse};
use crate::warnings::Warnings;

/// Variables that tell a rank what to do.
pub(crate) const SCRIPT: &str = "FAULT_TEST_SCRIPT";
pub(crate) const SLOW_WARNING: &str = "FAULT_TEST_SLOW_WARNING";
pub(crate) const LAUNCH: &str = "FAULT_TEST_LAUNCH";

/// Not a test by itself: the entry point of ranks.
#[test]
fn process() {
    let Ok(script) = std::env::var(SCRIPT) else { return };
    if is_worker() {
        worker_guard().unwrap();
    } else {
        assert!(ends_with_its_parent());
        if let Ok(ranks) = std::env::var(LAUNCH) {
            launch(ranks.parse().unwrap());
        }
    }
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let slow_warning = Duration::from_millis(number(SLOW_WARNING));
    let config = TcpConfig { slow_warning, ..TcpConfig::from_env().unwrap() };
    let actions = parse(&script);
    if let [Action::Cycles(count)] = actions[..] {
        exit(verdict(&cycles(&config, count), &mut || Ok(())));
    }
    exit(match Tcp::connect(&config) {
        Ok(comm) => Player::new(comm).play(&actions),
        Err(error) => verdict(&Err(error.clone()), &mut || Err(error.clone())),
    })
}

/// Starts this program once more for each rank, and writes the outcome to standard error.
fn launch(world_size: usize) -> ! {
    let outcome = spawn(&SpawnConfig { world_size, ..SpawnConfig::default() });
    match &outcome {
        Ok(_) => eprintln!("OUTCOME done"),
        Err(error) => eprintln!("OUTCOME {error}"),
    }
    exit(i32::from(outcome.is_err()))
}

fn number<T: std::str::FromStr<Err: Debug>>(name: &str) -> T {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Returns nanoseconds on a clock that all processes of this host share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Reports the first error and the error of later calls; returns the exit code.
pub(crate) fn verdict(outcome: &Result<()>, later: &mut dyn FnMut() -> Result<()>) -> i32 {
    let at = now();
    let Err(error) = outcome else {
        println!("@done");
        return 0;
    };
    let (kind, culprit) = match error {
        Error::PeerDied { rank, .. } => ("PeerDied", Some(*rank)),
        Error::PeerLeft { rank, .. } => ("PeerLeft", Some(*rank)),
        Error::PeerFailed { rank, .. } => ("PeerFailed", Some(*rank)),
        Error::Timeout { rank, .. } => ("Timeout", Some(*rank)),
        Error::Mismatch { odd_rank, .. } => ("Mismatch", Some(*odd_rank)),
        Error::Protocol { rank, .. } => ("Protocol", Some(*rank)),
        Error::Rendezvous { .. } => ("Rendezvous", None),
        Error::Refused { .. } => ("Refused", None),
        Error::Aborted { .. } => ("Aborted", None),
        _ => ("other", None),
    };
    let text = error.to_string();
    println!("@failed {}", json!({"at": at, "kind": kind, "culprit": culprit, "text": text}));
    let began = Instant::now();
    let again = later().err().map(|error| error.to_string());
    println!("@again {}", json!({"text": again, "ms": began.elapsed().as_millis() as u64}));
    if error.is_peer_failure() { EXIT_PEER_FAILED } else { 1 }
}

/// Creates short-lived groups, which are dropped at different times on different ranks.
fn cycles(config: &TcpConfig, count: usize) -> Result<()> {
    let InitMethod::File(path) = config.init_method.clone() else { panic!("give file://") };
    let mut own = Dice(config.rank as u64);
    for cycle in 0..count {
        let mut path = path.clone().into_os_string();
        path.push(format!(".{cycle}"));
        let config = TcpConfig { init_method: InitMethod::File(path.into()), ..config.clone() };
        let mut common = Dice(1000 + cycle as u64);
        let calls = common.below(4);
        let comm = Tcp::connect(&config)?;
        (0..calls).try_for_each(|_| {
            let call = common.collective(config.world_size);
            operations(&call, config.rank, config.world_size).into_iter().try_for_each(|op| comm.run(op))
        })?;
        std::thread::sleep(Duration::from_micros(own.below(4) * own.below(1500)));
    }
    Ok(())
}
