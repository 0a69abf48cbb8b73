//! A rank: plays its script, and reports how that went in lines that begin with `@`.

use std::fmt::Debug;
use std::io::stdin;
use std::os::fd::AsRawFd;
use std::process::exit;
use std::time::{Duration, Instant};

use comm::launch::{EXIT_PEER_FAILED, SpawnConfig, is_worker, spawn, worker_guard};
use comm::{Communicator, Error, InitMethod, Operation, Result, Tcp, TcpConfig, Work};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, getrlimit, kill_process, set_parent_process_death_signal,
    setrlimit,
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::script::{Action, Dice, operation, parse};

/// Variables that tell a rank what to do.
pub(crate) const SCRIPT: &str = "FAULT_TEST_SCRIPT";
pub(crate) const SLOW_WARNING: &str = "FAULT_TEST_SLOW_WARNING";
pub(crate) const LAUNCH: &str = "FAULT_TEST_LAUNCH";
pub(crate) const PARENT: &str = "FAULT_TEST_PARENT";

/// Not a test by itself: the entry of ranks.
#[test]
fn process() {
    let Ok(script) = std::env::var(SCRIPT) else { return };
    if is_worker() {
        worker_guard().unwrap();
    } else {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        assert_eq!(getppid().map(Pid::as_raw_nonzero).map(i32::from), Some(number(PARENT)));
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
        Ok(comm) => Player { comm: Some(comm), works: Vec::new() }.play(&actions),
        Err(error) => verdict(&Err(error.clone()), &mut || Err(error.clone())),
    })
}

/// Starts this process once more for each rank, and writes what came of it to standard error.
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

/// Nanoseconds on the clock that all processes of this host share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

struct Player {
    comm: Option<Tcp>,
    works: Vec<Work>,
}

impl Player {
    fn play(mut self, actions: &[Action]) -> i32 {
        let outcome = actions.iter().try_for_each(|action| self.act(action));
        let code = verdict(&outcome, &mut || self.call_again());
        self.close();
        code
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Call(words) => return self.call(words),
            Action::Submit(words) => {
                let comm = self.comm.as_ref().unwrap();
                self.works.push(comm.submit(operation(words, comm.world_size()))?);
            }
            Action::Detach => {
                let works: Vec<Work> = self.works.drain(..).collect();
                std::thread::spawn(move || works.into_iter().try_for_each(Work::wait).unwrap());
            }
            Action::WaitAll => return self.works.drain(..).try_for_each(Work::wait),
            Action::Repeat(words) => return self.forever(&mut || words.clone()),
            Action::Random(seed) => {
                let (mut dice, world_size) = (Dice(*seed), self.comm.as_ref().unwrap().world_size());
                return self.forever(&mut || dice.collective(world_size));
            }
            Action::Ready => println!("@ready"),
            Action::Await => drop(stdin().read_line(&mut String::new()).unwrap()),
            Action::Sleep(milliseconds) => std::thread::sleep(Duration::from_millis(*milliseconds)),
            Action::Close => self.close(),
            Action::Panic => panic!("as the script says"),
            Action::Exit(code) => exit(*code),
            Action::Die(rank) if *rank == self.comm.as_ref().unwrap().rank() => {
                println!("@dying {}", now());
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            Action::Die(_) => {}
            Action::Limit => {
                let next = rustix::io::fcntl_dupfd_cloexec(stdin(), 0).unwrap();
                let current = Some(next.as_raw_fd() as u64);
                let limit = getrlimit(Resource::Nofile);
                setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
            }
            Action::Cycles(_) => panic!("cycles must be alone"),
        }
        Ok(())
    }

    fn call(&self, words: &[String]) -> Result<()> {
        let comm = self.comm.as_ref().unwrap();
        comm.run(operation(words, comm.world_size()))
    }

    fn forever(&self, next: &mut dyn FnMut() -> Vec<String>) -> Result<()> {
        (0..3).try_for_each(|_| self.call(&next()))?;
        println!("@ready");
        loop {
            self.call(&next())?;
        }
    }

    /// After a failure: none of these must work.
    fn call_again(&mut self) -> Result<()> {
        let outcomes = self.works.drain(..).map(Work::wait);
        let comm = self.comm.as_ref().unwrap();
        let words: Vec<String> = "all_reduce f32 10 sum".split(' ').map(String::from).collect();
        let outcomes = outcomes.chain([
            comm.run(Operation::Barrier),
            comm.submit(operation(&words, comm.world_size())).and_then(Work::wait),
            comm.run(operation(&words, comm.world_size())),
        ]);
        let errors: Vec<Error> = outcomes.filter_map(Result::err).collect();
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        println!("@note {}", json!({"later": texts.len()}));
        match errors.iter().find(|error| error.to_string() != texts[0]) {
            Some(other) => Err(other.clone()),
            None => Err(errors[0].clone()),
        }
    }

    fn close(&mut self) {
        if let Some(comm) = self.comm.take() {
            let began = Instant::now();
            drop(comm);
            println!("@closed {}", began.elapsed().as_millis());
            println!("@threads {}", threads_left());
        }
    }
}

/// Reports the first error and what later calls give; the exit code.
fn verdict(outcome: &Result<()>, later: &mut dyn FnMut() -> Result<()>) -> i32 {
    let at = now();
    let Err(error) = outcome else {
        println!("@done");
        return 0;
    };
    let (kind, culprit) = match error {
        Error::PeerDied { rank, .. } => ("PeerDied", Some(*rank)),
        Error::PeerLeft { rank, .. } => ("PeerLeft", Some(*rank)),
        Error::Timeout { rank, .. } => ("Timeout", Some(*rank)),
        Error::Mismatch { odd_rank, .. } => ("Mismatch", Some(*odd_rank)),
        Error::Protocol { rank, .. } => ("Protocol", Some(*rank)),
        Error::Rendezvous { .. } => ("Rendezvous", None),
        Error::Refused { .. } => ("Refused", None),
        _ => ("other", None),
    };
    let text = error.to_string();
    println!("@failed {}", json!({"at": at, "kind": kind, "culprit": culprit, "text": text}));
    let began = Instant::now();
    let again = later().err().map(|error| error.to_string());
    println!("@again {}", json!({"text": again, "ms": began.elapsed().as_millis() as u64}));
    if error.is_peer_failure() { EXIT_PEER_FAILED } else { 1 }
}

/// Threads of the crate that run. One that was joined may be seen for another moment.
fn threads_left() -> usize {
    let began = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let left = names.filter(|name| name.starts_with("comm") || name.starts_with("girandole")).count();
        if left == 0 || began.elapsed() > Duration::from_secs(2) {
            return left;
        }
        std::thread::yield_now();
    }
}

/// Groups that live shortly, and are dropped at different moments on different ranks.
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
            comm.run(operation(&common.collective(config.world_size), config.world_size))
        })?;
        std::thread::sleep(Duration::from_micros(own.below(4) * own.below(1500)));
    }
    Ok(())
}

/// Writes warnings to standard error.
struct Warnings;

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Message);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Message;

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            eprintln!("WARN {value:?}");
        }
    }
}
