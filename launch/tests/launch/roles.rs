//! The roles of launcher and ranks when this test binary is started as one of them.

use std::io::{Read, Write, stderr, stdin, stdout};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::exit;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use launch::{
    EXIT_CHECKPOINTED, EXIT_PEER_FAILED, Notes, SpawnConfig, is_worker, report_result, send_note, spawn,
    wants_notes, worker_guard,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::elastic;
use crate::job::{RANKS, ROLE};
use crate::nodes;
use crate::warnings::Warnings;

/// Not a test by itself: the entry point of launchers and ranks.
#[test]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if is_worker() {
        worker_guard().unwrap();
        play(&role, variable("RANK"));
    } else {
        launch(&role, variable(RANKS));
    }
}

fn variable(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Runs the launcher, writes the result of `spawn` to standard error, and exits.
fn launch(role: &str, ranks: usize) {
    let shell = |script: &str| SpawnConfig {
        world_size: ranks,
        program: Some("/bin/sh".into()),
        args: Some(vec!["-c".into(), script.into()]),
        ..SpawnConfig::default()
    };
    // `args: None` starts this same function in the ranks.
    let plain = SpawnConfig { world_size: ranks, ..SpawnConfig::default() };
    let config = match role {
        "hurry" => {
            tracing::subscriber::set_global_default(Warnings).unwrap();
            SpawnConfig { grace: Duration::from_millis(50), ..plain }
        }
        "talk" => SpawnConfig { grace: Duration::from_millis(50), ..plain },
        "checkpointed" => SpawnConfig { max_restarts: 3, ..plain },
        "stubborn" => SpawnConfig { grace: Duration::from_secs(600), ..plain },
        "only rank 1" => SpawnConfig { shown_ranks: Some(vec![1]), role: "trainer".into(), ..plain },
        "grandchild" => shell("sleep 1000 & echo sleep $!"),
        "threads" => SpawnConfig { env: vec![("RAYON_NUM_THREADS".into(), "7".into())], ..plain },
        "wrapped" => {
            let words = std::env::args().map(|arg| format!("'{arg}'")).collect::<Vec<_>>();
            shell(&format!("{}; exit $?", words.join(" ")))
        }
        "at work" | "left behind" | "talkative" | "all but one fail" | "all but one fail after lines" => {
            elastic::config(plain)
        }
        "left with a checkpoint" => {
            SpawnConfig { failure_grace: Duration::from_millis(50), ..elastic::config(plain) }
        }
        "met late" => SpawnConfig { failure_grace: Duration::from_secs(60), ..elastic::config(plain) },
        "last fails" => elastic::config(shell(elastic::LAST_FAILS)),
        "met at the end" => elastic::config(shell(elastic::MET_AT_THE_END)),
        "replaced, at the least" => elastic::at_the_least(plain),
        "not replaced, at the least" => {
            let program = std::env::current_exe().ok();
            elastic::at_the_least(SpawnConfig { program, ..plain })
        }
        "filled up" => {
            tracing::subscriber::set_global_default(Warnings).unwrap();
            elastic::filled_up_config(plain)
        }
        "replaced when it ends" => elastic::replaced_when_it_ends_config(plain),
        "fail before the newcomer is in" | "replaced" => elastic::with_more(1, plain),
        "not replaced" | "replaced by the second" => {
            // The test waits for one of the warnings.
            tracing::subscriber::set_global_default(Warnings).unwrap();
            let program = std::env::current_exe().ok();
            elastic::with_more(ranks - 1, SpawnConfig { program, ..plain })
        }
        "no room" => no_room(&plain),
        "notes" => return notes(&plain),
        "twice" => return twice(&plain),
        _ if role.starts_with("two nodes: ") => nodes::launch(role),
        _ => plain,
    };
    finish(&spawn(&config));
}

fn finish(outcome: &launch::Result<Vec<Option<String>>>) -> ! {
    match outcome {
        Ok(results) => eprintln!("OUTCOME {results:?}"),
        Err(error) => eprintln!("OUTCOME {error}"),
    }
    exit(i32::from(outcome.is_err()))
}

/// Leaves too few file descriptors for the last ranks.
fn no_room(config: &SpawnConfig) -> ! {
    use rustix::process::{Resource, Rlimit, setrlimit};
    // Both, since a launcher raises its limit to what it may have.
    let limit = Rlimit { current: Some(100), maximum: Some(100) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let _files: Vec<_> = (0..70).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
    finish(&spawn(config))
}

/// Runs two jobs one after the other; then this process must be as it was.
fn twice(config: &SpawnConfig) {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // A first job leaves something permanently: the signal handlers.
    assert!(spawn(config).is_ok());
    let (before, files_before) = (threads(), files());
    assert!(spawn(config).is_ok());
    // A thread that was joined may be visible for another moment.
    let start = Instant::now();
    while threads() > before && start.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!((threads(), files()), (before, files_before));
    ready(0);
    forever();
}

/// Records notes, and counts lines.
#[derive(Debug, Default)]
struct Recorder(Mutex<(Vec<String>, usize)>);

impl Notes for Recorder {
    fn note(&self, rank: usize, text: &str) {
        self.0.lock().unwrap().0.push(format!("rank {rank}: {text}"));
    }

    fn aside(&self, write: &mut dyn FnMut()) {
        self.0.lock().unwrap().1 += 1;
        write();
    }
}

fn notes(config: &SpawnConfig) {
    let recorder = Arc::new(Recorder::default());
    let config = SpawnConfig { notes: Some(recorder.clone() as Arc<dyn Notes>), ..config.clone() };
    let outcome = spawn(&config);
    let (notes, lines) = &*recorder.0.lock().unwrap();
    eprintln!("{} notes, in order: {}, at least 400 lines: {}", notes.len(), in_order(notes), *lines >= 400);
    finish(&outcome);
}

fn in_order(notes: &[String]) -> bool {
    [0, 1].iter().all(|rank| {
        let own = notes.iter().filter_map(|note| note.strip_prefix(&format!("rank {rank}: ")));
        own.eq((0..100).map(|step| step.to_string()).collect::<Vec<_>>())
    })
}

/// Sends notes between lines, and in the middle of a line.
fn tell() {
    assert!(wants_notes());
    for step in 0..100 {
        print!("step ");
        send_note(&step.to_string());
        println!("{step}");
        eprintln!("step {step}");
    }
    send_note("several\nlines");
}

pub(crate) fn ready(rank: usize) {
    println!("rank {rank} ready {}", std::process::id());
}

pub(crate) fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

fn play(role: &str, rank: usize) {
    match role {
        "report" => report(rank),
        "environment" | "threads" => environment(),
        "lines" => lines(rank),
        "long line" => long_line(rank),
        "wait" | "wrapped" => {
            ready(rank);
            forever();
        }
        "notes" => tell(),
        "code 3" => code_3(rank),
        "peers" => peers(rank, EXIT_PEER_FAILED),
        "careless peers" => peers(rank, 101),
        "only peers" => only_peers(rank),
        "met late" => elastic::met_late(rank),
        "filled up" => elastic::filled_up(rank),
        "at work" => elastic::at_work(rank),
        "left with a checkpoint" => elastic::left_with_a_checkpoint(rank),
        "left behind" => elastic::left_behind(rank, 1),
        "talkative" => elastic::left_behind(rank, 100),
        "replaced" | "replaced by the second" | "replaced, at the least" => elastic::replaced(rank, true),
        "not replaced" | "not replaced, at the least" => elastic::replaced(rank, false),
        "replaced when it ends" => elastic::replaced_when_it_ends(rank),
        "all but one fail" => elastic::all_but_one_fail(rank, 0),
        "all but one fail after lines" => elastic::all_but_one_fail(rank, 100),
        "fail before the newcomer is in" => elastic::fail_before_the_newcomer_is_in(rank),
        "early" => early(rank),
        _ if role.starts_with("two nodes: late") => nodes::late(role, rank),
        "handler" | "hurry" | "stubborn" => handler(rank, role == "handler"),
        "saver" => saver(rank),
        "checkpointed" => exit(EXIT_CHECKPOINTED),
        "only rank 1" => {
            println!("rank {rank}, role {}", std::env::var("ROLE_NAME").unwrap());
            eprintln!("rank {rank} says it");
        }
        "talk" => loop {
            println!("rank {rank} goes on");
        },
        "no room" => {
            ready(rank);
            forever();
        }
        "twice" => report_result("done").unwrap(),
        other => panic!("no role {other}"),
    }
}

fn report(rank: usize) {
    println!("a line");
    print!("half of ");
    if rank != 1 {
        report_result("an earlier report").unwrap();
        report_result(&format!("{{\"rank\":{rank}}}")).unwrap();
    }
    print!("a line");
    stdout().flush().unwrap();
    exit(0)
}

fn environment() {
    let names = [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "GIRANDOLE_SECRET", "GIRANDOLE_JOB_ID", "RAYON_NUM_THREADS",
    ];
    let words = names.map(|name| format!("{name}={}", std::env::var(name).unwrap_or_default()));
    let secret = std::env::var("GIRANDOLE_SECRET").unwrap();
    assert!(!std::env::args().any(|arg| arg.contains(&secret)));
    report_result(&words.join(" ")).unwrap();
}

/// Writes to both streams in chunks that are not aligned to lines.
fn lines(rank: usize) {
    let letter = char::from(b'a' + rank as u8).to_string();
    let line = |i: usize| format!("{rank} {i} {}\n", letter.repeat(i * 7 % 9000));
    let text: String = (0..1000).map(line).collect();
    let write = |mut stream: Box<dyn Write + Send>| {
        for chunk in text.as_bytes().chunks(3001) {
            stream.write_all(chunk).unwrap();
            stream.flush().unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| write(Box::new(stdout())));
        scope.spawn(|| write(Box::new(stderr())));
    });
}

fn long_line(rank: usize) {
    let letter = char::from(b'a' + rank as u8).to_string();
    print!("{}", letter.repeat(3 << 20));
    stdout().flush().unwrap();
    exit(0)
}

fn code_3(rank: usize) {
    if rank != 1 {
        forever();
    }
    (0..30).for_each(|i| eprintln!("line {i}"));
    eprint!("the end");
    exit(3)
}

/// Rank 0 is connected to all others; rank 1 waits to be killed. A rank whose connection ends exits with this code.
fn peers(rank: usize, code: i32) {
    if rank == 0 {
        let listener = TcpListener::from(stdin().as_fd().try_clone_to_owned().unwrap());
        let mut streams: Vec<_> = (1..variable("WORLD_SIZE")).map(|_| listener.accept().unwrap().0).collect();
        // Each rank sends its number. The connection of rank 1 then stays silent until its end.
        let mut number = [0];
        let mut is_rank_1 = |stream: &mut TcpStream| stream.read_exact(&mut number).is_ok() && number == [1];
        let ranks: Vec<bool> = streams.iter_mut().map(&mut is_rank_1).collect();
        let first = ranks.iter().position(|&rank_1| rank_1).unwrap();
        ready(rank);
        let _ = streams[first].read(&mut [0]);
    } else {
        let mut stream = TcpStream::connect(("127.0.0.1", variable("MASTER_PORT") as u16)).unwrap();
        stream.write_all(&[rank as u8]).unwrap();
        ready(rank);
        let _ = stream.read(&mut [0]);
    }
    eprintln!("rank {rank}: a peer failed");
    exit(code)
}

/// Both ranks blame another one, rank 1 first.
fn only_peers(rank: usize) {
    see_the_end_of_rank_1(rank);
    eprintln!("rank {rank}: a peer failed");
    exit(EXIT_PEER_FAILED)
}

/// On rank 0: returns when rank 1 has ended. On rank 1: returns when rank 0 waits for that.
pub(crate) fn see_the_end_of_rank_1(rank: usize) {
    if rank == 0 {
        let listener = TcpListener::from(stdin().as_fd().try_clone_to_owned().unwrap());
        let mut pid = [0; 4];
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut pid).unwrap();
        let pid = Pid::from_raw(i32::from_le_bytes(pid)).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        stream.write_all(&[0]).unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
    } else {
        let mut stream = TcpStream::connect(("127.0.0.1", variable("MASTER_PORT") as u16)).unwrap();
        stream.write_all(&std::process::id().to_le_bytes()).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
}

/// Rank 0 is done at once; the others only when it has ended.
fn early(rank: usize) {
    if rank == 0 {
        exit(0);
    }
    // The kernel accepts the connection as long as rank 0 lives, and closes it when rank 0 ends.
    if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", variable("MASTER_PORT") as u16)) {
        let _ = stream.read(&mut [0]);
    }
    report_result("went on").unwrap();
}

/// Takes a while to end when it is asked to.
fn saver(rank: usize) {
    let mut signals = Signals::new([SIGTERM]).unwrap();
    ready(rank);
    signals.forever().next();
    std::thread::sleep(Duration::from_millis(300));
    println!("rank {rank} has saved");
    exit(0)
}

/// Handles signals; a polite rank ends by those that ask it to.
fn handler(rank: usize, polite: bool) {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1, SIGUSR2]).unwrap();
    ready(rank);
    for signal in signals.forever() {
        println!("rank {rank} got {signal}");
        if polite && [SIGINT, SIGTERM].contains(&signal) {
            exit(0);
        }
    }
}
